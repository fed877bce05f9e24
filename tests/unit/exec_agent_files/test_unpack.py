"""Unpacking: what may not leave the target does not, and what is allowed arrives as it was."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.errors import InvalidArgumentError, OrchardError
from services.exec_agent.files.archive.pack import pack
from services.exec_agent.files.archive.unpack import Unpacked, Unpacker
from services.exec_agent.files.ownership import Owner
from services.exec_agent.files.reading import CHUNK_BYTES
from tests.unit.exec_agent_files.support import snapshot


def default_owner() -> tuple[int, int]:
    return os.getuid(), os.getgid()


def unpack(target: Path, stream: bytes, *, keep_owners: bool = False, piece: int = 1000) -> Unpacked:
    archive_owner = (lambda entry: Owner(entry.uid, entry.gid)) if keep_owners else None
    unpacker = Unpacker(os.fsencode(target), default_owner, archive_owner)
    try:
        unpacker.open()
        for start in range(0, len(stream), piece):
            unpacker.write([stream[start : start + piece]])
        return unpacker.finish()
    except BaseException:
        unpacker.abort()
        raise


def make(*entries: tuple[str, bytes, str]) -> bytes:
    """An archive of (name, type, link target or content)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, text in entries:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
            if kind == tarfile.REGTYPE:
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
            else:
                info.linkname = text
                archive.addfile(info)
    return buffer.getvalue()


