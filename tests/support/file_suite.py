"""What moving a file means, on every runtime: the same bytes, names and modes, whole or not at all.

Import the tests, and define the fixture `subject` of the runtime suite. Commands are those of busybox and of any Linux.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import orchard
import pytest
from orchard import FileType
from orchard.exec.v1 import file_service_pb2

from services.common.peer_status import peer_status
from tests.support.runtime_suite import BACKSTOP, Subject
from tests.support.trees import contents
from tests.support.wire import Wire, reason_of

MEBIBYTE = 1 << 20
MANY = 10_000
DIFF = """\
diff --git a/greet.txt b/greet.txt
--- a/greet.txt
+++ b/greet.txt
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
diff --git a/new/script b/new/script
new file mode 100755
--- /dev/null
+++ b/new/script
@@ -0,0 +1,2 @@
+#!/bin/sh
+echo ran
diff --git a/gone.txt b/gone.txt
deleted file mode 100644
--- a/gone.txt
+++ /dev/null
@@ -1 +0,0 @@
-gone
diff --git a/here.txt b/there.txt
similarity index 100%
rename from here.txt
rename to there.txt
"""
BEFORE = {"greet.txt": "one\ntwo\nthree\n", "gone.txt": "gone\n", "here.txt": "stays\r\n"}


@pytest.fixture
async def moved(subject: Subject) -> AsyncIterator[orchard.AsyncSandbox]:
    """A sandbox that files go into and out of."""
    async with (
        orchard.AsyncSandboxClient(subject.endpoint, api_key=subject.api_key) as client,
        await client.create(subject.image or None) as sandbox,
    ):
        yield sandbox


async def test_files_and_folders_are_made_looked_at_moved_and_removed(moved: orchard.AsyncSandbox) -> None:
    content = bytes(range(256)) * 4096 + b"\r\nno newline at the end"
    await moved.make_directory("/tmp/f/a/b")
    assert await moved.write_file("/tmp/f/a/b/c", content, mode=0o640) == len(content)
    assert await moved.read_file("/tmp/f/a/b/c", offset=300, length=10) == content[300:310]
    found = await moved.stat("/tmp/f/a/b/c")
    assert (found.type, found.size, found.mode) == (FileType.REGULAR, len(content), 0o640)
    await moved.exec("ln -s nowhere /tmp/f/dangling", check=True)
    listed = {one.path: one.type for one in await moved.list_directory("/tmp/f", recursive=True)}
    assert listed == {
        "a": FileType.DIRECTORY,
        "a/b": FileType.DIRECTORY,
        "a/b/c": FileType.REGULAR,
        "dangling": FileType.SYMLINK,
    }
    await moved.move("/tmp/f/a/b/c", "/tmp/f/d")
    assert (await moved.exists("/tmp/f/a/b/c"), await moved.exists("/tmp/f/dangling")) == (False, True)
    assert await moved.read_file("/tmp/f/d") == content
    # Where there is another device, a move goes there too.
    await moved.move("/tmp/f/d", "/dev/shm/d")
    assert await moved.read_file("/dev/shm/d") == content
    for call, error in (
        (moved.read_file("/tmp/f/none"), FileNotFoundError),
        (moved.read_file("/tmp/f"), IsADirectoryError),
        (moved.list_directory("/dev/shm/d"), NotADirectoryError),
        (moved.write_file("/dev/shm/d", b"y", exclusive=True), FileExistsError),
        (moved.remove("/tmp/f"), orchard.DirectoryNotEmpty),
    ):
        with pytest.raises(error):
            await call
    await moved.remove("/tmp/f", recursive=True)
    assert not await moved.exists("/tmp/f")


def make_tree(root: Path) -> None:
    """Names, modes, links and holes of every kind."""
    (root / "deep/er").mkdir(parents=True)
    (root / "empty").mkdir()
    for name in ("two words", "line\nbreak", os.fsdecode(b"\xff\xfe no text"), "n\u00e4me", "-n", "long" * 50, "$HOME"):
        (root / name).write_bytes(os.fsencode(name))
    (root / "deep/script").write_text("#!/bin/sh\necho ran\n")
    (root / "deep/script").chmod(0o751)
    (root / "deep/er/link").symlink_to("../script")
    with (root / "deep/holes").open("wb") as file:
        file.truncate(5_000_000)
        file.seek(2_000_000)
        file.write(b"data")


async def test_names_modes_and_links_of_every_kind_survive_both_ways(
    moved: orchard.AsyncSandbox, tmp_path: Path
) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    make_tree(source)
    await moved.upload(source, "/tmp/tree")
    assert (await moved.exec("/tmp/tree/deep/er/link; cat '/tmp/tree/two words'")).stdout == "ran\ntwo words"
    # What is there is merged into, not replaced.
    await moved.write_file("/tmp/tree/deep/more", b"more")
    await moved.upload(source, "/tmp/tree")
    assert await moved.read_file("/tmp/tree/deep/more") == b"more"
    await moved.remove("/tmp/tree/deep/more")
    await moved.download("/tmp/tree", back)
    assert contents(back) == contents(source)


async def test_ten_thousand_small_files_go_in_and_out(moved: orchard.AsyncSandbox, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    for number in range(MANY):
        path = source / f"{number // 100:02}" / f"{number:05}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}\n")
    await moved.upload(source, "/tmp/many")
    inside = await moved.exec("cat /tmp/many/*/* | sort -n | sha256sum; find /tmp/many -type f | wc -l", check=True)
    numbers = "".join(f"{number}\n" for number in range(MANY))
    here = await moved.exec("sort -n | sha256sum", input=numbers, check=True)
    assert inside.stdout.split() == [*here.stdout.split(), str(MANY)]
    await moved.download("/tmp/many", back)
    assert contents(back) == contents(source)


async def texts(sandbox: orchard.AsyncSandbox, folder: str) -> dict[str, str]:
    listed = await sandbox.list_directory(folder, recursive=True)
    names = [one.path for one in listed if one.type is FileType.REGULAR]
    return {name: await sandbox.read_text(f"{folder}/{name}") for name in names}


async def test_a_patch_is_applied_whole_undone_or_not_at_all(moved: orchard.AsyncSandbox) -> None:
    for name, text in BEFORE.items():
        await moved.write_file(f"/tmp/p/{name}", text)
    assert (await moved.apply_patch(DIFF, path="/tmp/p", dry_run=True)).applied
    assert await texts(moved, "/tmp/p") == BEFORE
    actions = [(one.path, one.action) for one in (await moved.apply_patch(DIFF, path="/tmp/p")).files]
    assert actions == [
        ("greet.txt", "modify"),
        ("new/script", "create"),
        ("gone.txt", "delete"),
        ("there.txt", "rename"),
    ]
    after = {"greet.txt": "one\nTWO\nthree\n", "new/script": "#!/bin/sh\necho ran\n", "there.txt": "stays\r\n"}
    assert await texts(moved, "/tmp/p") == after
    assert (await moved.exec("/tmp/p/new/script")).stdout == "ran\n"
    with pytest.raises(orchard.PatchFailed, match=r"greet\.txt: hunk 1"):
        await moved.apply_patch(DIFF, path="/tmp/p")
    assert await texts(moved, "/tmp/p") == after
    await moved.apply_patch(DIFF, path="/tmp/p", reverse=True)
    assert await texts(moved, "/tmp/p") == BEFORE
    with pytest.raises(orchard.InvalidArgument, match=r"\.\./outside"):
        await moved.apply_patch("--- /dev/null\n+++ b/../outside\n@@ -0,0 +1 @@\n+x\n", path="/tmp/p")


async def test_a_patch_of_ten_megabytes_is_applied(moved: orchard.AsyncSandbox) -> None:
    count = 800_000
    lines = "".join(f"+line {number}\n" for number in range(count))
    assert len(lines) > 10_000_000
    await moved.apply_patch(f"--- /dev/null\n+++ b/large\n@@ -0,0 +1,{count} @@\n{lines}", path="/tmp")
    last = await moved.exec("wc -l </tmp/large; tail -n 1 /tmp/large", check=True)
    assert last.stdout.split("\n")[:2] == [str(count), f"line {count - 1}"]


async def test_an_upload_goes_on_where_it_was_cut(subject: Subject) -> None:
    sandbox, wire, upload_id = await subject.ready(), subject.wire, secrets.token_hex(8)
    content = secrets.token_bytes(5 * MEBIBYTE + 17)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await sent(wire, sandbox, upload_id, content[: 3 * MEBIBYTE], end=False)
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "UPLOAD_CUT")
    request = file_service_pb2.GetUploadRequest(sandbox_id=sandbox, upload_id=upload_id)
    there = (await wire.call(wire.files.GetUpload, request)).received
    assert 0 < there <= 3 * MEBIBYTE
    # A file is whole or not there.
    assert await wire.output(sandbox, "ls /tmp/up 2>/dev/null || true") == b""
    await sent(wire, sandbox, upload_id, content[there:], offset=there)
    read = file_service_pb2.ReadFileRequest(sandbox_id=sandbox, path="/tmp/up/file")
    call = wire.files.ReadFile(read, metadata=wire.metadata, timeout=BACKSTOP)
    assert b"".join([response.data async for response in call]) == content
    await wire.delete(sandbox)


async def sent(wire: Wire, sandbox: str, upload_id: str, data: bytes, *, offset: int = 0, end: bool = True) -> None:
    """One stream of an upload; without `end` it is cut."""

    async def parts() -> AsyncIterator[file_service_pb2.WriteFileRequest]:
        begun = file_service_pb2.WriteFileStart(
            path="/tmp/up/file", make_parents=True, upload_id=upload_id, offset=offset
        )
        yield file_service_pb2.WriteFileRequest(sandbox_id=sandbox, start=begun)
        for position in range(0, len(data), MEBIBYTE // 2):
            yield file_service_pb2.WriteFileRequest(data=data[position : position + MEBIBYTE // 2])
        if end:
            yield file_service_pb2.WriteFileRequest(end=True)

    call = wire.files.WriteFile(parts(), metadata=wire.metadata, timeout=BACKSTOP)
    with peer_status(call):
        await call
