"""Uploads that break off and are gone on with, by another stream under the same id."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from orchard.exec.v1 import file_service_pb2 as pb
from orchard.exec.v1.file_service_pb2_grpc import FileServiceStub

from services.common.errors import OrchardError, UnavailableError
from services.exec_agent.files.uploads import Uploads, UploadStream
from services.exec_agent.files.writing import FileWriter, WriteOptions
from tests.integration.exec_agent_files.calls import S, answer, fails

MEBIBYTE = 1 << 20
CONTENT = secrets.token_bytes(5 * MEBIBYTE + 17)


async def send(
    stub: FileServiceStub, data: bytes, *, offset: int = 0, end: bool = True, upload_id: str = "u", **start: Any
) -> int:
    """One stream that begins at `offset`; without `end` it is cut."""

    async def messages() -> AsyncIterator[pb.WriteFileRequest]:
        where = pb.WriteFileStart(**{"path": "file", "upload_id": upload_id, "offset": offset, **start})
        yield pb.WriteFileRequest(sandbox_id=S, start=where)
        for position in range(0, len(data), MEBIBYTE):
            yield pb.WriteFileRequest(data=data[position : position + MEBIBYTE])
        if end:
            yield pb.WriteFileRequest(end=True)

    return (await answer(stub.WriteFile(messages()))).size


async def cut(stub: FileServiceStub, data: bytes, **more: Any) -> int:
    """A stream that breaks off; how much of it is there."""
    with fails() as failure:
        await send(stub, data, end=False, **more)
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "UPLOAD_CUT")
    return await received(stub)


async def received(stub: FileServiceStub, upload_id: str = "u") -> int:
    return (await stub.GetUpload(pb.GetUploadRequest(sandbox_id=S, upload_id=upload_id))).received


async def test_another_stream_goes_on_where_it_was(stub: FileServiceStub, work: Path) -> None:
    assert await received(stub) == 0
    there = await cut(stub, CONTENT[: 3 * MEBIBYTE])
    assert 0 < there <= 3 * MEBIBYTE
    assert list(work.iterdir()) == [], "nothing is to be seen of half a file"
    more = await cut(stub, CONTENT[there : 4 * MEBIBYTE], offset=there)
    assert there < more <= 4 * MEBIBYTE
    assert await send(stub, CONTENT[more:], offset=more, mode=0) == len(CONTENT)
    assert (work / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("behind", [0, 1, MEBIBYTE - 1, 2 * MEBIBYTE])
async def test_bytes_that_are_there_are_skipped(stub: FileServiceStub, work: Path, behind: int) -> None:
    there = await cut(stub, CONTENT[: 3 * MEBIBYTE])
    offset = max(0, there - behind)
    assert await send(stub, CONTENT[offset:], offset=offset) == len(CONTENT)
    assert (work / "file").read_bytes() == CONTENT


async def test_a_hole_is_refused_and_says_how_much_is_there(stub: FileServiceStub, work: Path) -> None:
    there = await cut(stub, CONTENT[: 3 * MEBIBYTE])
    with fails() as failure:
        await send(stub, b"x", offset=there + 1)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UPLOAD_INCOMPLETE")
    assert (failure.fields, failure.metadata["received"]) == (["start.offset"], str(there))
    with fails() as failure:
        await send(stub, b"x", offset=1, upload_id="unknown")
    assert failure.metadata["received"] == "0"
    assert await send(stub, CONTENT[there:], offset=there) == len(CONTENT)


@pytest.mark.parametrize("exclusive", [False, True])
async def test_a_repeat_of_a_whole_one_is_answered_and_writes_nothing(
    stub: FileServiceStub, work: Path, exclusive: bool
) -> None:
    assert await send(stub, CONTENT, exclusive=exclusive) == len(CONTENT)
    (work / "file").write_bytes(b"changed since")
    assert await received(stub) == len(CONTENT)
    for offset in (len(CONTENT), len(CONTENT) - 5, 0):
        assert await send(stub, CONTENT[offset:], offset=offset, exclusive=exclusive) == len(CONTENT)
    assert (work / "file").read_bytes() == b"changed since"
    with fails() as failure:
        await send(stub, b"more", offset=len(CONTENT), exclusive=exclusive)
    assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["data"])


async def test_an_id_is_of_one_upload(stub: FileServiceStub, work: Path) -> None:
    await cut(stub, CONTENT[: 2 * MEBIBYTE])
    for other in ({"path": "other"}, {"mode": 0o600}, {"exclusive": True}):
        with fails() as failure:
            await send(stub, b"x", **other)
        assert (failure.code, failure.reason) == (grpc.StatusCode.ALREADY_EXISTS, "UPLOAD_ID_REUSED")
    assert await send(stub, CONTENT) == len(CONTENT)


async def test_the_last_stream_writes_and_no_other(stub: FileServiceStub, work: Path) -> None:
    """The stream before may look alive for long: its connection is gone, and nobody said so."""
    go_on = asyncio.Event()

    async def forgotten() -> AsyncIterator[pb.WriteFileRequest]:
        yield pb.WriteFileRequest(sandbox_id=S, start=pb.WriteFileStart(path="file", upload_id="u"))
        for position in range(0, 3 * MEBIBYTE, MEBIBYTE):
            yield pb.WriteFileRequest(data=CONTENT[position : position + MEBIBYTE])
        await go_on.wait()
        yield pb.WriteFileRequest(data=b"wrong" * 300_000)
        yield pb.WriteFileRequest(end=True)

    before = asyncio.ensure_future(answer(stub.WriteFile(forgotten())))
    async with asyncio.timeout(110):
        while not await received(stub):
            await asyncio.sleep(0.01)
    there = await received(stub)
    assert await send(stub, CONTENT[there:], offset=there) == len(CONTENT)
    go_on.set()
    with fails() as failure:
        await before
    assert failure.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT)
    assert (work / "file").read_bytes() == CONTENT


async def test_a_file_that_fails_is_begun_anew(stub: FileServiceStub, work: Path) -> None:
    with fails() as failure:
        await send(stub, CONTENT, path="missing/file")
    assert failure.reason == "FILE_NOT_FOUND"
    assert await received(stub) == 0
    (work / "missing").mkdir()
    assert await send(stub, CONTENT, path="missing/file") == len(CONTENT)


async def test_field_rules(stub: FileServiceStub) -> None:
    for start, field in (({"upload_id": "a b"}, "start.upload_id"), ({"offset": -1}, "start.offset")):
        with fails() as failure:
            await send(stub, b"", **start)
        assert failure.fields == [field]
    with fails() as failure:
        await send(stub, b"", upload_id="", offset=1)
    assert failure.fields == ["start.offset"]
    with fails() as failure:
        await stub.GetUpload(pb.GetUploadRequest(sandbox_id=S))
    assert failure.fields == ["upload_id"]


def stream_of(uploads: Uploads, work: Path, name: str, offset: int = 0) -> UploadStream:
    path = bytes(work / name / "file")
    return UploadStream(
        uploads, name, offset, name, lambda: FileWriter(path, WriteOptions(make_parents=True), lambda: (0, 0))
    )


def begin(uploads: Uploads, work: Path, name: str) -> None:
    """An upload of one byte that breaks off."""
    stream = stream_of(uploads, work, name)
    stream.open()
    stream.write([b"x"])
    stream.abort()


def test_what_waits_is_bounded_by_number(work: Path) -> None:
    uploads = Uploads(most_broken=2)
    for name in "abcd":
        begin(uploads, work, name)
    assert [uploads.received(name) for name in "abcd"] == [0, 0, 1, 1]
    # A folder that was made for a file goes with it.
    assert sorted(path.name for path in work.iterdir()) == ["c", "d"]
    assert uploads.waiting


def test_what_waits_is_bounded_by_time(work: Path) -> None:
    uploads = Uploads(kept_seconds=0)
    begin(uploads, work, "a")
    assert (uploads.received("a"), uploads.waiting, list(work.iterdir())) == (0, False, [])


def test_half_a_batch_is_never_gone_on_with(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next stream waits for the batch that is being written; when that fails half way, it finds nothing there."""
    uploads = Uploads()
    first, second = stream_of(uploads, work, "a"), stream_of(uploads, work, "a")
    first.open()
    first.write([b"0123"])
    waits, writev = threading.Event(), os.writev

    def full_disk(fd: int, pieces: Sequence[memoryview]) -> int:
        writev(fd, [bytes(pieces[0])[:2]])
        waits.wait(110)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "writev", full_disk)

    def failing() -> None:
        with pytest.raises(OrchardError):
            first.write([b"4567"])

    writing = threading.Thread(target=failing)
    writing.start()
    end = time.monotonic() + 110
    while not uploads._is_busy("a"):
        assert time.monotonic() < end, "the write never began"
    taking = threading.Thread(target=second.open)
    taking.start()
    waits.set()
    writing.join(110)
    taking.join(110)
    first.abort()
    monkeypatch.undo()
    second.write([b"new file"])
    assert second.finish() == 8
    assert (work / "a/file").read_bytes() == b"new file"


