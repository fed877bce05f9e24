"""ApplyPatch of what one `git diff` would not write: series of diffs, and sections in each other's way.

The judge of a series is `git apply` of one diff after the other; of sections written by hand `git apply` where it takes
them, and what each section says for itself. Whatever the patch, a dry run and the real one must agree (apply_ours).
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Final

import pytest

from services.exec_agent.files.patch import Action, parse
from tests.integration.exec_agent_files.patch_tools import Outcome, apply_git, apply_git_in_turn, apply_ours
from tests.support.patch_cases import Case, Contents, Flavour, read_tree, write_tree
from tests.support.patch_edits import File, Tree
from tests.support.patch_scripts import Scripts
from tests.support.patch_sections import copy, create, delete, link, modify, rename, text_file
from tests.support.patch_series import series

SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "1"))
ROUNDS = int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "1"))
CASES = 150
_GIT_CANNOT_READ: Final = "git diff header lacks filename information"  # an empty file whose name ends in a blank
A, B, C, D, NEW = (text_file(line) for line in ("A", "B", "C", "D", "NEW"))
L = link("q")


def _case(tree: dict[str, File], *parts: bytes, reverse: bool = False) -> Case:
    target = {name.encode(): file for name, file in tree.items()}
    flavour = Flavour("git", ("written by hand",), 1)
    return Case(0, target, target, target, b"".join(parts), flavour, "by hand", reverse, 0, parts=parts)


def _contents(folder: Path, tree: Tree) -> Contents:
    write_tree(folder, tree)
    try:
        return read_tree(folder)
    finally:
        shutil.rmtree(folder)


def _explained(case: Case, ours: Outcome, git: Outcome) -> str:
    text = case.text.decode("utf-8", "backslashreplace")
    return "\n".join([f"seed {SEED}, {case}", text, ours.said, git.said, str(ours.tree), str(git.tree)])


def _undoes_a_copy(case: Case, git: Outcome) -> bool:
    """Git undoes a copy by copying back, as test_patch_corpus says: it wants no source to be there."""
    return case.reverse and bool(_copies(case)) and "already exists in working directory" in git.said


def _copies(case: Case) -> set[bytes]:
    return {patch.path for patch in parse(case.text, case.flavour.strip) if patch.action is Action.COPY}


def _undone(case: Case) -> Tree:
    """What an undone patch leaves: the old tree, but for what was changed since in files that it does not touch."""
    names = case.source.keys() | case.target.keys() | case.result.keys()
    since = {name for name in names if case.source.get(name) != case.target.get(name)}
    return {name: tree[name] for name in names if name in (tree := case.target if name in since else case.result)}


def _files_besides(contents: Contents, besides: set[bytes]) -> Contents:
    return {name: file for name, file in contents.items() if name not in besides and not stat.S_ISDIR(file[0])}


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_series_gives_what_its_diffs_give_one_after_the_other(tmp_path: Path, number: int) -> None:
    applied = refused = 0
    for case in series(SEED, tmp_path / "made", CASES, number * CASES):
        ours, git = apply_ours(tmp_path / "ours", case, case.text), apply_git_in_turn(tmp_path / "git", case)
        if _GIT_CANNOT_READ in git.said:
            continue
        if ours.applied and _undoes_a_copy(case, git):
            # What was in the place of a copy, as -B makes them, the diff does not say.
            undone = _files_besides(_contents(tmp_path / "new", _undone(case)), _copies(case))
            assert _files_besides(ours.tree, _copies(case)) == undone, _explained(case, ours, git)
            continue
        assert ours.same_as(git), _explained(case, ours, git)
        applied += ours.applied
        refused += not ours.applied
    assert applied > CASES / 4
    assert refused > CASES / 8


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_sections_of_one_diff_fit_in_any_order(tmp_path: Path, number: int) -> None:
    """Each means the tree before the diff. Git refuses some orders; where it takes them it makes the same of them."""
    applied = 0
    for case in Scripts(SEED).at_once(CASES, number * CASES):
        ours, git = apply_ours(tmp_path / "ours", case, case.text), apply_git(tmp_path / "git", case, case.text)
        assert ours.applied, _explained(case, ours, git)
        assert ours.tree == _contents(tmp_path / "new", case.new), _explained(case, ours, git)
        assert not git.applied or ours.same_as(git), _explained(case, ours, git)
        applied += git.applied
    assert applied > CASES / 2


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_dry_run_knows_what_the_real_one_does(tmp_path: Path, number: int) -> None:
    """Sections that are in each other's way in every manner: apply_ours asserts it of each, whole and in part."""
    applied = 0
    for case in Scripts(SEED).any(2 * CASES, number * 2 * CASES):
        whole = apply_ours(tmp_path / "ours", case, case.text)
        part = apply_ours(tmp_path / "ours", case, case.text, partial=True)
        assert whole.applied == part.applied
        assert not whole.applied or whole.tree == part.tree
        applied += whole.applied
    assert applied > CASES / 4


