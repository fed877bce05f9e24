"""More than fits into memory: gigabytes of output and files pass with flat memory, and go on where they were cut.

Half a gigabyte by default; `make chaos` makes it ten of output and a file of five.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orchard
import pytest

from tests.support.platform import PlatformProcess, descendants

MIB = 1 << 20
IS_WHOLE = int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "3")) > 3
OUTPUT_BLOCKS, FILE_BLOCKS = (10_240, 5_120) if IS_WHOLE else (512, 512)
MOST_BYTES = 300 * MIB
"""What no process may ever hold, which is less than what passes: of any of them the code alone is up to 120 MiB."""
WRITE = """python3 -c '
import sys
for number in range({blocks}):
    sys.stdout.buffer.write(number.to_bytes(8, "big") * (1 << 17))
'"""
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]


def block(number: int) -> bytes:
    """The number-th MiB of what is moved: each differs, so that one that is lost or comes twice is noticed."""
    return number.to_bytes(8, "big") * (1 << 17)


@pytest.fixture
async def sandbox(platform: PlatformProcess) -> AsyncIterator[orchard.AsyncSandbox]:
    async with (
        orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key, retry_timeout=600) as client,
        await client.create() as sandbox,
    ):
        yield sandbox


@contextmanager
def flat_memory(platform: PlatformProcess) -> Iterator[None]:
    """Every process of the platform stays small meanwhile, and this one as it was."""
    most: dict[str, int] = {}
    before = anonymous_bytes(os.getpid())

    async def watch() -> None:
        while True:
            sizes = {str(pid): anonymous_bytes(pid) for pid in (one.pid for one in descendants(platform.pid))}
            sizes["this one's growth"] = anonymous_bytes(os.getpid()) - before
            for name, size in sizes.items():
                most[name] = max(most.get(name, 0), size)
            await asyncio.sleep(0.1)

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        assert not watching.done(), watching
        watching.cancel()
    assert len(most) > 3, "the platform's processes are looked at"
    assert max(most.values()) < MOST_BYTES, sorted(most.items(), key=lambda item: -item[1])[:5]


def anonymous_bytes(pid: int) -> int:
    """Resident memory of no file, and not shared, of which PostgreSQL has much, once. 0 of a process that has ended."""
    with suppress(OSError):
        values = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return int(values.get("RssAnon", "0").split()[0]) << 10
    return 0


async def test_output_of_gigabytes(platform: PlatformProcess, sandbox: orchard.AsyncSandbox) -> None:
    with flat_memory(platform):
        stream = sandbox.exec_stream(WRITE.format(blocks=OUTPUT_BLOCKS), timeout=1800)
        number, rest = 0, b""
        async for chunk in stream:
            rest += chunk.data
            while len(rest) >= MIB:
                assert rest[:MIB] == block(number)
                number, rest = number + 1, rest[MIB:]
    assert (number, rest) == (OUTPUT_BLOCKS, b"")
    assert stream.result.exit_code == 0


async def test_a_file_of_gigabytes_both_ways_over_cut_connections(
    platform: PlatformProcess, sandbox: orchard.AsyncSandbox, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        for number in range(FILE_BLOCKS):
            file.write(block(number))
    cuts: list[int] = []

    def cut_once_half_is_done(done: int, total: int) -> None:
        if len(cuts) % 2 == 0 and done > total // 2 > 0:
            cuts.append(platform.kill_service("gateway"))

    with flat_memory(platform):
        await sandbox.upload(source, "/root/large", progress=cut_once_half_is_done)
        assert len(cuts) == 1
        cuts.append(0)
        assert (await sandbox.exec("stat -c %s /root/large")).stdout.strip() == str(FILE_BLOCKS * MIB)
        source.unlink()
        await sandbox.download("/root/large", target, progress=cut_once_half_is_done)
    assert len(cuts) == 3
    assert target.stat().st_size == FILE_BLOCKS * MIB
    with target.open("rb") as copy:
        for number in range(FILE_BLOCKS):
            assert copy.read(MIB) == block(number), f"MiB {number}"
    target.unlink()
    await asyncio.to_thread(platform.wait_ready, "gateway")