FILE, LINK, HARD, FOLDER, PIPE, CHARACTER, BLOCK = (
    tarfile.REGTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_text("secret")
    return folder


@pytest.fixture
def target(tmp_path: Path, outside: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "there").symlink_to(outside)
    (folder / "up").symlink_to("..")
    (folder / "secret link").symlink_to(outside / "secret")
    return folder


ESCAPES: dict[str, tuple[str, Callable[[Path], bytes]]] = {
    "absolute": ("/outside/x", lambda _: make(("/outside/x", FILE, "x"))),
    "dots": ("../outside/x", lambda _: make(("../outside/x", FILE, "x"))),
    "dots inside": ("a/../../outside/x", lambda _: make(("a/../../outside/x", FILE, "x"))),
    "dots at the end": ("a/..", lambda _: make(("a/..", FOLDER, ""))),
    "a link that was there": ("there/x", lambda _: make(("there/x", FILE, "x"))),
    "a directory through a link that was there": ("there/d", lambda _: make(("there/d", FOLDER, ""))),
    "a directory that is a link": ("there", lambda _: make(("there", FOLDER, ""))),
    "a relative link that was there": ("up/outside/x", lambda _: make(("up/outside/x", FILE, "x"))),
    "a link of the archive": ("l/x", lambda o: make(("l", LINK, str(o)), ("l/x", FILE, "x"))),
    "a relative link of the archive": ("l/x", lambda _: make(("l", LINK, "../outside"), ("l/x", FILE, "x"))),
    "a chain of links": (
        "b/x",
        lambda _: make(("d", FOLDER, ""), ("d/a", LINK, "../.."), ("b", LINK, "d/a/outside"), ("b/x", FILE, "x")),
    ),
    "a link over a link": ("l/x", lambda o: make(("l", LINK, "."), ("l", LINK, str(o)), ("l/x", FILE, "x"))),
    "a link through a link": ("there/l", lambda _: make(("there/l", LINK, "x"))),
    "a hard link to the outside": ("h", lambda _: make(("h", HARD, "../outside/secret"))),
    "an absolute hard link": ("h", lambda o: make(("h", HARD, str(o / "secret")))),
    "a hard link through a link": ("h", lambda _: make(("h", HARD, "there/secret"))),
    "a hard link made through a link": ("there/h", lambda _: make(("f", FILE, "x"), ("there/h", HARD, "f"))),
    "a character device": ("c", lambda _: make(("c", CHARACTER, ""))),
    "a block device": ("b", lambda _: make(("b", BLOCK, ""))),
}


@pytest.mark.parametrize("kind", ESCAPES)
def test_escapes_are_refused_by_name(kind: str, target: Path, outside: Path) -> None:
    name, build = ESCAPES[kind]
    with pytest.raises(InvalidArgumentError) as caught:
        unpack(target, build(outside))
    assert caught.value.reason == "ARCHIVE_ENTRY_ESCAPES"
    assert caught.value.metadata["entry"].rstrip("/") == name
    assert snapshot(outside) == {"secret": ("-", b"secret")}
    assert not (outside.parent / "x").exists()


def test_links_are_replaced_never_written_through(target: Path, outside: Path) -> None:
    unpack(target, make(("secret link", FILE, "new"), ("there", FILE, "file now")))
    assert (outside / "secret").read_text() == "secret"
    assert (target / "secret link").read_text() == "new"
    assert not (target / "there").is_symlink()


def test_links_that_point_outside_may_be_made_and_a_hard_link_to_one_links_the_link(
    target: Path, outside: Path
) -> None:
    unpack(target, make(("python", LINK, "/usr/bin/python3"), ("h", HARD, "secret link"), ("h", FILE, "mine")))
    assert str((target / "python").readlink()) == "/usr/bin/python3"
    assert (target / "h").read_text() == "mine"
    assert (outside / "secret").read_text() == "secret"


def test_links_inside_are_followed(target: Path) -> None:
    (target / "usr/lib").mkdir(parents=True)
    (target / "lib").symlink_to("usr/lib")
    (target / "abs").symlink_to(target / "usr")
    unpack(target, make(("lib/a", FILE, "1"), ("lib", FOLDER, ""), ("abs/lib/b", FILE, "2")))
    assert (target / "usr/lib/a").read_text() == "1"
    assert (target / "usr/lib/b").read_text() == "2"
    assert (target / "lib").is_symlink()


def test_link_loops_end(target: Path) -> None:
    (target / "loop").symlink_to("loop")
    with pytest.raises(OrchardError) as caught:
        unpack(target, make(("loop/x", FILE, "x")))
    assert caught.value.reason == "LINK_LOOP"


def test_contents_merge_and_files_replace(target: Path) -> None:
    (target / "d").mkdir()
    (target / "d/old").write_text("old")
    (target / "d/same").write_text("before")
    result = unpack(
        target, make(("d/", FOLDER, ""), ("d/same", FILE, "after"), ("d/new", FILE, "new"), ("p", PIPE, ""))
    )
    assert result == Unpacked(entries=4, size=8)
    assert (target / "d/old").read_text() == "old"
    assert (target / "d/same").read_text() == "after"
    assert stat.S_ISFIFO((target / "p").stat().st_mode)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([("d", FILE, "x")], "IS_A_DIRECTORY"),
        ([("f/x", FILE, "x")], "NOT_A_DIRECTORY"),
        ([("f", FOLDER, "")], "NOT_A_DIRECTORY"),
        ([("x" * 300, FILE, "x")], "PATH_INVALID"),
        ([("h", HARD, "missing")], "ARCHIVE_MALFORMED"),
        ([(".", FILE, "x")], "ARCHIVE_MALFORMED"),
    ],
)
def test_conflicts_name_the_entry(target: Path, entries: list[tuple[str, bytes, str]], reason: str) -> None:
    (target / "d").mkdir()
    (target / "f").write_text("file")
    with pytest.raises(OrchardError) as caught:
        unpack(target, make(*entries))
    assert caught.value.reason == reason
    assert entries[0][0][:4] in caught.value.message
    assert (target / "f").read_text() == "file"
    assert not list(target.glob(".orchard-*"))


def test_a_cut_stream_leaves_whole_files_only(target: Path) -> None:
    stream = make(("one", FILE, "1" * 5000), ("two", FILE, "2" * 5000))
    (target / "two").write_text("as it was")
    with pytest.raises(InvalidArgumentError) as caught:
        unpack(target, stream[:9000])
    assert caught.value.reason == "ARCHIVE_TRUNCATED"
    assert (target / "one").read_text() == "1" * 5000
    assert (target / "two").read_text() == "as it was"
    assert not list(target.glob(".orchard-*"))


def test_a_missing_target_is_made(tmp_path: Path) -> None:
    stream = make((".", FOLDER, ""), ("f", FILE, "x"))
    unpack(tmp_path / "a/b", stream)
    assert (tmp_path / "a/b/f").read_text() == "x"
    (tmp_path / "kept").mkdir(mode=0o700)
    unpack(tmp_path / "kept", stream)
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700