_AS_GIT = {
    "made where one is renamed away": _case({"a": A}, create("a", NEW) + rename("a", "b")),
    "renamed away and made again": _case({"a": A}, rename("a", "b") + create("a", NEW)),
    "two renamed onto one": _case({"a": A, "b": B, "c": C}, rename("a", "c") + rename("b", "c") + rename("c", "d")),
    "swapped": _case({"a": A, "b": B}, rename("a", "b") + rename("b", "a")),
    "swapped back": _case({"a": A, "b": B}, rename("a", "b") + rename("b", "a"), reverse=True),
    "in a ring": _case({"a": A, "b": B, "c": C}, rename("a", "b") + rename("b", "c") + rename("c", "a")),
    "in a ring, back": _case(
        {"a": A, "b": B, "c": C}, rename("a", "b") + rename("b", "c") + rename("c", "a"), reverse=True
    ),
    "into a directory of its name": _case({"a": A}, rename("a", "a/b")),
    "out of a directory of its name": _case({"a/b": A}, rename("a/b", "a")),
    "file and directory change names": _case({"a/x": A, "b": B}, rename("b", "a") + rename("a/x", "b/x")),
    "directory to file, its file copied": _case({"d/x": A}, create("d", NEW) + copy("d/x", "e") + rename("d/x", "f")),
    "copied after its change": _case({"a": A}, modify("a", A, NEW) + copy("a", "b")),
    "file to link": _case({"a": A}, delete("a", A) + create("a", L)),
    "link to file": _case({"a": L}, delete("a", A) + create("a", L), reverse=True),
    "link renamed": _case({"L": L}, rename("L", "M")),
    "link copied": _case({"L": L}, copy("L", "M")),
    "made over a link, its target's file removed through it": _case(
        {"L": L, "q/x": A}, create("L", NEW) + delete("L/x", A)
    ),
    "link removed, then through it": _case({"L": L, "q/x": A}, delete("L", L) + delete("L/x", A)),
    "link removed, after a change through it": _case({"L": L, "q/x": A}, modify("L/x", A, B) + delete("L", L)),
}


@pytest.mark.parametrize("case", _AS_GIT.values(), ids=_AS_GIT)
def test_by_hand_as_git(tmp_path: Path, case: Case) -> None:
    ours, git = apply_ours(tmp_path / "ours", case, case.text), apply_git(tmp_path / "git", case, case.text)
    assert ours.same_as(git), _explained(case, ours, git)


_SERIES = {
    "changed, then renamed": _case({"a": A}, modify("a", A, B), rename("a", "b")),
    "changed, then renamed, undone": _case({"b": B}, modify("a", A, B), rename("a", "b"), reverse=True),
    "changed twice": _case({"a": A}, modify("a", A, B), modify("a", B, C)),
    "renamed, then changed": _case({"a": A}, rename("a", "b"), modify("b", A, B)),
    "renamed and back": _case({"a": A}, rename("a", "b"), rename("b", "a")),
    "renamed twice": _case({"a": A}, rename("a", "b"), rename("b", "c")),
    "made, then renamed": _case({}, create("a", A), rename("a", "b")),
    "made, removed, made": _case({}, create("a", A), delete("a", A), create("a", B)),
    "made over another's, then removed": _case({"a": D}, create("a", A), delete("a", A)),
    "renamed over another's, then on": _case({"a": D, "c": C}, rename("c", "a"), modify("a", C, A), rename("a", "b")),
    "swapped, then one removed": _case({"a": A, "b": B}, rename("b", "a") + rename("a", "b"), delete("a", B)),
    "changed, then its directory a file": _case(
        {"d/x": A, "e": B}, modify("d/x", A, C) + delete("e", B), create("d", NEW) + delete("d/x", C)
    ),
    "into a directory, which becomes it": _case({"a": A}, rename("a", "d/a"), rename("d/a", "d")),
}


