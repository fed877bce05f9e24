"""What calls refuse, and what they say then."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest
from orchard.exec.v1 import file_service_pb2 as pb
from orchard.exec.v1.file_service_pb2_grpc import FileServiceStub

from tests.integration.exec_agent_files.calls import S, answer, fails, patch, read, write


async def test_errors_name_the_path(stub: FileServiceStub, work: Path) -> None:
    (work / "d").mkdir()
    (work / "f").touch()
    os.mkfifo(work / "pipe")
    (work / "loop").symlink_to("loop")
    code = grpc.StatusCode
    for path, status, reason in [
        ("missing", code.NOT_FOUND, "FILE_NOT_FOUND"),
        ("d", code.FAILED_PRECONDITION, "IS_A_DIRECTORY"),
        ("f/x", code.FAILED_PRECONDITION, "NOT_A_DIRECTORY"),
        ("pipe", code.FAILED_PRECONDITION, "NOT_A_REGULAR_FILE"),
        ("/dev/zero", code.FAILED_PRECONDITION, "NOT_A_REGULAR_FILE"),
        ("loop", code.FAILED_PRECONDITION, "LINK_LOOP"),
        ("x" * 300, code.INVALID_ARGUMENT, "PATH_INVALID"),
    ]:
        with fails() as failure:
            await read(stub, path)
        assert (failure.code, failure.reason) == (status, reason)
        assert failure.metadata["path"].endswith(path)
        assert path in failure.message
    for path, reason in [
        ("d", "IS_A_DIRECTORY"),
        ("d/", "IS_A_DIRECTORY"),
        ("pipe", "NOT_A_REGULAR_FILE"),
        ("no/f", "FILE_NOT_FOUND"),
    ]:
        with fails() as failure:
            await write(stub, path, b"x")
        assert failure.reason == reason, path
    with fails() as failure:
        await stub.ListDirectory(pb.ListDirectoryRequest(sandbox_id=S, path="f"))
    assert failure.reason == "NOT_A_DIRECTORY"


async def test_a_full_disk(stub: FileServiceStub, work: Path) -> None:
    with fails() as failure:
        await write(stub, "/dev/full/x", b"x")
    assert failure.reason == "NOT_A_DIRECTORY"
    mount = work / "small"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o size=1m none {mount} 2>/dev/null"):
        pytest.skip("may not mount here")
    try:
        with fails() as failure:
            await write(stub, "small/f", b"x" * 5_000_000)
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_SPACE")
        assert not list(mount.iterdir())
        (mount / "f").write_text("a\n")
        text = b"--- a/f\n+++ b/f\n@@ -1 +1,2 @@\n a\n+" + b"x" * 2_000_000 + b"\n"
        with fails() as failure:
            await patch(stub, "small", text)
        assert failure.reason == "NO_SPACE"
        assert (mount / "f").read_text() == "a\n"
        assert len(list(mount.iterdir())) == 1
        os.system(f"mount -o remount,ro {mount}")
        with fails() as failure:
            await write(stub, "small/g", b"x")
        assert failure.reason == "READ_ONLY_FILE_SYSTEM"
    finally:
        os.system(f"umount -l {mount}")


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (pb.StatRequest(path="x"), ["sandbox_id"]),
        (pb.StatRequest(sandbox_id="Bad_Id"), ["sandbox_id", "path"]),
        (pb.StatRequest(sandbox_id=S, path="a\0b"), ["path"]),
        (pb.StatRequest(sandbox_id=S, path="x" * 4097), ["path"]),
        (pb.ReadFileRequest(sandbox_id=S, path="x", offset=-1, length=-1), ["offset", "length"]),
        (pb.ListDirectoryRequest(sandbox_id=S, path="x", page_size=5001), ["page_size"]),
        (pb.MakeDirectoryRequest(sandbox_id=S, path="x", mode=0o10000), ["mode"]),
        (pb.MoveRequest(sandbox_id=S), ["source_path", "target_path"]),
        (pb.RemoveRequest(sandbox_id=S), ["path"]),
        (pb.DownloadArchiveRequest(sandbox_id=S), ["path"]),
    ],
)
async def test_field_rules(stub: FileServiceStub, request_, fields: list[str]) -> None:
    name = type(request_).__name__.removesuffix("Request")
    with fails() as failure:
        call = getattr(stub, name)(request_)
        if name in {"ReadFile", "DownloadArchive"}:
            async for _ in call:
                pass
        else:
            await call
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.fields == fields


OTHER = "other-sandbox"


@pytest.mark.parametrize(
    "request_",
    [
        pb.WriteFileRequest(sandbox_id=OTHER, start=pb.WriteFileStart(path="x")),
        pb.ReadFileRequest(sandbox_id=OTHER, path="x"),
        pb.StatRequest(sandbox_id=OTHER, path="x"),
        pb.ListDirectoryRequest(sandbox_id=OTHER, path="x"),
        pb.MakeDirectoryRequest(sandbox_id=OTHER, path="x"),
        pb.MoveRequest(sandbox_id=OTHER, source_path="x", target_path="y"),
        pb.RemoveRequest(sandbox_id=OTHER, path="x"),
        pb.UploadArchiveRequest(sandbox_id=OTHER, start=pb.UploadArchiveStart(path="x")),
        pb.DownloadArchiveRequest(sandbox_id=OTHER, path="x"),
        pb.ApplyPatchRequest(sandbox_id=OTHER, start=pb.ApplyPatchStart(path="x")),
    ],
    ids=lambda request: type(request).__name__,
)
async def test_what_is_meant_for_another_sandbox_is_not_done_here(stub: FileServiceStub, work: Path, request_) -> None:
    (work / "x").mkdir()
    method = getattr(stub, type(request_).__name__.removesuffix("Request"))
    with fails() as failure:
        if hasattr(request_, "start"):
            await answer(method(iter([request_])))
        elif hasattr(call := method(request_), "__aiter__") and not hasattr(call, "__await__"):
            async for _ in call:
                pass
        else:
            await call
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "SANDBOX_NOT_FOUND")
    assert [entry.name for entry in work.iterdir()] == ["x"]


async def test_field_rules_of_streams(stub: FileServiceStub, work: Path) -> None:
    async def send(method, *messages):
        async def stream():
            for message in messages:
                yield message

        with fails() as failure:
            await answer(method(stream()))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        return failure.fields

    start = pb.WriteFileStart(path="x")
    assert await send(stub.WriteFile) == ["start"]
    assert await send(stub.WriteFile, pb.WriteFileRequest(sandbox_id=S, data=b"x")) == ["start"]
    assert await send(stub.WriteFile, pb.WriteFileRequest(start=start)) == ["sandbox_id"]
    first = pb.WriteFileRequest(sandbox_id=S, start=start)
    assert await send(stub.WriteFile, first, first) == ["data"]
    assert await send(stub.WriteFile, first, pb.WriteFileRequest(data=b"x" * ((1 << 20) + 1))) == ["data"]
    data, end = pb.WriteFileRequest(data=b"x"), pb.WriteFileRequest(end=True)
    assert await send(stub.WriteFile, first, data, pb.WriteFileRequest(end=False)) == ["end"]
    assert await send(stub.WriteFile, first, data, end, data) == ["end"]
    assert await send(stub.WriteFile, first, data, end, end) == ["end"]
    bad = pb.WriteFileStart(path="x", mode=0o10000, owner="o" * 300)
    assert await send(stub.WriteFile, pb.WriteFileRequest(sandbox_id=S, start=bad)) == ["start.mode", "start.owner"]
    bad_patch = pb.ApplyPatchStart(path="x", strip=33, fuzz=4)
    assert await send(stub.ApplyPatch, pb.ApplyPatchRequest(sandbox_id=S, start=bad_patch)) == [
        "start.strip",
        "start.fuzz",
    ]
    assert await send(stub.UploadArchive, pb.UploadArchiveRequest(sandbox_id=S, start={})) == ["start.path"]
    assert not list(work.iterdir())