@pytest.mark.root
def test_owners(target: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, kind in [("d", FOLDER), ("d/f", FILE), ("d/l", LINK)]:
            info = tarfile.TarInfo(name)
            info.type, info.uid, info.gid, info.linkname = kind, 1234, 5678, "f"
            archive.addfile(info)
    unpack(target, buffer.getvalue(), keep_owners=True)
    for name in ["d", "d/f", "d/l"]:
        assert (target / name).lstat().st_uid == 1234
        assert (target / name).lstat().st_gid == 5678
    unpack(target / "ours", buffer.getvalue())
    assert (target / "ours/d/f").stat().st_uid == os.getuid()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "a/read only").mkdir(parents=True)
    (folder / "a/read only/file").write_text("kept")
    (folder / "empty").mkdir()
    (folder / "script").write_text("#!/bin/sh\n")
    (folder / "script").chmod(0o4755)
    (folder / "dangling").symlink_to("nowhere")
    (folder / ("long" * 50)).write_bytes(b"\0\xff" * 70_000)
    os.link(folder / "script", folder / "zlink")
    os.mkfifo(folder / "pipe")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe")).write_bytes(b"name")
    with (folder / "sparse").open("wb") as file:
        file.truncate(3_000_000)
        file.seek(1_000_000)
        file.write(b"data")
    for number, path in enumerate(sorted(folder.rglob("*"), reverse=True)):
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + number), follow_symlinks=False)
    (folder / "a/read only").chmod(0o555)
    return folder


def _attributes(folder: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.lstat().st_nlink)
        for path in folder.rglob("*")
    }


def test_a_round_trip_keeps_everything(tree: Path, target: Path) -> None:
    stream = b"".join(pack(os.fsencode(tree)))
    result = unpack(target / "copy", stream)
    assert snapshot(target / "copy") == snapshot(tree)
    assert _attributes(target / "copy") == _attributes(tree)
    assert result.entries == len(list(tree.rglob("*")))


def test_what_gnu_tar_packs_and_unpacks(tree: Path, target: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        ["tar", "-C", tree, "--format=pax", "--sparse", "-cf", "-", "."], capture_output=True, check=True
    )
    unpack(target / "copy", done.stdout, piece=100_000)
    assert _attributes(target / "copy") == _attributes(tree)
    assert snapshot(target / "copy") == snapshot(tree)
    assert (target / "copy/sparse").stat().st_blocks * 512 < 1_000_000
    (tmp_path / "theirs").mkdir()
    subprocess.run(
        ["tar", "-C", tmp_path / "theirs", "-xpf", "-"], input=b"".join(pack(os.fsencode(tree))), check=True, timeout=60
    )
    assert snapshot(tmp_path / "theirs") == snapshot(tree)


def test_a_single_file_is_packed_under_its_name(tree: Path, target: Path) -> None:
    unpack(target, b"".join(pack(os.fsencode(tree / "script"))))
    assert (target / "script").read_text() == "#!/bin/sh\n"


@pytest.mark.parametrize("below", range(0, 4096, 512))
def test_no_chunk_is_larger_than_a_message_may_be(tmp_path: Path, below: int) -> None:
    """Wherever the end of the archive falls."""
    (tmp_path / "file").write_bytes(os.urandom(CHUNK_BYTES - below))
    chunks = list(pack(os.fsencode(tmp_path)))
    assert max(map(len, chunks)) <= CHUNK_BYTES
    assert all(chunks)
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
        assert tar.extractfile("file").read() == (tmp_path / "file").read_bytes()  # type: ignore[union-attr]


def test_files_that_shrink_or_vanish_do_not_break_the_stream(tmp_path: Path, target: Path) -> None:
    folder = tmp_path / "moving"
    (folder / "m").mkdir(parents=True)
    for name in ["a", "b shrinks", "c vanishes", "m/inner", "z"]:
        (folder / name).write_bytes(name.encode() * 400_000)
    chunks = pack(os.fsencode(folder))
    stream = [next(chunks)]
    with (folder / "b shrinks").open("r+b") as file:
        file.truncate(10)
    (folder / "c vanishes").unlink()
    (folder / "m/inner").unlink()
    (folder / "m").rmdir()
    stream += chunks
    unpack(target / "copy", b"".join(stream), piece=100_000)
    assert sorted(path.name for path in (target / "copy").iterdir()) == ["a", "b shrinks", "z"]
    assert (target / "copy/a").read_bytes() == b"a" * 400_000
    assert (target / "copy/z").read_bytes() == b"z" * 400_000
    # It was being read: what is gone is filled with zeros.
    shrunk = (target / "copy/b shrinks").read_bytes()
    assert len(shrunk) == 400_000 * len("b shrinks")
    assert shrunk.strip(b"\0") == (b"b shrinks" * 400_000)[: len(shrunk.strip(b"\0"))]
    assert shrunk.endswith(b"\0" * 1_000_000)
