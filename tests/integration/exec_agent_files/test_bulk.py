"""Large streams against an agent of its own process: its memory stays flat, and nothing is left open."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

from orchard.exec.v1 import file_service_pb2 as pb
from orchard.exec.v1.file_service_pb2_grpc import FileServiceStub

from tests.integration.exec_agent_files.calls import S, read, write
from tests.integration.exec_agent_files.conftest import AgentProcess

_GIBIBYTE = 1 << 30
_GROWTH = 48 << 20  # batches, gRPC's own buffers, and arenas of the allocator
_CHUNK = bytes(range(256)) * 1024


async def _blocks(total: int) -> AsyncIterator[bytes]:
    for _ in range(total // len(_CHUNK)):
        yield _CHUNK


async def _warm_up(stub: FileServiceStub) -> None:
    await write(stub, "small", b"x" * (8 << 20))
    assert len(await read(stub, "small")) == 8 << 20


async def test_a_gibibyte_goes_in_and_out_with_flat_memory(
    agent: AgentProcess, agent_stub: FileServiceStub, work: Path
) -> None:
    await _warm_up(agent_stub)
    before, _ = agent.memory()
    assert await write(agent_stub, "large", _blocks(_GIBIBYTE)) == _GIBIBYTE
    digest = hashlib.sha256()
    size = 0
    async for message in agent_stub.ReadFile(pb.ReadFileRequest(sandbox_id=S, path="large")):
        digest.update(message.data)
        size += len(message.data)
    _, peak = agent.memory()
    assert size == _GIBIBYTE
    expected = hashlib.sha256()
    for _ in range(_GIBIBYTE // len(_CHUNK)):
        expected.update(_CHUNK)
    assert digest.digest() == expected.digest()
    assert peak - before < _GROWTH
    (work / "large").unlink()


async def test_a_slow_reader_holds_little(agent: AgentProcess, agent_stub: FileServiceStub, work: Path) -> None:
    await _warm_up(agent_stub)
    with (work / "large").open("wb") as file:
        file.truncate(_GIBIBYTE)
    before, _ = agent.memory()
    call = agent_stub.ReadFile(pb.ReadFileRequest(sandbox_id=S, path="large"))
    await call.read()
    # While it does not go on reading, the agent serves others.
    for _ in range(20):
        await read(agent_stub, "small")
    _, peak = agent.memory()
    call.cancel()
    assert peak - before < _GROWTH


async def test_archives_with_flat_memory(agent: AgentProcess, agent_stub: FileServiceStub, work: Path) -> None:
    await _warm_up(agent_stub)
    source = work / "source"
    source.mkdir()
    with (source / "large").open("wb") as file:
        file.truncate(_GIBIBYTE // 2)
    for number in range(2000):
        (source / f"{number:04}").write_bytes(b"%d" % number)
    before, _ = agent.memory()

    async def messages() -> AsyncIterator[pb.UploadArchiveRequest]:
        yield pb.UploadArchiveRequest(sandbox_id=S, start=pb.UploadArchiveStart(path="target"))
        async for message in agent_stub.DownloadArchive(pb.DownloadArchiveRequest(sandbox_id=S, path="source")):
            yield pb.UploadArchiveRequest(data=message.data)
        yield pb.UploadArchiveRequest(end=True)

    result = await agent_stub.UploadArchive(messages())
    _, peak = agent.memory()
    assert result.entries == 2001
    assert (work / "target/large").stat().st_size == _GIBIBYTE // 2
    assert (work / "target/1234").read_bytes() == b"1234"
    assert peak - before < _GROWTH
    (work / "target/large").unlink()


async def test_a_directory_of_many_files_is_listed_with_flat_memory(
    agent: AgentProcess, agent_stub: FileServiceStub, work: Path
) -> None:
    await _warm_up(agent_stub)
    (work / "many").mkdir()
    for number in range(12_000):
        (work / f"many/{number:06}").touch()
    before, _ = agent.memory()
    names: list[str] = []
    request = pb.ListDirectoryRequest(sandbox_id=S, path="many", page_size=5000)
    while True:
        page = await agent_stub.ListDirectory(request)
        names += [file.path for file in page.files]
        request.page_token = page.next_page_token
        if not request.page_token:
            break
    _, peak = agent.memory()
    assert names == [f"{number:06}" for number in range(12_000)]
    assert peak - before < _GROWTH
    await agent_stub.Remove(pb.RemoveRequest(sandbox_id=S, path="many", recursive=True))
    assert not (work / "many").exists()


async def test_nothing_stays_open(agent: AgentProcess, agent_stub: FileServiceStub, work: Path) -> None:
    await _warm_up(agent_stub)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("f")
        info.size = 3 << 20
        archive.addfile(info, io.BytesIO(b"x" * info.size))
    before = agent.descriptors()

    async def broken(make_first, make_next) -> AsyncIterator[object]:
        yield make_first
        for _ in range(3):
            yield make_next
        await asyncio.Event().wait()

    for _ in range(20):
        calls = [
            agent_stub.WriteFile(
                broken(
                    pb.WriteFileRequest(sandbox_id=S, start=pb.WriteFileStart(path="broken")),
                    pb.WriteFileRequest(data=b"x" * (1 << 20)),
                )
            ),
            agent_stub.UploadArchive(
                broken(
                    pb.UploadArchiveRequest(sandbox_id=S, start=pb.UploadArchiveStart(path=".")),
                    pb.UploadArchiveRequest(data=buffer.getvalue()[: 1 << 20]),
                )
            ),
            agent_stub.ReadFile(pb.ReadFileRequest(sandbox_id=S, path="small")),
            agent_stub.DownloadArchive(pb.DownloadArchiveRequest(sandbox_id=S, path=".")),
        ]
        await calls[2].read()
        await calls[3].read()
        for call in calls:
            call.cancel()
    async with asyncio.timeout(110):
        while agent.descriptors() > before or [p.name for p in work.iterdir()] != ["small"]:
            await asyncio.sleep(0.02)  # the agent hears of the cancels a little later
