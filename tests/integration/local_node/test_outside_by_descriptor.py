"""The agent has descriptors of folders outside its sandbox, and no path of a request leads through one of them."""

import io
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from orchard.exec.v1 import file_service_pb2 as files
from orchard.exec.v1 import file_service_pb2_grpc

from services.common.peer_status import peer_status
from tests.integration.local_node.harness import Box, NodeProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAYS = ("/proc/self/fd/{fd}", "/proc/thread-self/fd/{fd}", "/dev/fd/{fd}", "/proc/{pid}/fd/{fd}", "/srv/planted-{fd}")
REFUSED = {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION}
PATCH = b"--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n"


class Files:
    """The calls of the FileService, each on one path."""

    def __init__(self, box: Box) -> None:
        self._id = box.sandbox.sandbox_id
        self._stub = file_service_pb2_grpc.FileServiceStub(box.channel)
        self._more: Any = {"metadata": box._metadata, "timeout": 30}

    async def _send(self, call: Any) -> None:
        with peer_status(call):
            await call

    async def stat(self, path: str) -> None:
        await self._stub.Stat(files.StatRequest(sandbox_id=self._id, path=f"{path}/.", follow=True), **self._more)

    async def list(self, path: str) -> None:
        await self._stub.ListDirectory(files.ListDirectoryRequest(sandbox_id=self._id, path=path), **self._more)

    async def read(self, path: str) -> None:
        call = self._stub.ReadFile(files.ReadFileRequest(sandbox_id=self._id, path=f"{path}/agent.log"), **self._more)
        async for _ in call:
            pass

    async def download(self, path: str) -> None:
        call = self._stub.DownloadArchive(files.DownloadArchiveRequest(sandbox_id=self._id, path=path), **self._more)
        async for _ in call:
            pass

    async def make(self, path: str) -> None:
        await self._stub.MakeDirectory(
            files.MakeDirectoryRequest(sandbox_id=self._id, path=f"{path}/new"), **self._more
        )

    async def move_out(self, path: str) -> None:
        request = files.MoveRequest(sandbox_id=self._id, source_path="/srv/own", target_path=f"{path}/new")
        await self._stub.Move(request, **self._more)

    async def move_in(self, path: str) -> None:
        request = files.MoveRequest(sandbox_id=self._id, source_path=f"{path}/journal", target_path="/srv/taken")
        await self._stub.Move(request, **self._more)

    async def remove(self, path: str) -> None:
        request = files.RemoveRequest(sandbox_id=self._id, path=f"{path}/journal", recursive=True)
        await self._stub.Remove(request, **self._more)

    async def write(self, path: str) -> None:
        start = files.WriteFileRequest(sandbox_id=self._id, start=files.WriteFileStart(path=f"{path}/new"))
        messages = [start, files.WriteFileRequest(data=b"x"), files.WriteFileRequest(end=True)]
        await self._send(self._stub.WriteFile(iter(messages), **self._more))

    async def patch(self, path: str) -> None:
        start = files.ApplyPatchRequest(sandbox_id=self._id, start=files.ApplyPatchStart(path=path))
        messages = [start, files.ApplyPatchRequest(data=PATCH), files.ApplyPatchRequest(end=True)]
        await self._send(self._stub.ApplyPatch(iter(messages), **self._more))

    async def unpack(self, path: str) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("new"), io.BytesIO())
        start = files.UploadArchiveRequest(sandbox_id=self._id, start=files.UploadArchiveStart(path=path))
        data = files.UploadArchiveRequest(data=packed.getvalue())
        await self._send(
            self._stub.UploadArchive(iter([start, data, files.UploadArchiveRequest(end=True)]), **self._more)
        )


CALLS: tuple[Callable[[Files, str], Awaitable[None]], ...] = (
    Files.stat,
    Files.list,
    Files.read,
    Files.download,
    Files.make,
    Files.move_out,
    Files.move_in,
    Files.remove,
    Files.write,
    Files.patch,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(shared: NodeProcess) -> AsyncIterator[Box]:
    box = await shared.box()
    await box.healthy()
    await box.ok("touch /srv/own")
    yield box
    await shared.delete(box.uid)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ways(box: Box) -> list[str]:
    """Paths to the folders that the agent has descriptors of, by its own links and by links that were planted."""
    host = Path(f"/proc/{box.agent_pid}")
    folders = [int(fd.name) for fd in (host / "fd").iterdir() if stat.S_ISDIR(fd.stat().st_mode)]
    assert len(folders) >= 2, "the agent has no folders open: then this proves nothing"
    (inside,) = (line.split()[-1] for line in (host / "status").read_text().splitlines() if line.startswith("NSpid"))
    for fd in folders:
        await box.ok(f"ln -sfn /proc/self/fd/{fd} /srv/planted-{fd}")
    found = [way.format(fd=fd, pid=inside) for fd in folders for way in WAYS]
    return [*found, *(f"{way}/.." for way in found)]


def outside(box: Box) -> dict[str, tuple[int, int]]:
    """What stands in those folders and beside them."""
    found = {}
    for fd in Path(f"/proc/{box.agent_pid}/fd").iterdir():
        if not stat.S_ISDIR(fd.stat().st_mode):
            continue
        for folder in (fd, fd / ".."):
            with os.scandir(folder) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    found[f"{folder}/{entry.name}"] = (status.st_ino, stat.S_IFMT(status.st_mode))
    return found


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_no_call_leads_out(box: Box, ways: list[str], call: Callable[[Files, str], Awaitable[None]]) -> None:
    before = outside(box)
    for way in ways:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(Files(box), way)
        assert caught.value.code() in REFUSED, (way, caught.value.details())
    assert outside(box) == before


async def test_an_archive_is_unpacked_inside_or_not_at_all(box: Box, ways: list[str]) -> None:
    """It makes the folder that it is told: of a path that names nothing here, one in the sandbox."""
    before = outside(box)
    for way in ways:
        try:
            await Files(box).unpack(way)
        except grpc.aio.AioRpcError as error:
            assert error.code() in REFUSED, (way, error.details())
    assert outside(box) == before


@pytest.mark.parametrize("name", ["mem", "environ", "maps", "stat", "fd/0", "fdinfo/0", "cwd/proc/self/mem"])
async def test_the_agent_itself_is_no_file_of_the_sandbox(box: Box, name: str) -> None:
    stub = file_service_pb2_grpc.FileServiceStub(box.channel)
    for folder in ("/proc/self", "/proc/thread-self"):
        request = files.ReadFileRequest(sandbox_id=box.sandbox.sandbox_id, path=f"{folder}/{name}", length=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.ReadFile(request, metadata=box._metadata, timeout=110):
                pass
        assert caught.value.code() in REFUSED


async def test_what_the_kernel_tells_of_the_machine_can_be_read(box: Box) -> None:
    stub = file_service_pb2_grpc.FileServiceStub(box.channel)
    request = files.ReadFileRequest(sandbox_id=box.sandbox.sandbox_id, path="/proc/meminfo")
    text = b"".join([part.data async for part in stub.ReadFile(request, metadata=box._metadata, timeout=110)])
    assert b"MemTotal" in text
