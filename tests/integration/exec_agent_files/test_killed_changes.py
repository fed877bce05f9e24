"""Kills of an agent in the middle of a patch or a move, at each step: after the next one's start it is whole or undone.

A kill is a system call from which on none does anything more: what stands on the disk then is what a kill leaves.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import OrchardError
from services.exec_agent.files import moving, placing
from services.exec_agent.files.intents import Intents
from services.exec_agent.files.patch import Options
from services.exec_agent.files.patching import apply_patch
from tests.support.patch_cases import Contents, Generator, read_tree, write_tree
from tests.support.patch_edits import File
from tests.support.patch_sections import create, delete, link, modify, rename, text_file

WAYS = {placing.PATCH: placing.settle, moving.MOVE: moving.settle}
CALLS = ("mkdir", "rmdir", "link", "symlink", "rename", "unlink", "write", "writev", "ftruncate", "fchmod", "utime")


class Killed(BaseException):
    """The agent is gone."""


def open_descriptors() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


class Life:
    """Counts the calls that change something, and ends with one of them: before it, or of a write in its middle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left = -1
        self._monkeypatch = monkeypatch
        self.steps = 0

    @contextmanager
    def ending_at(self, step: int) -> Iterator[None]:
        """`step` counts from 1; one that is never reached: it lives on."""
        self.steps, self._left = 0, step
        before = open_descriptors()
        with self._monkeypatch.context() as patches:
            for name in CALLS:
                patches.setattr(os, name, self._mortal(getattr(os, name)))
            patches.setattr(os, "open", self._mortal_open(os.open))
            for module in (placing, moving):
                patches.setattr(module, "rename_into_free_name", self._mortal(module.rename_into_free_name))
            with suppress(Killed):
                yield
        for descriptor in open_descriptors() - before:
            with suppress(OSError):
                os.close(descriptor)

    @property
    def has_ended(self) -> bool:
        return self.steps >= self._left

    def _step(self) -> None:
        self.steps += 1
        if self.has_ended:
            raise Killed

    def _mortal(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def mortal(*arguments: Any, **named: Any) -> Any:
            if call.__name__ == "write" and not self.has_ended:
                self._half(call, *arguments)
            self._step()
            return call(*arguments, **named)

        return mortal

    def _half(self, write: Callable[[int, Any], int], descriptor: int, data: Any) -> None:
        if self.steps + 1 == self._left:
            write(descriptor, data[: len(data) // 2])

    def _mortal_open(self, call: Callable[..., int]) -> Callable[..., int]:
        def mortal(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
            if flags & os.O_CREAT:
                self._step()
            return call(path, flags, *arguments, **named)

        return mortal


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Life:
    return Life(monkeypatch)


class Place:
    """A folder that an agent changes, and its own."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.state = folder / "state"

    def fill(self, tree: dict[bytes, File]) -> None:
        for folder in (self.work, self.state):
            shutil.rmtree(folder, ignore_errors=True)
        self.state.mkdir(parents=True)
        write_tree(self.work, {path: file for path, file in tree.items() if not path.endswith(b"/")})
        for path in tree:
            if path.endswith(b"/"):
                (self.work / os.fsdecode(path)).mkdir()

    @contextmanager
    def intents(self) -> Iterator[Intents]:
        descriptor = os.open(self.state, os.O_RDONLY)
        try:
            yield Intents(descriptor)
        finally:
            os.close(descriptor)

    def patch(self, text: bytes, strip: int, *, reverse: bool = False) -> bool:
        owner = (os.geteuid(), os.getegid())
        with self.intents() as intents, suppress(OrchardError):
            return apply_patch(
                os.fsencode(self.work), text, strip=strip, dry_run=False, options=Options(reverse=reverse),
                default_owner=lambda: owner, intents=intents,
            ).fits  # fmt: skip
        return False

    def settle(self) -> None:
        with self.intents() as intents:
            intents.settle(WAYS)


def trees_of(place: Place, tree: dict[bytes, File], apply: Callable[[], bool]) -> tuple[Contents, Contents]:
    place.fill(tree)
    before = read_tree(place.work)
    assert apply()
    return before, read_tree(place.work)


OLD: dict[bytes, File] = {
    b"changed": text_file("old"),
    b"removed/deep/only": text_file("gone"),
    b"moved": text_file("moved"),
    b"link": link("changed"),
    b"file-to-folder": text_file("file"),
    b"folder-to-file/deep/x": text_file("x"),
    b"link-to-folder": link("other"),
    b"other/kept": text_file("kept"),
    b"other/file": text_file("theirs"),
    b"other/empty/": File(b""),
    b"last": text_file("last"),
}
TEXT = b"".join(
    [
        modify("changed", text_file("old"), text_file("new")),
        delete("removed/deep/only", text_file("gone")),
        rename("moved", "new/deep/moved"),
        modify("link", link("changed"), link("last")),
        delete("file-to-folder", text_file("file")),
        create("file-to-folder/y", text_file("y")),
        delete("folder-to-file/deep/x", text_file("x")),
        create("folder-to-file", text_file("now a file")),
        delete("link-to-folder", link("other")),
        create("link-to-folder/file", text_file("ours")),
        create("link-to-folder/empty/ours", text_file("ours")),
        create("made/by/it", text_file("made")),
        modify("last", text_file("last"), text_file("first")),
    ]
)


def test_a_patch_that_is_killed_at_any_step_is_whole_or_undone(tmp_path: Path, life: Life) -> None:
    place, seen = Place(tmp_path), set[str]()
    old, new = trees_of(place, OLD, lambda: place.patch(TEXT, 1))
    assert len(old) > 10 < len(set(old.items()) ^ set(new.items()))
    step = 0
    while True:
        step += 1
        place.fill(OLD)
        with life.ending_at(step):
            assert place.patch(TEXT, 1)
        if not life.has_ended:
            break
        place.settle()
        found = read_tree(place.work)
        assert found in (old, new), f"half of it after a kill at step {step}"
        assert not list(place.state.iterdir())
        seen.add("old" if found == old else "new")
        if found == old:  # as the SDK does, once it knows that
            assert place.patch(TEXT, 1)
            assert read_tree(place.work) == new
    assert step > 80
    assert seen == {"old", "new"}


def test_an_agent_that_is_killed_as_it_settles_a_patch_leaves_it_to_the_next(tmp_path: Path, life: Life) -> None:
    place = Place(tmp_path)
    old, new = trees_of(place, OLD, lambda: place.patch(TEXT, 1))
    with life.ending_at(1 << 30):
        place.fill(OLD)
        place.patch(TEXT, 1)
    settled = 0
    for step in range(life.steps // 3, life.steps, 11):
        second, ended = 0, True
        while ended:
            second += 1
            place.fill(OLD)
            with life.ending_at(step):
                place.patch(TEXT, 1)
            with life.ending_at(second):
                place.settle()
            ended, settled = life.has_ended, settled + 1
            place.settle()
            assert read_tree(place.work) in (old, new), f"killed at step {step}, then at {second}"
            assert not list(place.state.iterdir())
    assert settled > 60


def test_patches_of_all_kinds_that_are_killed_at_any_step(tmp_path: Path, life: Life) -> None:
    place, kills = Place(tmp_path / "place"), 0
    for case in Generator(1, tmp_path / "made").cases(12, 77_000):
        place.fill(dict(case.source))
        if not place.patch(case.text, case.flavour.strip, reverse=case.reverse):
            continue
        new = read_tree(place.work)
        place.fill(dict(case.source))
        old, step = read_tree(place.work), 0
        while True:
            step += 1
            place.fill(dict(case.source))
            with life.ending_at(step):
                place.patch(case.text, case.flavour.strip, reverse=case.reverse)
            if not life.has_ended:
                break
            place.settle()
            kills += 1
            assert read_tree(place.work) in (old, new), f"{case}, killed at step {step}"
    assert kills > 200


def test_what_another_made_in_the_place_of_a_new_file_is_left_alone(tmp_path: Path, life: Life) -> None:
    place = Place(tmp_path)
    text, step = create("d/new", text_file("ours")), 0
    while True:
        step += 1
        place.fill({b"other": text_file("x")})
        with life.ending_at(step):
            place.patch(text, 1)
        if not life.has_ended:
            break
        with suppress(FileNotFoundError):
            (place.work / "d/new").unlink()
        (place.work / "d").mkdir(exist_ok=True)
        (place.work / "d/new").write_text("theirs")
        place.settle()
        assert (place.work / "d/new").read_text() == "theirs"


@pytest.mark.parametrize("damage", ["gone", "unreadable", "unknown"])
def test_what_cannot_be_settled_is_let_go(tmp_path: Path, life: Life, damage: str) -> None:
    place = Place(tmp_path)
    place.fill(OLD)
    with life.ending_at(60):
        place.patch(TEXT, 1)
    (left,) = place.state.iterdir()
    if damage == "gone":
        shutil.rmtree(place.work)
    else:
        left.write_bytes(b"no note\n" if damage == "unreadable" else b'["other"] b1d3d3f2\n')
    place.settle()
    assert not list(place.state.iterdir())


def test_a_patch_that_cannot_be_noted_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, real = Place(tmp_path), os.write
    old, _new = trees_of(place, OLD, lambda: place.patch(TEXT, 1))
    for room in range(60):
        place.fill(OLD)
        left = [room]

        def write(descriptor: int, data: Any, left: list[int] = left) -> int:
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "full")
            left[0] -= 1
            return real(descriptor, data)

        with monkeypatch.context() as patches:
            patches.setattr(os, "write", write)
            is_applied = place.patch(TEXT, 1)
        if is_applied:
            break
        assert read_tree(place.work) == old
        assert not list(place.state.iterdir())
    assert room > 20


# ------------------------------------------------------------ moves that take a copy

MOVED: dict[bytes, File] = {
    b"from/tree/a": text_file("a"),
    b"from/tree/deep/b": text_file("b"),
    b"from/tree/deep/link": link("b"),
    b"to/other": text_file("other"),
}


@pytest.mark.parametrize(("name", "overwrite"), [("tree", False), ("tree", True), ("tree/a", True)])
def test_a_move_that_is_killed_at_any_step_is_whole_or_undone(
    tmp_path: Path, life: Life, monkeypatch: pytest.MonkeyPatch, name: str, overwrite: bool
) -> None:
    """As to another device."""
    place, seen = Place(tmp_path), set[str]()
    source, target = (os.fsencode(place.work / path) for path in (f"from/{name}", "to/moved"))
    monkeypatch.setattr(moving, "_renamed", lambda *_arguments, **_named: False)

    def move() -> bool:
        with place.intents() as intents:
            moving.move(source, target, overwrite=overwrite, intents=intents)
        return True

    old, new = trees_of(place, MOVED, move)
    step = 0
    while True:
        step += 1
        place.fill(MOVED)
        with life.ending_at(step):
            move()
        if not life.has_ended:
            break
        place.settle()
        found = read_tree(place.work)
        assert found in (old, new), f"half of it after a kill at step {step}"
        assert not list(place.state.iterdir())
        seen.add("old" if found == old else "new")
    assert seen == {"old", "new"}


def test_an_agent_that_is_killed_as_it_settles_a_move_leaves_it_to_the_next(
    tmp_path: Path, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    monkeypatch.setattr(moving, "_renamed", lambda *_arguments, **_named: False)

    def move() -> bool:
        with place.intents() as intents:
            moving.move(
                os.fsencode(place.work / "from/tree"), os.fsencode(place.work / "to/moved"), overwrite=False,
                intents=intents,
            )  # fmt: skip
        return True

    old, new = trees_of(place, MOVED, move)
    with life.ending_at(1 << 30):
        place.fill(MOVED)
        move()
    for step in range(1, life.steps):
        second, ended = 0, True
        while ended:
            second += 1
            place.fill(MOVED)
            with life.ending_at(step):
                move()
            with life.ending_at(second):
                place.settle()
            ended = life.has_ended
            place.settle()
            assert read_tree(place.work) in (old, new), f"killed at step {step}, then at {second}"
