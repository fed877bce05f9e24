"""The tasks under examples/tasks: SWE-bench instances with repositories, candidate patches and what became of those."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

Verdict = Literal["resolved", "unresolved", "patch_failed", "error"]
"""What became of a candidate. "error" is the platform's failure and says nothing of the candidate."""

_EXPECTED: Final = ("resolved", "unresolved", "patch_failed")
_TARGET_OF_PATCH: Final = re.compile(rb"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)
_GIT_SECONDS: Final = 30


class TaskError(Exception):
    """A task's files are not as they should be; the message names the file."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A patch to judge, and the verdict that it is known to deserve. Without a patch the repository stays as it is."""

    name: str
    patch: bytes | None
    expected: Verdict


@dataclass(frozen=True, slots=True)
class Task:
    """One SWE-bench instance; fields named as there."""

    instance_id: str
    repo: str
    problem_statement: str
    folder: Path
    base_commit: str
    test_patch: bytes
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_command: tuple[str, ...]
    test_timeout_seconds: float
    candidates: tuple[Candidate, ...]

    @property
    def test_files(self) -> tuple[str, ...]:
        """Paths that the test patch changes: a candidate's own changes to them do not count."""
        return tuple(sorted({new.decode() for _old, new in _TARGET_OF_PATCH.findall(self.test_patch)}))

    def build_repository(self, target: Path) -> None:
        """Make the repository with its history in `target`, checked out at base_commit.

        Raises:
            TaskError: git failed, or the history does not end at base_commit.
        """
        _git(["init", "--quiet", "--object-format=sha1", "-b", "main", str(target)])
        with (self.folder / "history.fast-import").open("rb") as history:
            _git(["-C", str(target), "fast-import", "--quiet"], stdin=history)
        head = _git(["-C", str(target), "rev-parse", "main"]).strip()
        if head != self.base_commit:
            raise TaskError(f"{self.folder}: the history ends at {head}, not at base_commit {self.base_commit}")
        _git(["-C", str(target), "checkout", "--quiet", "-f", "main"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one candidate.

    Attributes:
        verdict: "error" says that the platform failed, and nothing of the candidate.
        tests: passed and wanted tests, or None where none ran.
        detail: one line for people.
        seconds: from the create to the verdict.
    """

    task: Task
    candidate: Candidate
    verdict: Verdict
    tests: tuple[int, int] | None
    detail: str
    seconds: float

    @property
    def expected(self) -> bool:
        """Whether the verdict is the one that the candidate is known to deserve."""
        return self.verdict == self.candidate.expected


class UnknownTaskError(TaskError):
    """A task was named that there is not."""


def load_tasks(folder: Path, only: frozenset[str] = frozenset()) -> list[Task]:
    """Every task below a folder, or those named, by id.

    Raises:
        TaskError: a file is missing or malformed, or a name is unknown.
    """
    folders = sorted(path.parent for path in folder.glob("*/instance.json"))
    known = {path.name for path in folders}
    if unknown := sorted(only - known):
        raise UnknownTaskError(f"{folder} has no task {unknown[0]!r}; it has {', '.join(sorted(known))}")
    if not folders:
        raise TaskError(f"{folder} holds no tasks: no */instance.json")
    return [_load(path) for path in folders if not only or path.name in only]


def _load(folder: Path) -> Task:
    try:
        fields = json.loads((folder / "instance.json").read_text())
        entries = json.loads((folder / "candidates.json").read_text())
        return Task(
            instance_id=fields["instance_id"],
            repo=fields["repo"],
            problem_statement=fields["problem_statement"],
            folder=folder,
            base_commit=fields["base_commit"],
            test_patch=fields["test_patch"].encode(),
            fail_to_pass=tuple(fields["FAIL_TO_PASS"]),
            pass_to_pass=tuple(fields["PASS_TO_PASS"]),
            test_command=tuple(fields["test_command"]),
            test_timeout_seconds=float(fields["test_timeout_seconds"]),
            candidates=tuple(_candidate(folder, entry) for entry in entries),
        )
    except (OSError, ValueError) as error:
        raise TaskError(f"{folder}: {error}") from None
    except KeyError as error:
        raise TaskError(f"{folder}: the field {error} is missing") from None


def _candidate(folder: Path, entry: dict[str, Any]) -> Candidate:
    if entry["expected"] not in _EXPECTED:
        raise ValueError(f"candidate {entry['name']!r}: expected must be one of {', '.join(_EXPECTED)}")
    patch = (folder / entry["file"]).read_bytes() if entry["file"] else None
    return Candidate(entry["name"], patch, entry["expected"])


def _git(arguments: list[str], stdin: Any = subprocess.DEVNULL) -> str:
    # The user's own git configuration must not change what a task is.
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    try:
        done = subprocess.run(
            ["git", *arguments], stdin=stdin, capture_output=True, env=environment, timeout=_GIT_SECONDS, check=True
        )
    except FileNotFoundError:
        raise TaskError("git is not installed, and the tasks' repositories need it") from None
    except subprocess.CalledProcessError as error:
        raise TaskError(f"git {arguments[0]} failed: {error.stderr.decode(errors='replace').strip()}") from None
    return done.stdout.decode()
