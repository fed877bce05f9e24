"""Paths resolve as the kernel resolves them, where no link of /proc is in the way."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.exec_agent.files.resolving import exists, is_directory, open_path, status_of

NAMES = ["a", "b", "c"]
PART = st.sampled_from([*NAMES, ".", "..", ""])
PATH = st.lists(PART, min_size=1, max_size=6).map("/".join)
# What stands under a name: a file, a folder, or a link to a relative or an absolute path.
THING = st.one_of(
    st.just(("file", "")),
    st.just(("folder", "")),
    st.tuples(st.just("relative"), PATH.filter(bool)),
    st.tuples(st.just("absolute"), PATH),
)
TREE = st.dictionaries(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join), THING, max_size=8)
FLAGS = st.sampled_from([os.O_PATH, os.O_PATH | os.O_NOFOLLOW, os.O_PATH | os.O_DIRECTORY, os.O_RDONLY])


def build(top: Path, tree: dict[str, tuple[str, str]]) -> None:
    for name, (kind, target) in sorted(tree.items()):
        path = top / name
        try:
            # A link may lead out of here, where nothing is to be made.
            if not path.parent.resolve().is_relative_to(top):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "file":
                path.touch()
            elif kind == "folder":
                path.mkdir()
            else:
                path.symlink_to(target if kind == "relative" else f"{top}/{target}")
        except (OSError, RuntimeError):
            continue  # a file, a link or a circle of links stands where a folder would have to


def outcome(opener, path: bytes, flags: int) -> tuple[int, int] | int:
    try:
        descriptor = opener(path, flags)
    except OSError as error:
        return error.errno or 0
    try:
        status = os.fstat(descriptor)
        return status.st_dev, status.st_ino
    finally:
        os.close(descriptor)


@given(TREE, PATH, FLAGS)
def test_it_opens_what_the_kernel_opens(tree: dict[str, tuple[str, str]], path: str, flags: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder).resolve()
        build(top, tree)
        full = f"{top}/{path}".encode()
        assert outcome(open_path, full, flags) == outcome(os.open, full, flags)
        assert exists(full) == os.path.lexists(full)
        assert is_directory(full) == Path(f"{top}/{path}").is_dir()


def test_a_link_that_is_not_followed_tells_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere/at all")
    found = status_of(bytes(tmp_path / "link"), follow=False)
    assert (found.target, found.status.st_ino) == (b"nowhere/at all", (tmp_path / "link").lstat().st_ino)
    with pytest.raises(FileNotFoundError):
        status_of(bytes(tmp_path / "link"), follow=True)


def test_links_that_lead_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError) as caught:
        open_path(bytes(tmp_path / "a" / "x"), os.O_PATH)
    assert caught.value.errno == errno.ELOOP


def test_a_descriptor_is_reached_by_its_name_and_not_by_its_number(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    held = os.open(folder, os.O_PATH)
    try:
        by_number = Path(f"/proc/self/fd/{held}")
        assert is_directory(bytes(by_number))
        folder.rmdir()
        assert by_number.is_dir(), "the kernel leads to what has no name any more"
        assert not is_directory(bytes(by_number))
    finally:
        os.close(held)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    def count() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    (tmp_path / "link").symlink_to(tmp_path)
    before = count()
    for path in ("", "link/link/link", "missing", "link/missing/x", "link/"):
        exists(f"{tmp_path}/{path}".encode())
    with pytest.raises(PermissionError):
        open_path(b"/proc/self/status", os.O_RDONLY)
    assert count() == before
