"""One patch on copies of one tree: by ApplyPatch's own function, by `git apply` and by GNU `patch`."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from services.common.errors import OrchardError
from services.exec_agent.files.patch import Action, Options, Plan, parse
from services.exec_agent.files.patching import apply_patch
from tests.support.intents import intents
from tests.support.patch_cases import ENVIRONMENT, Case, Contents, read_tree, write_tree
from tests.support.patch_edits import File, Tree

_UNKNOWN_TO_GNU = (b"rename ", b"copy ", b"GIT binary", b"Binary files", b"new file mode 12", b"deleted file mode 12")


@dataclass(frozen=True)
class Outcome:
    """What a tool made of a tree, and what it said."""

    applied: bool
    tree: Contents
    said: str
    plan: Plan | None = None

    def same_as(self, other: Outcome) -> bool:
        return (self.applied, self.tree) == (other.applied, other.tree)

    def errors(self) -> list[str]:
        """Of ours: why files and hunks did not fit."""
        if self.plan is None:
            return [self.said]
        found = [result.error for result in self.plan.results]
        return [error for error in (*found, *(h.error for r in self.plan.results for h in r.hunks)) if error]


def apply_ours(folder: Path, case: Case, text: bytes, *, fuzz: int = 0, partial: bool = False) -> Outcome:
    """ApplyPatch; a dry run before it must say the same and change nothing."""
    write_tree(folder, case.target)
    before = read_tree(folder)

    def run(dry_run: bool) -> Plan | OrchardError:
        try:
            with intents() as noted:
                return apply_patch(
                    os.fsencode(folder),
                    text,
                    strip=case.flavour.strip,
                    dry_run=dry_run,
                    options=Options(reverse=case.reverse, fuzz=fuzz, partial=partial),
                    default_owner=lambda: (os.geteuid(), os.getegid()),
                    intents=noted,
                )
        except OrchardError as error:
            return error

    rehearsal = run(dry_run=True)
    assert read_tree(folder) == before, f"a dry run changed the tree: {case}"
    plan = run(dry_run=False)
    assert _said(rehearsal) == _said(plan), f"a dry run said otherwise: {case}\n{text!r}"
    if isinstance(plan, OrchardError):
        # Only what is no patch (diff quotes no name of a binary file), or leaves the folder, is an error.
        allowed = {"PATCH_PATH_ESCAPES"} | ({"PATCH_MALFORMED"} if case.flavour.tool == "diff" else set())
        assert plan.reason in allowed, (case, plan)
        assert read_tree(folder) == before, f"refused, and yet something changed: {case}"
        return Outcome(False, _taken(folder), str(plan))
    assert plan.fits or partial or read_tree(folder) == before, f"not all fits, and yet something changed: {case}"
    assert not any(b".orchard-" in name for name in read_tree(folder)), f"something is left behind: {case}"
    return Outcome(plan.fits, _taken(folder), str(plan.results), plan)


def _said(answer: Plan | OrchardError) -> object:
    return str(answer) if isinstance(answer, OrchardError) else (answer.fits, answer.results)


def apply_git(folder: Path, case: Case, text: bytes) -> Outcome:
    argv = ["git", "apply", "--whitespace=nowarn", f"-p{case.flavour.strip}"]
    argv += ["-R"] * case.reverse + ["--unidiff-zero"] * (not case.flavour.has_context)
    return _by_tool(folder, case, [*argv, "-"], text)


def apply_git_in_turn(folder: Path, case: Case) -> Outcome:
    """The diffs of a series by `git apply`, one after the other: all of them or nothing."""
    tree, said = case.target, ""
    for part in case.parts[:: -1 if case.reverse else 1]:
        step = apply_git(folder, replace(case, target=tree), part)
        said += step.said
        if not step.applied:
            write_tree(folder, case.target)
            return Outcome(False, _taken(folder), said)
        tree = _as_files(step.tree)
    write_tree(folder, tree)
    return Outcome(True, _taken(folder), said)


def _as_files(contents: Contents) -> Tree:
    return {
        name: File(data, executable=bool(mode & 0o100), is_link=stat.S_ISLNK(mode))
        for name, (mode, data) in contents.items()
        if not stat.S_ISDIR(mode)
    }


def apply_gnu(folder: Path, case: Case, text: bytes, fuzz: int) -> Outcome:
    # Forced, that it takes no patch for one applied already; --binary, that it leaves line ends alone.
    argv = ["patch", "-u", "-f", "--binary", "--no-backup-if-mismatch", "--reject-file=-", f"--fuzz={fuzz}"]
    return _by_tool(folder, case, [*argv, f"-p{case.flavour.strip}", *["-R"] * case.reverse], text)


def plain_sections(case: Case) -> list[bytes]:
    """What GNU patch knows to read: of git's diffs the sections that change, make or remove one file with lines."""
    if case.flavour.tool == "diff":
        return _sections(case)
    return [section for section in _sections(case) if b"\n@@ " in section and not _is_beyond_gnu(section)]


def hunks_alone(case: Case) -> list[tuple[bytes, Case]]:
    """Each section that changes lines of a file that is there, and its hunks as of a file of a name without blanks.

    So GNU patch can judge also the lines of a rename, and those of a file whose name it does not take as it is.
    """
    found = []
    for section in _sections(case):
        patches = parse(section, case.flavour.strip)
        patch = patches[0].reversed() if case.reverse else patches[0]
        file = case.target.get(patch.old_path)
        if patch.hunks and file is not None and patch.action in {Action.MODIFY, Action.RENAME, Action.COPY}:
            text = b"--- a/f\n+++ b/f\n" + section[section.index(b"\n@@ ") + 1 :]
            flavour = case.flavour._replace(strip=1)
            found.append((section, replace(case, target={b"f": file}, text=text, flavour=flavour)))
    return found


def _sections(case: Case) -> list[bytes]:
    sections = [b"diff " + section for section in (b"\n" + case.text).split(b"\ndiff ")[1:]] or [case.text]
    return [section.removesuffix(b"\n") + b"\n" for section in sections]


def _is_beyond_gnu(section: bytes) -> bool:
    return any(line.startswith(_UNKNOWN_TO_GNU) for line in section.split(b"\n"))


def _by_tool(folder: Path, case: Case, argv: list[str], text: bytes) -> Outcome:
    write_tree(folder, case.target)
    done = subprocess.run(
        argv,
        cwd=folder,
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=ENVIRONMENT,
        timeout=100,
        umask=0o022,
    )
    # 2: GNU patch found no patch, or gave up half way.
    assert done.returncode in {0, 1, 2, 128}, (case, done.stdout)
    return Outcome(done.returncode == 0, _taken(folder), done.stdout.decode("utf-8", "backslashreplace"))


def _taken(folder: Path) -> Contents:
    tree = read_tree(folder)
    shutil.rmtree(folder)
    return tree
