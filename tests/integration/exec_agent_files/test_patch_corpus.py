"""ApplyPatch against `git apply` and GNU `patch`: random trees, edits and targets, the same must come out of both.

Compared are whether all was applied and the whole trees with their modes. `git apply` is the judge of whole patches,
all or nothing, without fuzz; GNU `patch` of what it knows to read, hunk by hunk and with fuzz. 150 cases by default;
`make chaos` makes it 3,000 from its seed.

Where we differ on purpose, and why (DIFFERENCES has the proof of each, and a case of its own below):

==============  ========================================  ======================================================
tool            it does                                   we do, since
==============  ========================================  ======================================================
git apply       demands the start or end of the file      as GNU patch: without context on a side where the diff
                where a hunk has no context at all, or    has none at all, or with full context, a hunk may have
                starts at line 1                          moved; a file that grew a header still takes its patch
git apply -U0   adds lines at the line of the new file    as GNU patch: moved as far as the hunk before
                that the header names
git apply       undoes a copy by copying back: it stays,  remove the copy, if it is what it was copied from;
                and its source must not be there          that is how it was before
both            make a missing file from a hunk that      refuse: only a diff that says it makes a file makes one
                only adds lines
both, -U0       add at the end what belongs after a       refuse: it is not the file that the diff is about
                line that the file does not have
both, -U0       add the lines of an empty file to one     refuse, as git does without -U0: they may be there
                that is not; patch whatever the context   already, and nothing says where they belong
both            pass over "Binary files differ"           report the file: it would stay as it was, unnoticed
both            put a line that has no newline before     only at the end of the file, or refuse: the two lines
                others                                    would become one, or the file get a newline that
                                                          nobody asked for
patch           takes the lines of a removal away and     refuse that file, as git does: half of a removal is
                keeps the file if others are in it        nothing that anybody asked for
patch           makes a file where one is: adds the lines, refuse that file, as git does: it is somebody's, an
                or sets the mode where they do not fit;   empty one too
                of an empty one it does not even tell
patch           makes no directory in place of a file,    do both, as git does: a diff of trees may say so
                and no file in place of a directory
patch           removes an empty file whose lines it      refuse, as git does: it is not the file that the diff
                does not find                             is about
patch           makes the directory of a missing file     make nothing, as git does
                that the patch empties
patch           cuts a blank off the end of a name        take names as they are, as git does
==============  ========================================  ======================================================
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from orchard.exec.v1.file_service_pb2_grpc import FileServiceStub

from services.exec_agent.files.patch import Action, parse
from tests.integration.exec_agent_files.calls import patch
from tests.integration.exec_agent_files.patch_tools import (
    Outcome,
    apply_git,
    apply_gnu,
    apply_ours,
    hunks_alone,
    plain_sections,
)
from tests.support.patch_cases import Case, Flavour, Generator, read_tree, write_tree
from tests.support.patch_edits import File, Tree

SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "1"))
ROUNDS = int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "1"))
CASES = 150


class Compared(NamedTuple):
    """What two made of a case; `text` is what both were given."""

    case: Case
    text: bytes
    ours: Outcome
    tool: Outcome
    folder: Path


class Difference(NamedTuple):
    """A place where we differ on purpose: which tool, and how a case of it is known."""

    tools: tuple[str, ...]
    holds: Callable[[Compared], bool]


def _gnu_agrees(compared: Compared) -> bool:
    """In each section that git alone sees otherwise than we, GNU patch is of our mind: of all of it or of its hunks."""
    case, folder = compared.case, compared.folder
    plain, alone = plain_sections(case), dict(hunks_alone(case))
    judged = 0
    for text in dict.fromkeys([*plain, *alone]):
        if not apply_git(folder / "other", case, text).same_as(apply_ours(folder / "alone", case, text)):
            cases = [case] * (text in plain) + [alone[text]] * (text in alone)
            if not any(_same_as_gnu(folder, one, text if one is case else one.text) for one in cases):
                return False
            judged += 1
    return judged > 0


def _same_as_gnu(folder: Path, case: Case, text: bytes) -> bool:
    ours = apply_ours(folder / "alone", case, text, partial=True)
    return apply_gnu(folder / "judge", case, text, 0).same_as(ours)


def _anchored(compared: Compared) -> bool:
    refused = not compared.tool.applied and "patch does not apply" in compared.tool.said
    return refused and compared.ours.applied and _gnu_agrees(compared)


def _added_without_context(compared: Compared) -> bool:
    both = compared.tool.applied and compared.ours.applied
    return both and not compared.case.flavour.has_context and _gnu_agrees(compared)


def _past_the_end(compared: Compared) -> bool:
    return any("expected a line here, found the end" in error for error in compared.ours.errors())


def _undone_copy(compared: Compared) -> bool:
    is_copy = any(line.startswith(b"copy from ") for line in compared.text.split(b"\n"))
    refused = "already exists in working directory" in compared.tool.said and compared.ours.applied
    kept = compared.tool.applied and any("lines would be left" in error for error in compared.ours.errors())
    stayed = compared.tool.applied and compared.ours.applied and _leaves_besides(compared, _copies(compared))
    return compared.case.reverse and is_copy and (refused or kept or stayed)


def _copies(compared: Compared) -> set[bytes]:
    patches = parse(compared.text, compared.case.flavour.strip)
    return {patch_of_file.path for patch_of_file in patches if patch_of_file.action is Action.COPY}


def _leaves_besides(compared: Compared, files: set[bytes]) -> bool:
    """What we leave the tool leaves too, and besides only some of these files and directories above them."""
    theirs, ours = compared.tool.tree, compared.ours.tree
    more = theirs.keys() - ours.keys()
    above = {name for name in more - files if any(file.startswith(name + b"/") for file in files)}
    is_more = bool(more) and more <= files | above and all(stat.S_ISDIR(theirs[name][0]) for name in above)
    return is_more and ours == {name: theirs[name] for name in theirs.keys() - more}


def _missing_file(compared: Compared) -> bool:
    results = compared.ours.plan.results if compared.ours.plan else ()
    missing = {result.path for result in results if "does not exist" in result.error}
    return bool(missing & (compared.tool.tree.keys() - compared.case.target.keys()))


def _filled_already(compared: Compared) -> bool:
    results = compared.ours.plan.results if compared.ours.plan else ()
    refused = {result.path for result in results if "adds lines to an empty file" in result.error}
    return any(compared.tool.tree.get(path) not in {None, compared.ours.tree.get(path)} for path in refused)


def _directory_of_a_missing_file(compared: Compared) -> bool:
    results = compared.ours.plan.results if compared.ours.plan else ()
    missing = {result.path for result in results if "does not exist" in result.error}
    return _leaves_besides(compared, missing) and not missing & compared.tool.tree.keys()


def _binary_files_differ(compared: Compared) -> bool:
    is_plain = compared.case.flavour.tool == "diff" and b"Binary files " in compared.text
    return is_plain and any("git diff --binary" in error for error in compared.ours.errors())


def _line_without_newline(compared: Compared) -> bool:
    """A hunk that ends in a line without newline: we refuse it, or put it at the end of its file as no tool does."""
    results = compared.ours.plan.results if compared.ours.plan else ()
    for patch_of_file, result in zip(parse(compared.text, compared.case.flavour.strip), results, strict=True):
        for hunk, became in zip(patch_of_file.hunks, result.hunks, strict=False):
            ends = [lines[-1] for lines in (hunk.old, hunk.new) if lines]
            if became.error and not all(line.endswith(b"\n") for line in ends):
                return True
            made = hunk.old if compared.case.reverse else hunk.new
            if not became.error and made and not made[-1].endswith(b"\n"):
                trees = (compared.tool.tree, compared.ours.tree)
                theirs, ours = (tree.get(result.path, (0, b""))[1] for tree in trees)
                if ours.endswith(made[-1]) and theirs and not theirs.endswith(made[-1]):
                    return True
    return False


def _rest_of_a_removal(compared: Compared) -> bool:
    said = "Not deleting file" in compared.tool.said and "content differs from patch" in compared.tool.said
    return said and any("lines would be left" in error for error in compared.ours.errors())


def _made_over_another(compared: Compared) -> bool:
    said = "which already exists!  Applying it anyway" in compared.tool.said
    return said and "it exists already" in compared.ours.errors()


def _made_over_an_empty_file(compared: Compared) -> bool:
    results = compared.ours.plan.results if compared.ours.plan else ()
    refused = {result.path for result in results if result.error == "it exists already"}
    empty = {path for path, file in compared.case.target.items() if not file.data}
    return any(compared.tool.tree.get(path) != compared.ours.tree.get(path) for path in refused & empty)


def _file_to_directory(compared: Compared) -> bool:
    names = compared.case.old.keys() | compared.case.new.keys() | compared.case.target.keys()
    return any(other.startswith(name + b"/") for name in names for other in names)


def _emptied_already(compared: Compared) -> bool:
    said = "which is already empty!  Applying it anyway" in compared.tool.said
    return said and any("found the end of the file" in error for error in compared.ours.errors())


def _blank_at_an_end(compared: Compared) -> bool:
    theirs, ours = compared.tool.tree, compared.ours.tree
    differing = {name.strip(b" ") for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)}
    names = compared.case.old.keys() | compared.case.new.keys()
    cut = {name.strip(b" ") for name in names if name != name.strip(b" ")}
    return bool(cut) and differing <= cut


DIFFERENCES = {
    "anchored hunk": Difference(("git",), _anchored),
    "added without context": Difference(("git",), _added_without_context),
    "past the end": Difference(("git", "patch"), _past_the_end),
    "undone copy": Difference(("git",), _undone_copy),
    "missing file": Difference(("git",), _missing_file),
    "missing empty file": Difference(("patch",), _missing_file),
    "filled already": Difference(("git", "patch"), _filled_already),
    "binary files differ": Difference(("git", "patch"), _binary_files_differ),
    "line without newline": Difference(("git", "patch"), _line_without_newline),
    "rest of a removal": Difference(("patch",), _rest_of_a_removal),
    "made over another": Difference(("patch",), _made_over_another),
    "made over an empty file": Difference(("patch",), _made_over_an_empty_file),
    "emptied already": Difference(("patch",), _emptied_already),
    "file to directory": Difference(("patch",), _file_to_directory),
    "directory of a missing file": Difference(("patch",), _directory_of_a_missing_file),
    "blank at an end of a name": Difference(("patch",), _blank_at_an_end),
}


def compare(case: Case, folder: Path) -> list[Compared]:
    """By both tools, where both can."""
    ours = apply_ours(folder / "ours", case, case.text)
    found = [Compared(case, case.text, ours, apply_git(folder / "git", case, case.text), folder)]
    if text := b"".join(plain_sections(case)):
        ours = apply_ours(folder / "ours", case, text, fuzz=case.fuzz, partial=True)
        found.append(Compared(case, text, ours, apply_gnu(folder / "gnu", case, text, case.fuzz), folder))
    return found


def differences(compared: Compared, tool: str) -> set[str]:
    return {name for name, row in DIFFERENCES.items() if tool in row.tools and row.holds(compared)}


def explain(compared: Compared) -> str:
    theirs, ours = compared.tool.tree, compared.ours.tree
    names = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
    lines = [f"{name!r}: {theirs.get(name)} by the tool, {ours.get(name)} by us" for name in names]
    text = compared.text.decode("utf-8", "backslashreplace")
    return "\n".join([str(compared.case), text, compared.tool.said, compared.ours.said, *lines])


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(ROUNDS))
def test_the_same_comes_out_as_of_the_tools(tmp_path: Path, number: int) -> None:
    applied = refused = 0
    for case in Generator(SEED, tmp_path / "made").cases(CASES, number * CASES):
        for tool, compared in zip(("git", "patch"), compare(case, tmp_path), strict=False):
            if compared.ours.same_as(compared.tool):
                applied += compared.ours.applied
                refused += not compared.ours.applied
            else:
                assert differences(compared, tool), f"against {tool}: seed {SEED}, {explain(compared)}"
    assert applied > CASES / 4
    assert refused > CASES / 4


async def test_the_agent_does_what_the_function_does(stub: FileServiceStub, work: Path, tmp_path: Path) -> None:
    for case in Generator(SEED, tmp_path / "made").cases(12, 10_000):
        expected = apply_ours(tmp_path / "ours", case, case.text, fuzz=case.fuzz, partial=True)
        if expected.plan is None:
            continue
        write_tree(work / str(case.number), case.target)
        start = {"strip": case.flavour.strip, "reverse": case.reverse, "fuzz": case.fuzz, "partial": True}
        report = await patch(stub, str(case.number), case.text, **start)
        assert report.applied == expected.applied, case
        assert [f.error for f in report.files] == [f.error for f in expected.plan.results], case
        assert read_tree(work / str(case.number)) == expected.tree, case


def _case(target: Tree, text: str, *arguments: str, reverse: bool = False) -> Case:
    tool = "git" if text.startswith("diff --git ") else "diff"
    flavour = Flavour(tool, arguments, 1)
    new = {b"f/g": File(b"x\n")} if "b/f/g" in text else target
    return Case(0, target, new, target, text.encode(), flavour, "written by hand", reverse, 0)


_HEAD = "--- a/f\n+++ b/f\n"
_ONE = {
    "anchored hunk": _case({b"f": File(b"a\nb\n")}, _HEAD + "@@ -1 +1 @@\n-a\n+x\n"),
    "added without context": _case(
        {b"f": File(b"n\na\nb\nc\nd\n")}, _HEAD + "@@ -1 +1 @@\n-a\n+x\n@@ -3,0 +4 @@\n+y\n", "-U0"
    ),
    "past the end": _case({b"f": File(b"a\n")}, _HEAD + "@@ -7,0 +8 @@\n+x\n", "-U0"),
    "undone copy": _case(
        {b"f": File(b"a\n"), b"g": File(b"a\n")},
        "diff --git a/f b/g\nsimilarity index 100%\ncopy from f\ncopy to g\n",
        reverse=True,
    ),
    "missing file": _case({}, _HEAD + "@@ -1,0 +2 @@\n+x\n", "-U0"),
    "missing empty file": _case(
        {}, "diff --git a/f b/f\nindex e69de29..1111111 100644\n" + _HEAD + "@@ -0,0 +1 @@\n+x\n"
    ),
    "filled already": _case(
        {b"f": File(b"x\n")},
        "diff --git a/f b/f\nindex e69de29..1111111 100644\n" + _HEAD + "@@ -0,0 +1 @@\n+x\n",
        "-U0",
    ),
    "binary files differ": _case(
        {b"f": File(b"a\n"), b"g": File(b"\0")},
        _HEAD + "@@ -1 +1 @@\n-a\n+b\nBinary files a/g and b/g differ\n",
    ),
    "line without newline": _case(
        {b"f": File(b"a\nb\n")}, _HEAD + "@@ -1 +1 @@\n-a\n+x\n\\ No newline at end of file\n", "-U0"
    ),
    "rest of a removal": _case({b"f": File(b"a\nb\n")}, "--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n"),
    "made over another": _case(
        {b"f": File(b"a\n")},
        "diff --git a/f b/f\nnew file mode 100755\nindex 0000000..1111111\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n",
    ),
    "made over an empty file": _case(
        {b"f": File(b"")},
        "diff --git a/f b/f\nnew file mode 100644\nindex 0000000..1111111\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n",
    ),
    "emptied already": _case({b"f": File(b"")}, "--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n"),
    "file to directory": _case(
        {b"f": File(b"a\n")},
        "--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n--- /dev/null\n+++ b/f/g\n@@ -0,0 +1 @@\n+x\n",
    ),
    "directory of a missing file": _case(
        {}, "diff --git a/d/f b/d/f\nindex 1111111..e69de29 100644\n--- a/d/f\n+++ b/d/f\n@@ -1 +0,0 @@\n-x\n"
    ),
    "blank at an end of a name": _case({b"f ": File(b"a\n")}, "--- a/f \t\n+++ b/f \t\n@@ -1 +1 @@\n-a\n+x\n"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_each_difference_is_one(tmp_path: Path, name: str) -> None:
    """A row that no longer holds, here or with a newer git or patch, must go."""
    found = dict(zip(("git", "patch"), compare(_ONE[name], tmp_path), strict=False))
    for tool in DIFFERENCES[name].tools:
        assert not found[tool].ours.same_as(found[tool].tool), explain(found[tool])
        assert differences(found[tool], tool) == {name}, explain(found[tool])
