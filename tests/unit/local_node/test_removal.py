import os
from pathlib import Path

import pytest

from services.local.runtime.removal import remove_tree


def test_a_tree_of_any_depth_and_mode(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    folder = os.open(top, os.O_RDONLY)
    for _ in range(2000):  # deeper than recursion and paths allow
        os.mkdir("d", dir_fd=folder)
        inner = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    os.close(folder)
    closed = top / "closed" / "inner"
    closed.mkdir(parents=True)
    (closed / "file").touch()
    closed.chmod(0)
    (top / "closed").chmod(0o500)
    remove_tree(top)
    assert not top.exists()
    remove_tree(top)


def test_links_are_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    top = tmp_path / "top"
    top.mkdir()
    (top / "link").symlink_to(kept)
    (top / "file").symlink_to(kept / "file")
    remove_tree(top)
    assert (kept / "file").exists()
    with pytest.raises(NotADirectoryError):
        remove_tree(kept / "file")
