"""Tar streams, friendly and hostile."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import orchard
import pytest
from orchard._client import archive


def packed(root: Path, *exclude: str) -> bytes:
    return b"".join(block for block, _size in archive.pack(root, exclude))


def tar_of(*entries: tuple[str, str, str]) -> io.BytesIO:
    """(kind, name, content or link target) entries."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for kind, name, value in entries:
            member = tarfile.TarInfo(name)
            member.type = {
                "file": tarfile.REGTYPE,
                "dir": tarfile.DIRTYPE,
                "sym": tarfile.SYMTYPE,
                "hard": tarfile.LNKTYPE,
                "fifo": tarfile.FIFOTYPE,
                "dev": tarfile.CHRTYPE,
            }[kind]
            member.mode = 0o7777
            if kind == "file":
                member.size = len(value)
                tar.addfile(member, io.BytesIO(value.encode()))
            else:
                member.linkname = value if kind in ("sym", "hard") else ""
                tar.addfile(member)
    buffer.seek(0)
    return buffer


def test_blocks_are_bounded_and_read_by_tar(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "big").write_bytes(os.urandom(3_000_000))
    for number in range(300):
        (root / f"small{number}").write_text(str(number))
    blocks = list(archive.pack(root))
    assert [len(block) for block, _size in blocks[:-1]] == [archive.BLOCK] * (len(blocks) - 1)
    assert len(blocks[-1][0]) < archive.BLOCK
    assert sum(size for _block, size in blocks) == archive.tree_size(root)
    with tarfile.open(fileobj=io.BytesIO(b"".join(block for block, _size in blocks))) as tar:
        assert len(tar.getnames()) == 301
        assert tar.extractfile("big").read() == (root / "big").read_bytes()  # type: ignore[union-attr]


@pytest.mark.parametrize("below", range(0, 4096, 512))
def test_no_block_is_larger_than_a_message_may_be(tmp_path: Path, below: int) -> None:
    """Wherever the end of the archive falls."""
    (tmp_path / "file").write_bytes(os.urandom(archive.BLOCK - below))
    blocks = [block for block, _size in archive.pack(tmp_path)]
    assert max(map(len, blocks)) <= archive.BLOCK
    assert all(blocks)
    with tarfile.open(fileobj=io.BytesIO(b"".join(blocks))) as tar:
        assert tar.extractfile("file").read() == (tmp_path / "file").read_bytes()  # type: ignore[union-attr]


def test_names_that_are_no_text_and_special_files(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe")).write_text("odd")
    os.mkfifo(root / "pipe")
    archive.unpack(io.BytesIO(packed(root)), tmp_path / "out", "error")
    assert [os.fsencode(path.name) for path in (tmp_path / "out").iterdir()] == [b"\xff\xfe"]


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_bytes(bytes(2 << 20))
    blocks = archive.pack(root)
    next(blocks)
    os.truncate(root / "file", 10)
    with pytest.raises(OSError, match="shorter"):
        list(blocks)


@pytest.mark.parametrize(
    "entries",
    [
        [("file", "../evil", "x")],
        [("file", "/tmp/evil", "x")],
        [("file", "a/../../evil", "x")],
        [("sym", "link", "/etc/passwd")],
        [("sym", "link", "../evil")],
        [("sym", "a/link", "../../evil")],
        [("sym", "a/link", "b/../../../evil")],
        [("hard", "link", "../evil")],
        [("hard", "link", "/etc/passwd")],
        [("dir", "a", ""), ("sym", "a/up", "."), ("file", "a/up/../../../evil", "x")],
    ],
)
def test_what_would_leave_the_target_is_refused_before_anything_is_written(
    tmp_path: Path, entries: list[tuple[str, str, str]]
) -> None:
    target = tmp_path / "deep" / "target"
    with pytest.raises(orchard.UnsafeArchive):
        archive.unpack(tar_of(("file", "fine", "x"), *entries), target, "error")
    assert not target.exists()
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "entries",
    [
        [("dir", "real", ""), ("sym", "alias", "real"), ("file", "alias/file", "x")],
        [("file", "alias/file", "x"), ("sym", "alias", "real")],
        [("sym", "./alias", "real"), ("dir", "alias", "")],
    ],
)
def test_nothing_goes_through_links_of_the_archive(tmp_path: Path, entries: list[tuple[str, str, str]]) -> None:
    with pytest.raises(orchard.UnsafeArchive, match="alias"):
        archive.unpack(tar_of(*entries), tmp_path / "target", "error")
    assert not (tmp_path / "target").exists()


def test_links_that_stand_in_the_target_are_replaced(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    target = tmp_path / "target"
    target.mkdir()
    (target / "folder").symlink_to(outside)
    (target / "file").symlink_to(outside / "file")
    archive.unpack(tar_of(("file", "folder/file", "new"), ("file", "file", "new")), target, "error")
    assert (outside / "file").read_text() == "precious"
    assert (target / "folder" / "file").read_text() == "new"
    assert not (target / "file").is_symlink()


def test_rights_devices_and_unsafe_links_are_left_out(tmp_path: Path) -> None:
    target = tmp_path / "target"
    entries = [("file", "f", "x"), ("fifo", "p", ""), ("dev", "d", ""), ("sym", "out", "/etc"), ("sym", "in", "f")]
    assert archive.unpack(tar_of(*entries), target, "skip") == 2
    assert (target / "f").stat().st_mode & 0o7777 == 0o755
    assert sorted(path.name for path in target.iterdir()) == ["f", "in"]


def test_hard_links_within_are_kept(tmp_path: Path) -> None:
    target = tmp_path / "target"
    archive.unpack(tar_of(("file", "a/one", "x"), ("hard", "b/two", "a/one")), target, "error")
    assert (target / "b" / "two").samefile(target / "a" / "one")


def test_unpacking_merges(tmp_path: Path) -> None:
    target = tmp_path / "target"
    archive.unpack(tar_of(("file", "a/one", "old"), ("file", "a/two", "two")), target, "error")
    archive.unpack(tar_of(("file", "a/one", "new")), target, "error")
    assert {path.name: path.read_text() for path in (target / "a").iterdir()} == {"one": "new", "two": "two"}
