"""Files in and out of a sandbox."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import subprocess
import tarfile
from pathlib import Path

import orchard
import pytest
from orchard import AsyncSandbox, FileType, Sandbox

from tests.support.trees import contents


def test_write_and_read_keep_every_byte(sandbox: Sandbox) -> None:
    content = bytes(range(256)) * 4096 + b"\r\nlast line without newline"
    assert sandbox.write_file("/tmp/f1/data.bin", content, mode=0o640) == len(content)
    assert sandbox.read_file("/tmp/f1/data.bin") == content
    assert sandbox.read_file("/tmp/f1/data.bin", offset=300, length=10) == content[300:310]
    assert sandbox.stat("/tmp/f1/data.bin").mode == 0o640
    sandbox.write_file("/tmp/f1/text", "gr\u00fc\u00df\r\n")
    assert sandbox.read_text("/tmp/f1/text") == "gr\u00fc\u00df\r\n"
    sandbox.write_file("/tmp/f1/empty", b"")
    assert sandbox.read_file("/tmp/f1/empty") == b""
    with pytest.raises(UnicodeDecodeError):
        sandbox.read_text("/tmp/f1/data.bin")


@pytest.mark.parametrize("name", ["a" * 250, "\u00e9" * 120, "\u6f22" * 80], ids=["ascii", "latin", "han"])
def test_a_path_of_any_length_is_told(sandbox: Sandbox, name: str) -> None:
    """A status that has it is longer than gRPC likes."""
    path = f"/{name}" * 16
    for call in (sandbox.read_file, sandbox.stat, sandbox.list_directory):
        with pytest.raises(FileNotFoundError) as caught:
            call(path)
        assert name in str(caught.value)
        assert "metadata" not in str(caught.value)


def test_errors_are_python_errors_too(sandbox: Sandbox) -> None:
    sandbox.write_file("/tmp/f2/file", "x")
    with pytest.raises(FileNotFoundError) as caught:
        sandbox.read_file("/tmp/f2/none")
    assert isinstance(caught.value, orchard.FileNotFound)
    with pytest.raises(IsADirectoryError):
        sandbox.read_file("/tmp/f2")
    with pytest.raises(NotADirectoryError):
        sandbox.list_directory("/tmp/f2/file")
    with pytest.raises(FileExistsError):
        sandbox.write_file("/tmp/f2/file", "y", exclusive=True)
    with pytest.raises(orchard.DirectoryNotEmpty):
        sandbox.remove("/tmp/f2")
    with pytest.raises(FileNotFoundError):
        sandbox.remove("/tmp/f2/none")
    sandbox.remove("/tmp/f2/none", missing_ok=True)
    with pytest.raises(orchard.InvalidArgument) as bad:
        sandbox.stat("a\0b")
    assert bad.value.violations[0].field == "path"


def test_directories(sandbox: Sandbox) -> None:
    sandbox.make_directory("/tmp/f3/a/b")
    sandbox.make_directory("/tmp/f3/a/b")
    with pytest.raises(orchard.FileExists):
        sandbox.make_directory("/tmp/f3/a/b", parents=False)
    sandbox.exec("ln -s nowhere /tmp/f3/dangling; touch /tmp/f3/a/b/c")
    listed = {entry.path: entry.type for entry in sandbox.list_directory("/tmp/f3", recursive=True)}
    assert listed == {
        "a": FileType.DIRECTORY,
        "a/b": FileType.DIRECTORY,
        "a/b/c": FileType.REGULAR,
        "dangling": FileType.SYMLINK,
    }
    sandbox.move("/tmp/f3/a/b/c", "/tmp/f3/d")
    assert sandbox.exists("/tmp/f3/d")
    assert not sandbox.exists("/tmp/f3/a/b/c")
    assert sandbox.exists("/tmp/f3/dangling")
    sandbox.remove("/tmp/f3", recursive=True)
    assert not sandbox.exists("/tmp/f3")


def test_a_listing_of_several_pages_is_whole(sandbox: Sandbox) -> None:
    sandbox.exec("mkdir /tmp/f4; cd /tmp/f4; seq 1 2500 | xargs touch", check=True)
    assert len(sandbox.list_directory("/tmp/f4")) == 2500


def make_tree(root: Path) -> None:
    (root / "sub" / "deep").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "a.txt").write_text("a")
    (root / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (root / "sub" / "run.sh").chmod(0o755)
    (root / "sub" / "deep" / "big").write_bytes(os.urandom(700_001))
    (root / "sub" / "link").symlink_to("deep/big")
    (root / ("long-" * 40)).write_text("a name beyond what ustar holds")
    (root / "n\u00e4me").write_text("not ASCII")


def test_a_folder_goes_in_and_out_unchanged_with_progress(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_tree(source)
    steps: list[tuple[int, int]] = []
    sandbox.upload(source, "/tmp/f5", progress=lambda done, total: steps.append((done, total)))
    assert steps[-1][0] == steps[-1][1] > 700_000
    assert sandbox.exec(["/tmp/f5/sub/run.sh"]).stdout == "ran\n"
    sandbox.download("/tmp/f5", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def test_folders_merge_and_patterns_leave_out(sandbox: Sandbox, tmp_path: Path) -> None:
    make_tree(tmp_path / "one")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "b.txt").write_text("b")
    sandbox.upload(tmp_path / "one", "/tmp/f6", exclude=["deep", "n*"])
    sandbox.upload(tmp_path / "two", "/tmp/f6")
    names = {entry.path for entry in sandbox.list_directory("/tmp/f6", recursive=True)}
    assert names == {"a.txt", "b.txt", "empty", "long-" * 40, "sub", "sub/link", "sub/run.sh"}


def test_single_files_go_where_they_are_told(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    sandbox.upload(tmp_path / "x.txt", "/tmp/f7/renamed")
    sandbox.upload(tmp_path / "x.txt", "/tmp/f7/folder/")
    sandbox.upload(tmp_path / "x.txt", "/tmp/f7")
    names = {entry.path for entry in sandbox.list_directory("/tmp/f7", recursive=True)}
    assert names == {"renamed", "folder", "folder/x.txt", "x.txt"}
    sandbox.download("/tmp/f7/renamed", tmp_path / "new" / "y.txt")
    sandbox.download("/tmp/f7/renamed", tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["renamed", "y.txt"]
    with pytest.raises(FileNotFoundError):
        sandbox.download("/tmp/f7/none", tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        sandbox.upload(tmp_path / "none", "/tmp/f7/none")
    assert not (tmp_path / "none").exists()


def test_what_is_no_file_is_written_into_and_stays_what_it_is(sandbox: Sandbox, tmp_path: Path) -> None:
    data = os.urandom(300_000)  # more than a pipe holds
    sandbox.write_file("/tmp/f10/data", data)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device") as nobody:
        sandbox.download("/tmp/f10/data", pipe)
    assert nobody.value.errno == errno.ENXIO
    with (tmp_path / "read").open("wb") as read, subprocess.Popen(["cat", str(pipe)], stdout=read) as reader:
        # Opening to write waits for the reader, which then is there for the download.
        with pipe.open("wb"):
            sandbox.download("/tmp/f10/data", pipe)
        assert reader.wait(timeout=100) == 0
    assert (tmp_path / "read").read_bytes() == data
    assert pipe.is_fifo()
    # As /dev/stdout is, where it leads to a pipe or to a file.
    with (tmp_path / "file").open("w+b") as file:
        link = tmp_path / "link"
        link.symlink_to(f"/proc/self/fd/{file.fileno()}")
        sandbox.download("/tmp/f10/data", link)
        assert file.read() == data
        assert link.is_symlink()
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    sandbox.download("/tmp/f10/data", null)
    assert null.is_char_device()


def test_what_cannot_be_read_twice_is_not_uploaded(sandbox: Sandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes into it: opening it would wait for ever
    read, write = os.pipe()
    with socket.socket(socket.AF_UNIX) as listening, open(read, "rb"), open(write, "wb"):  # noqa: PTH123
        listening.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "pipe", tmp_path / "socket", Path(f"/dev/fd/{read}"), Path("/dev/zero")):
            with pytest.raises(OSError, match=r"send a pipe or a device as the input of a command") as refused:
                sandbox.upload(path, "/tmp/f22/x")
            assert (refused.value.errno, refused.value.filename) == (errno.ESPIPE, str(path))
    assert not sandbox.exec("ls /tmp/f22").ok
    sandbox.upload("/dev/null", "/tmp/f22/empty")
    assert sandbox.read_file("/tmp/f22/empty") == b""
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"redirected")
        file.flush()
        sandbox.upload(f"/dev/fd/{file.fileno()}", "/tmp/f22/file")
    assert sandbox.read_file("/tmp/f22/file") == b"redirected"


def test_what_cannot_be_written_here_is_named(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.write_file("/tmp/f23/data", bytes(3 << 20))
    for path, kind in (("/dev/full", errno.ENOSPC), ("/proc/none", errno.ENOENT)):
        with pytest.raises(OSError) as failed:
            sandbox.download("/tmp/f23/data", path)
        assert (failed.value.errno, failed.value.filename) == (kind, path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # as where the disk is full
    try:
        for source, path in (("/tmp/f23/data", str(tmp_path / "data")), ("/tmp/f23", str(tmp_path / "folder"))):
            with pytest.raises(OSError) as failed:
                sandbox.download(source, path)
            assert (failed.value.errno, failed.value.filename) == (errno.EFBIG, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


async def test_a_pipe_that_nobody_reads_holds_nobody_up_who_leaves(asandbox: AsyncSandbox, tmp_path: Path) -> None:
    await asandbox.write_file("/tmp/f11/data", bytes(300_000))
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        download = asyncio.ensure_future(asandbox.download("/tmp/f11/data", tmp_path / "pipe"))
        ready = asyncio.Event()
        asyncio.get_running_loop().add_reader(reader, ready.set)
        await ready.wait()
        asyncio.get_running_loop().remove_reader(reader)
        download.cancel()
        with pytest.raises(asyncio.CancelledError):
            await download
    finally:
        os.close(reader)


def test_a_download_refuses_links_that_point_out(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.exec("mkdir /tmp/f8; cd /tmp/f8; echo x > file; ln -s /etc/passwd evil; ln -s file good", check=True)
    with pytest.raises(orchard.UnsafeArchive, match="evil"):
        sandbox.download("/tmp/f8", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    sandbox.download("/tmp/f8", tmp_path / "out", unsafe_links="skip")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["file", "good"]


def test_large_transfers_keep_memory_flat(sandbox: Sandbox, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(200 << 20)
    sandbox.upload(tmp_path / "large", "/tmp/f9")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sandbox.upload(tmp_path / "large", "/tmp/f9")
    sandbox.download("/tmp/f9", tmp_path / "back")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (tmp_path / "back").stat().st_size == 200 << 20
    assert grown < 60_000, f"{grown} KiB more"
    sandbox.remove("/tmp/f9")


async def test_a_failed_local_read_is_the_caller_s_own_error(asandbox: AsyncSandbox, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "fine").write_text("x")
    (tmp_path / "dir" / "loop").mkdir()

    def fail(done: int, total: int) -> None:
        raise ValueError("from the callback")

    with pytest.raises(ValueError, match="from the callback"):
        await asandbox.upload(tmp_path / "dir", "/tmp/f10", progress=fail)


DIFF = """\
diff --git a/greet.txt b/greet.txt
--- a/greet.txt
+++ b/greet.txt
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
diff --git a/new.txt b/new.txt
new file mode 100644
--- /dev/null
+++ b/new.txt
@@ -0,0 +1 @@
+fresh
"""


def test_patches_apply_undo_and_say_what_does_not_fit(sandbox: Sandbox) -> None:
    sandbox.write_file("/tmp/f11/greet.txt", "one\ntwo\nthree\n")
    assert sandbox.apply_patch(DIFF, path="/tmp/f11", dry_run=True).applied
    assert sandbox.read_text("/tmp/f11/greet.txt") == "one\ntwo\nthree\n"
    result = sandbox.apply_patch(DIFF, path="/tmp/f11")
    assert [(file.path, file.action) for file in result.files] == [("greet.txt", "modify"), ("new.txt", "create")]
    assert sandbox.read_text("/tmp/f11/greet.txt") == "one\nTWO\nthree\n"
    with pytest.raises(orchard.PatchFailed, match=r"greet\.txt: hunk 1") as caught:
        sandbox.apply_patch(DIFF, path="/tmp/f11")
    assert not caught.value.result.applied
    assert not sandbox.apply_patch(DIFF, path="/tmp/f11", check=False).applied
    sandbox.apply_patch(DIFF, path="/tmp/f11", reverse=True)
    assert sandbox.read_text("/tmp/f11/greet.txt") == "one\ntwo\nthree\n"
    assert not sandbox.exists("/tmp/f11/new.txt")
    with pytest.raises(orchard.InvalidArgument) as bad:
        sandbox.apply_patch("no patch at all", path="/tmp/f11")
    assert bad.value.reason == "PATCH_MALFORMED"


def test_uploaded_archives_read_by_tar(sandbox: Sandbox, tmp_path: Path) -> None:
    make_tree(tmp_path / "source")
    sandbox.upload(tmp_path / "source", "/tmp/f12")
    sandbox.exec("tar -C /tmp/f12 -cf /tmp/f12.tar .", check=True)
    sandbox.download("/tmp/f12.tar", tmp_path / "f12.tar")
    with tarfile.open(tmp_path / "f12.tar") as tar:
        assert "./sub/deep/big" in tar.getnames()
