"""What a repeat finds, against a gRPC server on which the first attempt ends UNAVAILABLE: carried out or not, and with
somebody else at work in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import orchard
import pytest
from orchard import AsyncSandbox, AsyncSandboxClient
from orchard.exec.v1 import (
    exec_service_pb2,
    exec_service_pb2_grpc,
    file_pb2,
    file_service_pb2,
    file_service_pb2_grpc,
)

from services.common.errors import AlreadyExistsError, NotFoundError, OrchardError, UnavailableError
from services.common.interceptor import STATUS_DETAILS_KEY
from tests.integration.client.proxy import Proxy

LOST, NOT_DONE, REFUSED = "its answer was lost", "it was not carried out", "it was refused before the agent"


class Files(file_service_pb2_grpc.FileServiceServicer, exec_service_pb2_grpc.ExecServiceServicer):
    """Files of a real folder. The first change fails as `first` says, and then `between` happens."""

    def __init__(self) -> None:
        self.first: str | None = None
        self.between: Callable[[], object] = lambda: None
        self.signals: list[exec_service_pb2.SignalExecRequest] = []

    async def change(self, context, act: Callable[[], object]) -> None:
        first, self.first = self.first, None
        if first in (None, LOST):
            with self.told(OSError) as told:
                act()
            if told and first is None:
                await abort(context, told[0])
        if first is not None:
            self.between()
            if first == REFUSED:
                await abort(context, UnavailableError("it starts", reason="SANDBOX_STARTING"))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    @contextlib.contextmanager
    def told(self, kind):
        told: list[OrchardError] = []
        try:
            yield told
        except FileNotFoundError as error:
            told.append(NotFoundError(str(error), reason="FILE_NOT_FOUND"))
        except FileExistsError as error:
            told.append(AlreadyExistsError(str(error), reason="FILE_EXISTS"))

    async def Stat(self, request, context):
        if not os.path.lexists(request.path):
            await abort(context, NotFoundError("not there", reason="FILE_NOT_FOUND"))
        status = Path(request.path).lstat()
        kind = file_pb2.FILE_TYPE_DIRECTORY if Path(request.path).is_dir() else file_pb2.FILE_TYPE_REGULAR
        info = file_pb2.FileInfo(path=request.path, type=kind, size=status.st_size, mode=status.st_mode & 0o7777)
        info.modify_time.FromNanoseconds(status.st_mtime_ns)
        return file_service_pb2.StatResponse(file=info)

    async def Move(self, request, context):
        await self.change(context, lambda: Path(request.source_path).rename(request.target_path))
        return file_service_pb2.MoveResponse()

    async def Remove(self, request, context):
        await self.change(context, lambda: Path(request.path).unlink())
        return file_service_pb2.RemoveResponse()

    async def MakeDirectory(self, request, context):
        await self.change(context, lambda: Path(request.path).mkdir())
        return file_service_pb2.MakeDirectoryResponse()

    async def WriteFile(self, requests, context):
        messages = [request async for request in requests]
        data = b"".join(message.data for message in messages)

        def write() -> None:
            with Path(messages[0].start.path).open("xb") as file:
                file.write(data)

        await self.change(context, write)
        return file_service_pb2.WriteFileResponse(size=len(data))

    async def SignalExec(self, request, context):
        self.signals.append(request)
        await self.change(context, lambda: None)
        return exec_service_pb2.SignalExecResponse()


async def abort(context, error: OrchardError) -> None:
    details = ((STATUS_DETAILS_KEY, error.to_status().SerializeToString()),)
    await context.abort(error.code, error.message, details)


@pytest.fixture
async def files() -> AsyncIterator[Files]:
    servicer = Files()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    file_service_pb2_grpc.add_FileServiceServicer_to_server(servicer, server)
    exec_service_pb2_grpc.add_ExecServiceServicer_to_server(servicer, server)
    servicer.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer
    await server.stop(None)


@pytest.fixture
async def scripted(files: Files) -> AsyncIterator[AsyncSandbox]:
    async with AsyncSandboxClient(f"127.0.0.1:{files.port}", api_key="test") as client:
        yield client.attach("one")


async def test_a_move_whose_answer_was_lost_is_done(files: Files, scripted: AsyncSandbox, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("x")
    files.first = LOST
    await scripted.move(str(source), str(target))
    assert target.read_text() == "x"


@pytest.mark.parametrize("first", [LOST, NOT_DONE, REFUSED])
async def test_what_never_was_there_is_not_moved(
    files: Files, scripted: AsyncSandbox, tmp_path: Path, first: str
) -> None:
    """The target was there before: it says nothing."""
    target = tmp_path / "target"
    target.write_text("old")
    files.first = first
    with pytest.raises(orchard.FileNotFound):
        await scripted.move(str(tmp_path / "source"), str(target), overwrite=True)


@pytest.mark.parametrize(
    ("first", "error"), [(LOST, None), (NOT_DONE, orchard.OutcomeUnknown), (REFUSED, orchard.FileNotFound)]
)
async def test_a_source_that_goes_meanwhile(
    files: Files, scripted: AsyncSandbox, tmp_path: Path, first: str, error: type[Exception] | None
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("wanted")
    target.write_text("of somebody else")
    files.first, files.between = first, lambda: source.unlink(missing_ok=True)
    if error is None:
        await scripted.move(str(source), str(target), overwrite=True)
        assert target.read_text() == "wanted"
        return
    with pytest.raises(error) as caught:
        await scripted.move(str(source), str(target), overwrite=True)
    assert type(caught.value) is error
    assert target.read_text() == "of somebody else"


@pytest.mark.parametrize("first", [LOST, NOT_DONE])
async def test_what_was_moved_and_changed_since_is_unknown(
    files: Files, scripted: AsyncSandbox, tmp_path: Path, first: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("wanted")

    def between() -> None:
        source.unlink(missing_ok=True)
        target.unlink(missing_ok=True)

    files.first, files.between = first, between
    with pytest.raises(orchard.OutcomeUnknown, match="is gone, and is not at"):
        await scripted.move(str(source), str(target))


async def test_a_target_whose_folder_is_missing_is_no_mystery(
    files: Files, scripted: AsyncSandbox, tmp_path: Path
) -> None:
    (tmp_path / "source").write_text("x")
    files.first = LOST
    with pytest.raises(orchard.FileNotFound):
        await scripted.move(str(tmp_path / "source"), str(tmp_path / "missing" / "target"))


@pytest.mark.parametrize("first", [LOST, NOT_DONE, REFUSED])
async def test_removing_what_never_was_there(files: Files, scripted: AsyncSandbox, tmp_path: Path, first: str) -> None:
    files.first = first
    with pytest.raises(orchard.FileNotFound):
        await scripted.remove(str(tmp_path / "nothing"))


@pytest.mark.parametrize("first", [LOST, NOT_DONE, REFUSED])
async def test_removing_what_was_there(files: Files, scripted: AsyncSandbox, tmp_path: Path, first: str) -> None:
    (tmp_path / "file").write_text("x")
    files.first = first
    await scripted.remove(str(tmp_path / "file"))
    assert not (tmp_path / "file").exists()


async def test_what_somebody_else_removed_before_the_agent_was_asked(
    files: Files, scripted: AsyncSandbox, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    files.first, files.between = REFUSED, path.unlink
    with pytest.raises(orchard.FileNotFound):
        await scripted.remove(str(path))


@pytest.mark.parametrize(
    "case",
    [
        (LOST, False, orchard.OutcomeUnknown),
        (NOT_DONE, True, orchard.OutcomeUnknown),
        (NOT_DONE, False, None),
        (REFUSED, True, orchard.FileExists),
        (REFUSED, False, None),
    ],
)
@pytest.mark.parametrize("what", ["directory", "file"])
async def test_a_lock_is_held_by_whoever_knows_that_he_made_it(
    files: Files, scripted: AsyncSandbox, tmp_path: Path, case: tuple[str, bool, type[Exception] | None], what: str
) -> None:
    """A case: what became of the first attempt, whether somebody else took the lock after it, and how the call ends."""
    first, other, error = case
    path = tmp_path / "lock"

    def take() -> None:
        if what == "file":
            path.write_text("locked")
        else:
            path.mkdir()

    async def lock() -> object:
        if what == "file":
            return await scripted.write_file(str(path), "locked", exclusive=True)
        return await scripted.make_directory(str(path), parents=False)

    files.first = first
    if other:
        files.between = take
    if error is None:
        await lock()
    else:
        with pytest.raises(error) as caught:
            await lock()
        assert type(caught.value) is error
    assert path.exists()


async def test_the_retries_of_a_signal_are_one_signal(files: Files, scripted: AsyncSandbox) -> None:
    process = scripted.process("some")
    files.first = LOST
    await process.signal(signal.SIGUSR1)
    await process.signal(signal.SIGUSR1)
    first, repeat, second = (request.request_id for request in files.signals)
    assert first
    assert first == repeat != second


async def test_a_signal_whose_answer_was_lost_arrives_once(
    shaky: AsyncSandboxClient, asandbox: AsyncSandbox, proxy: Proxy
) -> None:
    sandbox = shaky.attach(asandbox.sandbox_id)
    log = "/tmp/signals-once"
    process = await sandbox.start(f"trap 'echo usr1 >> {log}' USR1; touch {log}; while :; do sleep 0.02; done")
    while not await asandbox.exists(log):
        await asyncio.sleep(0.02)
    proxy.drop_next_answer()
    await process.signal(signal.SIGUSR1, leader_only=True)
    assert proxy.cuts == 1
    while not await asandbox.read_text(log):
        await asyncio.sleep(0.02)
    await process.cancel()
    await process.wait(110)
    assert await asandbox.read_text(log) == "usr1\n"
