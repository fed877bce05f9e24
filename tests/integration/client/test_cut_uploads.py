"""Uploads whose client goes away, through the gateway."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from orchard import AsyncSandbox

from tests.integration.exec_agent_files.uploader import BEFORE, FOLDERS, PATCHED, uploader
from tests.support.platform import PlatformProcess

ROUNDS = 6


class SlowDisk(list[str]):
    """Patterns that match nothing and take as long as a slow disk, for every name."""

    def __iter__(self) -> Iterator[str]:
        time.sleep(0.0005)
        return super().__iter__()


@pytest.mark.parametrize("how", ["kill", "cancel"])
async def test_a_client_that_goes_away_leaves_nothing(
    platform: PlatformProcess, asandbox: AsyncSandbox, how: str
) -> None:
    target = f"/tmp/cut-uploads-{how}"
    files = [f"{name}.{line}" for name in PATCHED for line in range(2)]
    for name in files:
        await asandbox.write_file(f"{target}/{name}", BEFORE)

    async def names() -> set[str]:
        return {file.path.removeprefix(f"{target}/") for file in await asandbox.list_directory(target, recursive=True)}

    metadata = {"authorization": f"Bearer {platform.api_key}"}
    for _ in range(ROUNDS):
        async with uploader(platform.endpoint, metadata, asandbox.sandbox_id, target) as program, asyncio.timeout(110):
            while not await names() >= set(FOLDERS):
                await asyncio.sleep(0.01)
            await getattr(program, how)()
            # A folder made for a file goes with the upload that is dropped, and stays with one that is not.
            while (left := await names() - set(files)) != set():
                assert not [name for name in left if name.endswith("/file")]
                await asyncio.sleep(0.01)
    assert await names() == set(files)
    assert {await asandbox.read_text(f"{target}/{name}") for name in files} == {BEFORE}


@pytest.mark.parametrize("what", ["upload a folder", "upload a file", "download a folder", "download a file"])
@pytest.mark.parametrize("cancels", [1, 3])
async def test_a_transfer_that_is_cancelled_at_work_on_local_files_ends_as_cancelled(
    asandbox: AsyncSandbox, tmp_path: Path, what: str, cancels: int
) -> None:
    here, there, made = tmp_path / "source", f"/tmp/cancelled-{tmp_path.name}", tmp_path / "made"
    here.mkdir()
    if what.endswith("file"):
        (here / "0").write_bytes(os.urandom(3 << 20))
    else:
        for number in range(1500):
            (here / str(number)).touch()
    if what.startswith("download"):
        await asandbox.upload(here, there)
    transfers = {
        "upload a folder": lambda: asandbox.upload(here, f"{there}/", exclude=SlowDisk(), progress=progress),
        "upload a file": lambda: asandbox.upload(here / "0", f"{there}/0", progress=progress),
        "download a folder": lambda: asandbox.download(there, made, progress=progress),
        "download a file": lambda: asandbox.download(f"{there}/0", made / "0", progress=progress),
    }

    def progress(done: int, total: int) -> None:
        # The next block is read or written in a thread while the transfer is told to end, once or by an impatient user.
        for count in range(cancels):
            asyncio.get_running_loop().call_later(count * 0.001, transfer.cancel)

    transfer = asyncio.create_task(transfers[what]())
    with pytest.raises(asyncio.CancelledError):
        await transfer
    assert list(made.glob("*")) == []
    await asandbox.remove(there, recursive=True, missing_ok=True)
