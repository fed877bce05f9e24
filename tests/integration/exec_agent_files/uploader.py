"""A client in a process of its own that begins uploads and never ends them.

python -m tests.integration.exec_agent_files.uploader ADDRESS METADATA SANDBOX FOLDER

METADATA is a JSON object. Of each upload two small chunks are sent: of the files FOLDER/new-N/file, and of patches of
FOLDER/patched-N that make sense as far as they go. Then it prints a line; sent a line, it cancels its calls.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc.aio
from orchard.exec.v1 import file_service_pb2 as pb
from orchard.exec.v1.file_service_pb2_grpc import FileServiceStub

UPLOADS: Final = 8
BEFORE: Final = "1\n2\n"
FOLDERS: Final = [f"new-{number}" for number in range(UPLOADS)]
PATCHED: Final = [f"patched-{number}" for number in range(UPLOADS)]
_ROOT: Final = Path(__file__).resolve().parents[3]
_SECONDS: Final = 60.0


class Uploader:
    """The program as it runs, with all of its uploads on their way."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        await self._process.wait()

    async def cancel(self) -> None:
        """Let it cancel its calls and live on."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        await self.read("cancelled")

    async def read(self, expected: str) -> None:
        assert self._process.stdout is not None
        async with asyncio.timeout(_SECONDS):
            assert await self._process.stdout.readline() == f"{expected}\n".encode()


@asynccontextmanager
async def uploader(
    address: str, metadata: Mapping[str, str], sandbox_id: str, folder: str | Path
) -> AsyncIterator[Uploader]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, address, json.dumps(dict(metadata)), sandbox_id, str(folder)),
        cwd=_ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    started = Uploader(process)
    try:
        await started.read("sent")
        yield started
    finally:
        if process.returncode is None:
            await started.kill()


def _diff(name: str, line: int) -> bytes:
    """Changes one of the two lines."""
    old = BEFORE.splitlines()
    hunk = [f" {text}" if number != line else f"-{text}\n+changed" for number, text in enumerate(old)]
    return "\n".join([f"--- a/{name}", f"+++ b/{name}", "@@ -1,2 +1,2 @@", *hunk, ""]).encode()


async def _begin(stub: FileServiceStub, metadata: Any, sandbox_id: str, folder: str) -> list[Any]:
    calls: list[Any] = []
    for made, patched in zip(FOLDERS, PATCHED, strict=True):
        write: Any = stub.WriteFile(metadata=metadata)
        start = pb.WriteFileStart(path=f"{folder}/{made}/file", make_parents=True)
        await write.write(pb.WriteFileRequest(sandbox_id=sandbox_id, start=start))
        patch: Any = stub.ApplyPatch(metadata=metadata)
        await patch.write(pb.ApplyPatchRequest(sandbox_id=sandbox_id, start=pb.ApplyPatchStart(path=folder)))
        for line in range(2):
            await write.write(pb.WriteFileRequest(data=b"chunk"))
            await patch.write(pb.ApplyPatchRequest(data=_diff(f"{patched}.{line}", line)))
        calls += [write, patch]
    return calls


async def main(address: str, metadata: str, sandbox_id: str, folder: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        shown = tuple(json.loads(metadata).items())
        calls = await _begin(FileServiceStub(channel), shown, sandbox_id, folder)
        print("sent", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for call in calls:
            call.cancel()
        print("cancelled", flush=True)
        await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