@pytest.mark.parametrize("case", _SERIES.values(), ids=_SERIES)
def test_series_by_hand(tmp_path: Path, case: Case) -> None:
    ours, git = apply_ours(tmp_path / "ours", case, case.text), apply_git_in_turn(tmp_path / "git", case)
    assert ours.same_as(git), _explained(case, ours, git)


def test_files_that_another_has_are_in_the_way_of_a_series(tmp_path: Path) -> None:
    """Git, given both diffs at once, writes over the file."""
    case = _case({"a": D}, create("a", A), b"From: somebody\n\n", rename("a", "b"))
    ours = apply_ours(tmp_path / "ours", case, case.text)
    assert "it exists already" in ours.errors()
    assert ours.tree == _contents(tmp_path / "new", case.target)


_AT_ONCE = {
    "renamed over one that goes": (_case({"a": A, "b": B}, rename("a", "b") + delete("b", B)), {"b": A}),
    "made where one is renamed away, undone": (
        _case({"a": NEW, "b": A}, create("a", NEW) + rename("a", "b"), reverse=True),
        {"a": A},
    ),
}


@pytest.mark.parametrize(("case", "new"), _AT_ONCE.values(), ids=_AT_ONCE)
def test_a_removal_means_the_file_before_the_diff(tmp_path: Path, case: Case, new: dict[str, File]) -> None:
    """Git looks for the content that is removed in the file that took its place."""
    ours = apply_ours(tmp_path / "ours", case, case.text)
    assert ours.applied, ours.said
    assert ours.tree == _contents(tmp_path / "new", {name.encode(): file for name, file in new.items()})


_ITS_FILES = "it is a directory: the patch makes files in it"
_REFUSED = {
    "file and files in it": (_case({}, create("d/b", B) + create("d", A)), _ITS_FILES),
    "renamed into, then made": (_case({"a": A}, rename("a", "d/a") + create("d", NEW)), _ITS_FILES),
    "link and files in it": (_case({"q/x": A}, create("L/x", B) + create("L", L)), _ITS_FILES),
    "renamed over another's, which is not the one that goes": (
        _case({"a": A, "b": D}, rename("a", "b") + delete("b", A)),
        "line 1: expected 'A', found 'D'",
    ),
    "below a copy that stays": (
        _case({"a": A, "d": D}, copy("a", "d") + create("d/e", NEW) + delete("d", D)),
        "'d' is no directory",
    ),
    "one file by two names": (
        _case({"q/x": A, "L": L}, modify("L/x", A, B) + modify("q/x", A, C)),
        "it is the same file as 'L/x', by way of a link",
    ),
    "one new file by two names": (
        _case({"q/y": A, "L": L}, create("L/d/x", B) + create("q/d/x", C)),
        "it is the same file as 'L/d/x', by way of a link",
    ),
    "below a link to nothing": (
        _case({"L": L}, create("L/x", B) + create("q", C)),
        "a parent of it is a symbolic link to nothing",
    ),
}


@pytest.mark.parametrize(("case", "error"), _REFUSED.values(), ids=_REFUSED)
def test_refused_by_the_dry_run_too(tmp_path: Path, case: Case, error: str) -> None:
    """Here git says it can and stops half way, or goes through no link at all."""
    ours = apply_ours(tmp_path / "ours", case, case.text)
    assert error in ours.errors()
    assert ours.tree == _contents(tmp_path / "new", case.target)
