"""Patches of real directories: what is in the way, and what others do in them meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.common.errors import FailedPreconditionError
from services.exec_agent.files import placing
from tests.support.patch_sections import copy, create, delete, link, modify, text_file
from tests.unit.exec_agent_files.test_patch_git import patch_tree

_X, _NEW = text_file("X"), text_file("NEW")


def _directory(origin: Path) -> None:
    (origin / "inside").mkdir(parents=True)


def _too_large(origin: Path) -> None:
    with origin.open("wb") as file:
        file.truncate((64 << 20) + 1)


def _below_a_file(origin: Path) -> None:
    origin.parent.write_text("a file\n")


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("origin", "make"), [("x", _directory), ("x", _too_large), ("f/x", _below_a_file), ("missing", None)]
)
def test_a_copy_whose_origin_cannot_be_read_is_not_undone(tmp_path: Path, origin: str, make, partial: bool) -> None:
    if make is not None:
        make(tmp_path / origin)
    (tmp_path / "y").write_text("kept\n")
    for dry_run in (True, False):
        plan = patch_tree(tmp_path, copy(origin, "y"), reverse=True, partial=partial, dry_run=dry_run)
        assert [result.error for result in plan.results] == [
            "the patch deletes the file, but lines would be left in it"
        ]
        assert (tmp_path / "y").read_text() == "kept\n"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e/x").write_text("X\n")
    return tmp_path


_DIRECTORY_TO_FILE = create("d", _NEW) + delete("d/e/x", _X)


def test_a_file_takes_the_place_of_a_directory(work: Path) -> None:
    assert patch_tree(work, _DIRECTORY_TO_FILE).fits
    assert (work / "d").read_text() == "NEW\n"
    assert [path.name for path in work.iterdir()] == ["d"]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("top", ["", "{}/"])
def test_nothing_is_left_of_what_is_removed_through_a_link_that_then_changes(
    tmp_path: Path, top: str, turned: bool
) -> None:
    for name in ("d/e/x", "d/y", "b/z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("X\n")
    target = top.format(tmp_path) + "d"
    (tmp_path / "L").symlink_to(target)
    (tmp_path / "b/M").symlink_to("../L/e")
    removals = delete("b/M/x", _X) + delete("b/M", link("../L/e")) + delete("L/y", _X)
    change = modify("L", link(target), link("b")) if turned else delete("L", link(target))
    assert patch_tree(tmp_path, removals + change).fits
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left - {"L"} == {"b", "b/z", "d", "d/e"}
    assert ("L" in left) is turned


def test_what_comes_into_a_directory_before_it_goes_stays_there(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process makes a file in it between the look and the rename."""
    rename = os.rename

    def late(source: bytes, target: bytes, **directories: int) -> None:
        if source == b"d":
            (work / "d/late").write_text("somebody's own\n")
        rename(source, target, **directories)

    monkeypatch.setattr(placing.os, "rename", late)
    with pytest.raises(FailedPreconditionError, match="it is a directory"):
        patch_tree(work, _DIRECTORY_TO_FILE)
    assert (work / "d/late").read_text() == "somebody's own\n"
    assert (work / "d/e/x").read_text() == "X\n"
    assert sorted(path.name for path in work.rglob("*")) == ["d", "e", "late", "x"]


def test_what_comes_into_a_directory_after_it_went_is_kept(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process, which has it open, makes a file in it under its new name."""
    place = placing.rename_into_free_name
    opened = os.open(work / "d", os.O_DIRECTORY)

    def late(*names: object) -> None:
        os.close(os.open("late", os.O_WRONLY | os.O_CREAT, dir_fd=opened))
        place(*names)  # type: ignore[arg-type]

    monkeypatch.setattr(placing, "rename_into_free_name", late)
    try:
        assert patch_tree(work, _DIRECTORY_TO_FILE).fits
    finally:
        os.close(opened)
    assert (work / "d").read_text() == "NEW\n"
    (kept,) = [path for path in work.iterdir() if path.name != "d"]
    assert [path.name for path in kept.rglob("*")] == ["late"]
