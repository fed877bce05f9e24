"""Reading, writing, listing, moving and removing over real gRPC."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from pathlib import Path

import grpc
import pytest
from orchard.exec.v1 import file_pb2
from orchard.exec.v1 import file_service_pb2 as pb
from orchard.exec.v1.file_service_pb2_grpc import FileServiceStub

from tests.integration.exec_agent_files.calls import S, download, fails, read, upload, write
from tests.integration.exec_agent_files.conftest import connected


async def test_calls_need_the_token(address: str) -> None:
    async with connected(address, None) as stub:
        with fails() as failure:
            await stub.Stat(pb.StatRequest(sandbox_id=S, path="/"))
        assert failure.code is grpc.StatusCode.UNAUTHENTICATED


async def test_write_and_read(stub: FileServiceStub, work: Path) -> None:
    data = os.urandom(3_000_001)
    assert await write(stub, "a/b/file", data, make_parents=True) == len(data)
    assert (work / "a/b/file").read_bytes() == data
    assert stat.S_IMODE((work / "a/b/file").stat().st_mode) == 0o644
    assert await read(stub, "a/b/file") == data
    assert await read(stub, f"{work}/a/b/file", 1_000_000, 5) == data[1_000_000:1_000_005]
    assert await read(stub, "a/b/file", 2_999_999) == data[2_999_999:]
    assert await read(stub, "a/b/file", 4_000_000) == b""


async def test_the_first_message_tells_size_and_mode_and_chunks_are_large(stub: FileServiceStub, work: Path) -> None:
    (work / "f").write_bytes(b"x" * 5_000_000)
    (work / "f").chmod(0o640)
    messages = [m async for m in stub.ReadFile(pb.ReadFileRequest(sandbox_id=S, path="f"))]
    assert (messages[0].file_size, messages[0].mode) == (5_000_000, 0o640)
    growing = [64 << 10, 128 << 10, 256 << 10, 512 << 10, *[1 << 20] * 3]
    assert [len(m.data) for m in messages] == [*growing, 5_000_000 - sum(growing)]
    (work / "empty").touch()
    messages = [m async for m in stub.ReadFile(pb.ReadFileRequest(sandbox_id=S, path="empty"))]
    assert [(m.file_size, m.data, m.mode) for m in messages] == [(0, b"", 0o644)]


async def test_files_without_a_size_are_read(stub: FileServiceStub) -> None:
    assert b"Linux" in await read(stub, "/proc/version")


async def test_replacing_keeps_mode_and_follows_links(stub: FileServiceStub, work: Path) -> None:
    (work / "real").write_text("old")
    (work / "real").chmod(0o4700)
    (work / "link").symlink_to("real")
    await write(stub, "link", b"new")
    assert (work / "link").is_symlink()
    assert (work / "real").read_text() == "new"
    assert stat.S_IMODE((work / "real").stat().st_mode) == 0o4700
    await write(stub, "real", b"newer", mode=0o755)
    assert stat.S_IMODE((work / "real").stat().st_mode) == 0o755
    (work / "dangling").symlink_to("made")
    await write(stub, "dangling", b"made")
    assert (work / "made").read_text() == "made"


@pytest.mark.root
async def test_owners(stub: FileServiceStub, work: Path) -> None:
    await write(stub, "f", b"x", owner="1234:5678")
    assert ((work / "f").stat().st_uid, (work / "f").stat().st_gid) == (1234, 5678)
    await write(stub, "f", b"y")
    assert ((work / "f").stat().st_uid, (work / "f").stat().st_gid) == (1234, 5678)
    with fails() as failure:
        await write(stub, "f", b"z", owner="nobody-knows")
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "USER_NOT_FOUND")
    assert (work / "f").read_text() == "y"
    (work / "shared").mkdir()
    os.chown(work / "shared", 0, 4321)
    (work / "shared").chmod(0o2775)
    await write(stub, "shared/f", b"x")
    assert (work / "shared/f").stat().st_gid == 4321


async def test_exclusive(stub: FileServiceStub, work: Path) -> None:
    await write(stub, "f", b"one", exclusive=True)
    (work / "dangling").symlink_to("nowhere")
    for name in ["f", "dangling"]:
        with fails() as failure:
            await write(stub, name, b"two", exclusive=True)
        assert (failure.code, failure.reason) == (grpc.StatusCode.ALREADY_EXISTS, "FILE_EXISTS")
    assert (work / "f").read_text() == "one"


async def test_of_exclusive_writers_one_wins(stub: FileServiceStub, work: Path) -> None:
    results = await asyncio.gather(
        *(write(stub, "f", b"%d" % n, exclusive=True) for n in range(20)), return_exceptions=True
    )
    assert results.count(1) + results.count(2) == 1
    assert len(list(work.iterdir())) == 1


async def test_a_broken_upload_leaves_nothing(stub: FileServiceStub, work: Path) -> None:
    (work / "kept").write_text("as it was")
    for path in ["kept", "new/folder/file"]:
        started = asyncio.Event()
        go_on = asyncio.Event()

        async def pieces(started: asyncio.Event = started, go_on: asyncio.Event = go_on):
            for _ in range(5):
                yield b"x" * (1 << 20)
            started.set()
            await go_on.wait()
            yield b""

        call = asyncio.ensure_future(write(stub, path, pieces(), make_parents=True))
        await started.wait()
        call.cancel()
        await asyncio.wait([call])
        async with asyncio.timeout(110):
            while sorted(p.name for p in work.rglob("*")) != ["kept"]:
                await asyncio.sleep(0.01)  # the agent hears of it a little later
    assert (work / "kept").read_text() == "as it was"


async def test_a_broken_archive_upload_leaves_whole_files(stub: FileServiceStub, work: Path) -> None:
    (work / "source").mkdir()
    (work / "source/f").write_bytes(b"x" * 3_000_000)
    stream = await download(stub, "source")
    (work / "target").mkdir()
    (work / "target/f").write_text("as it was")
    with fails() as failure:
        await upload(stub, "target", stream[:2_000_000])
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "ARCHIVE_TRUNCATED")
    assert [p.name for p in (work / "target").iterdir()] == ["f"]
    assert (work / "target/f").read_text() == "as it was"


async def test_stat(stub: FileServiceStub, work: Path) -> None:
    (work / "f").write_text("12345")
    (work / "link").symlink_to("f")
    os.utime(work / "f", ns=(0, 1_700_000_000_123_456_789))
    info = (await stub.Stat(pb.StatRequest(sandbox_id=S, path="link"))).file
    assert (info.path, info.type, info.link_target) == ("link", file_pb2.FILE_TYPE_SYMLINK, "f")
    info = (await stub.Stat(pb.StatRequest(sandbox_id=S, path="link", follow=True))).file
    assert (info.type, info.size, info.mode) == (file_pb2.FILE_TYPE_REGULAR, 5, 0o644)
    assert info.modify_time.ToNanoseconds() == 1_700_000_000_123_456_789
    assert (info.uid, info.gid) == (os.getuid(), os.getgid())
    assert (await stub.Stat(pb.StatRequest(sandbox_id=S, path="."))).file.type == file_pb2.FILE_TYPE_DIRECTORY
    assert (await stub.Stat(pb.StatRequest(sandbox_id=S, path="/dev/null"))).file.type == file_pb2.FILE_TYPE_OTHER


async def _list(stub: FileServiceStub, path: str, size: int, *, recursive: bool = False) -> list[file_pb2.FileInfo]:
    found, token = [], ""
    while True:
        request = pb.ListDirectoryRequest(
            sandbox_id=S, path=path, recursive=recursive, page_size=size, page_token=token
        )
        page = await stub.ListDirectory(request)
        assert len(page.files) <= size
        assert page.ByteSize() < 1 << 20
        found += page.files
        token = page.next_page_token
        if not token:
            return found


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_listing_in_pages(stub: FileServiceStub, work: Path, size: int) -> None:
    for name in ["b", "a", "B", "a-", "a.txt"]:
        (work / name).mkdir()
        (work / name / "inner").write_text("x")
    (work / "a/deep").mkdir()
    (work / "a/deep/er").touch()
    (work / "dangling").symlink_to("nowhere")
    (work / "to a").symlink_to("a")
    Path(os.fsdecode(os.fsencode(work) + b"/\xff")).touch()
    flat = await _list(stub, ".", size)
    assert [f.path for f in flat] == ["B", "a", "a-", "a.txt", "b", "dangling", "to a", "\ufffd"]
    assert flat[-1].raw_path == b"\xff"
    assert not flat[0].raw_path
    assert (flat[5].type, flat[5].link_target) == (file_pb2.FILE_TYPE_SYMLINK, "nowhere")
    deep = await _list(stub, str(work), size, recursive=True)
    assert [f.path for f in deep] == [
        "B", "B/inner", "a", "a/deep", "a/deep/er", "a/inner", "a-", "a-/inner", "a.txt", "a.txt/inner",
        "b", "b/inner", "dangling", "to a", "\ufffd",
    ]  # fmt: skip


async def test_a_page_token_survives_changes(stub: FileServiceStub, work: Path) -> None:
    for number in range(10):
        (work / f"d{number}").mkdir()
        (work / f"d{number}/f").touch()
    request = pb.ListDirectoryRequest(sandbox_id=S, path=".", recursive=True, page_size=8)
    page = await stub.ListDirectory(request)
    assert page.files[-1].path == "d3/f"
    shutil.rmtree(work / "d3")
    (work / "d0/new").touch()
    (work / "d35").touch()
    request.page_token = page.next_page_token
    request.page_size = 0
    page = await stub.ListDirectory(request)
    expected = ["d35", *(f"d{n}{rest}" for n in range(4, 10) for rest in ("", "/f"))]
    assert [f.path for f in page.files] == expected


@pytest.mark.parametrize("token", ["!", "bm90IGpzb24", "WyIuLi9ldGMiXQ", "WyIvIl0", "WzFd"])
async def test_a_foreign_page_token_is_refused(stub: FileServiceStub, token: str) -> None:
    with fails() as failure:
        await stub.ListDirectory(pb.ListDirectoryRequest(sandbox_id=S, path=".", page_token=token))
    assert failure.fields == ["page_token"]


async def test_make_directory(stub: FileServiceStub, work: Path) -> None:
    await stub.MakeDirectory(pb.MakeDirectoryRequest(sandbox_id=S, path="d"))
    assert stat.S_IMODE((work / "d").stat().st_mode) == 0o755
    await stub.MakeDirectory(pb.MakeDirectoryRequest(sandbox_id=S, path="x/y/z", parents=True, mode=0o1777))
    assert stat.S_IMODE((work / "x/y/z").stat().st_mode) == 0o1777
    assert stat.S_IMODE((work / "x/y").stat().st_mode) == 0o755
    await stub.MakeDirectory(pb.MakeDirectoryRequest(sandbox_id=S, path="x/y/z", parents=True))
    (work / "file").touch()
    for path, parents, reason in [
        ("d", False, "FILE_EXISTS"),
        ("no/d", False, "FILE_NOT_FOUND"),
        ("file", True, "FILE_EXISTS"),
        ("file/d", True, "NOT_A_DIRECTORY"),
    ]:
        with fails() as failure:
            await stub.MakeDirectory(pb.MakeDirectoryRequest(sandbox_id=S, path=path, parents=parents))
        assert failure.reason == reason


async def test_move(stub: FileServiceStub, work: Path) -> None:
    async def move(source: str, target: str, overwrite: bool = False) -> None:
        await stub.Move(pb.MoveRequest(sandbox_id=S, source_path=source, target_path=target, overwrite=overwrite))

    (work / "a").write_text("a")
    await move("a", "b")
    assert (work / "b").read_text() == "a"
    (work / "c").write_text("c")
    with fails() as failure:
        await move("b", "c")
    assert failure.reason == "FILE_EXISTS"
    assert failure.metadata["path"] == f"{work}/c"
    await move("b", "c", overwrite=True)
    assert (work / "c").read_text() == "a"
    (work / "d").mkdir()
    (work / "full/x").mkdir(parents=True)
    (work / "link").symlink_to("c")
    await move("link", "link2")
    assert (work / "link2").is_symlink()
    for source, target, overwrite, reason in [
        ("c", "d", False, "FILE_EXISTS"),
        ("c", "d", True, "IS_A_DIRECTORY"),
        ("d", "c", True, "NOT_A_DIRECTORY"),
        ("d", "full", True, "DIRECTORY_NOT_EMPTY"),
        ("missing", "x", False, "FILE_NOT_FOUND"),
        ("c", "missing/x", False, "FILE_NOT_FOUND"),
        ("full", "full/x/y", False, "INVALID_ARGUMENT"),
    ]:
        with fails() as failure:
            await move(source, target, overwrite)
        assert failure.reason == reason, (source, target)
    await move("full", "d", overwrite=True)
    assert (work / "d/x").is_dir()


async def test_move_to_another_device(stub: FileServiceStub, work: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if Path(other).stat().st_dev == work.stat().st_dev:
            pytest.skip("there is one device only")
        folder = work / "tree"
        (folder / "sub/read only").mkdir(parents=True)
        (folder / "sub/read only/f").write_text("x")
        (folder / "script").write_text("#!/bin/sh\n")
        (folder / "script").chmod(0o4711)
        os.link(folder / "script", folder / "sub/same")
        (folder / "link").symlink_to("/nowhere")
        os.mkfifo(folder / "pipe")
        with (folder / "sparse").open("wb") as file:
            file.truncate(5_000_000)
            file.seek(2_000_000)
            file.write(b"data")
        os.utime(folder / "script", ns=(0, 123_456_789))
        (folder / "sub/read only").chmod(0o500)
        os.utime(folder / "sub", ns=(0, 987_654_321))
        before = {
            str(p.relative_to(folder)): (p.lstat().st_mode, p.lstat().st_size, p.lstat().st_nlink)
            for p in folder.rglob("*")
            if not p.is_dir()
        }
        target = Path(other) / "moved"
        await stub.Move(pb.MoveRequest(sandbox_id=S, source_path="tree", target_path=str(target)))
        assert not folder.exists()
        after = {
            str(p.relative_to(target)): (p.lstat().st_mode, p.lstat().st_size, p.lstat().st_nlink)
            for p in target.rglob("*")
            if not p.is_dir()
        }
        assert after == before
        assert (target / "script").stat().st_mtime_ns == 123_456_789
        assert (target / "sub").stat().st_mtime_ns == 987_654_321
        assert stat.S_IMODE((target / "sub/read only").stat().st_mode) == 0o500
        assert (target / "script").stat().st_ino == (target / "sub/same").stat().st_ino
        assert (target / "sparse").stat().st_blocks * 512 < 1_000_000
        (work / "f").write_text("one file")
        with fails() as failure:
            await stub.Move(pb.MoveRequest(sandbox_id=S, source_path="f", target_path=str(target / "script")))
        assert failure.reason == "FILE_EXISTS"
        assert (work / "f").exists()
        await stub.Move(
            pb.MoveRequest(sandbox_id=S, source_path="f", target_path=str(target / "script"), overwrite=True)
        )
        assert (target / "script").read_text() == "one file"
        assert not list(target.rglob(".orchard-*"))


async def test_remove(stub: FileServiceStub, work: Path) -> None:
    async def remove(path: str, **options: bool) -> None:
        await stub.Remove(pb.RemoveRequest(sandbox_id=S, path=path, **options))

    outside = work / "outside"
    outside.mkdir()
    (outside / "f").write_text("kept")
    (work / "link").symlink_to("outside")
    (work / "tree/sub").mkdir(parents=True)
    (work / "tree/sub/link").symlink_to(outside)
    (work / "tree/sub/f").touch()
    (work / "empty").mkdir()
    with fails() as failure:
        await remove("tree")
    assert failure.reason == "DIRECTORY_NOT_EMPTY"
    await remove("empty")
    await remove("link/", recursive=True)
    await remove("tree", recursive=True)
    assert sorted(p.name for p in work.rglob("*")) == ["f", "outside"]
    with fails() as failure:
        await remove("tree")
    assert failure.reason == "FILE_NOT_FOUND"
    await remove("tree", missing_ok=True)
    for path in ["/", ".", "outside/..", "//"]:
        with fails() as failure:
            await remove(path, recursive=True)
        assert failure.fields == ["path"]
    assert (outside / "f").exists()


async def test_remove_a_tree_deeper_than_a_path_may_be(stub: FileServiceStub, work: Path) -> None:
    descriptor = os.open(work, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("deep", dir_fd=descriptor)
        below = os.open("deep", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    listed = await _list(stub, ".", 1000, recursive=True)
    assert len(listed) == 1500
    await stub.Remove(pb.RemoveRequest(sandbox_id=S, path="deep", recursive=True))
    assert not list(work.iterdir())