def test_a_stuck_write_is_waited_for_for_a_while_alone(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often other uploads go on meanwhile."""
    uploads = Uploads(patience_seconds=0.3)
    stuck, other = stream_of(uploads, work, "stuck"), stream_of(uploads, work, "other")
    for stream in (stuck, other):
        stream.open()
    go_on, wrote = threading.Event(), FileWriter.write

    def slow(writer: FileWriter, pieces: Sequence[bytes]) -> None:
        if pieces == [b"slow"]:
            go_on.wait(110)
        wrote(writer, pieces)

    monkeypatch.setattr(FileWriter, "write", slow)
    writing = threading.Thread(target=stuck.write, args=([b"slow"],))
    writing.start()
    done = threading.Event()

    def busy() -> None:
        while not done.is_set():
            other.write([b"x"])

    others = threading.Thread(target=busy)
    others.start()
    try:
        end = time.monotonic() + 110
        while not uploads._is_busy("stuck"):
            assert time.monotonic() < end, "the write never began"
        with pytest.raises(UnavailableError) as caught:
            stream_of(uploads, work, "stuck").open()
        assert caught.value.reason == "UPLOAD_BUSY"
    finally:
        done.set()
        go_on.set()
        others.join(110)
        writing.join(110)


def test_a_stream_that_never_wrote_leaves_nothing(work: Path) -> None:
    """Cancelled before, while or after it took its upload."""
    uploads = Uploads(kept_seconds=0)
    stream_of(uploads, work, "a").abort()
    opened = stream_of(uploads, work, "b")
    opened.open()
    opened.abort()
    assert (uploads.waiting, list(work.iterdir())) == (False, [])
