"""Uploads whose client goes away, through the gateway."""

from __future__ import annotations

import asyncio

import pytest
from orchard import AsyncSandbox

from tests.integration.exec_agent_files.uploader import BEFORE, FOLDERS, PATCHED, uploader
from tests.support.platform import PlatformProcess

ROUNDS = 6


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
        async with uploader(platform.endpoint, metadata, asandbox.sandbox_id, target) as program, asyncio.timeout(60):
            while not await names() >= set(FOLDERS):
                await asyncio.sleep(0.01)
            await getattr(program, how)()
            # A folder made for a file goes with the upload that is dropped, and stays with one that is not.
            while (left := await names() - set(files)) != set():
                assert not [name for name in left if name.endswith("/file")]
                await asyncio.sleep(0.01)
    assert await names() == set(files)
    assert {await asandbox.read_text(f"{target}/{name}") for name in files} == {BEFORE}
