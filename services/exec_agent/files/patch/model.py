"""What a patch is made of."""

from __future__ import annotations

import enum
import stat
from dataclasses import dataclass, replace
from typing import Final

NO_BINARY_DATA: Final = "the patch says only that this binary file differs; make it with `git diff --binary`"


class PatchMalformedError(Exception):
    """The text is no patch, or a broken one.

    Attributes:
        line: the patch's line, from 1.
        message: what is wrong with it.
    """

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line
        self.message = message


class PatchPathError(Exception):
    """A path of the patch leaves the target directory."""

    def __init__(self, path: bytes, message: str) -> None:
        super().__init__(message)
        self.path = path
        self.message = message


class UnpatchableError(Exception):
    """A file that no patch can be applied to; the message says why, as the end of a sentence."""


class Action(enum.Enum):
    """What a patch does to a file."""

    MODIFY = "modify"
    CREATE = "create"
    DELETE = "delete"
    RENAME = "rename"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class Entry:
    """A file as it is or shall be.

    Attributes:
        data: content; of a symbolic link its target.
        mode: file type and permission bits, as in st_mode. Without permission bits: the default for a new file.
        token: the tree's own note of the file it read; a file made from it passes it on.
    """

    data: bytes
    mode: int
    token: object = None

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return stat.S_ISLNK(self.mode)


@dataclass(frozen=True, slots=True)
class Hunk:
    """One hunk. Lines keep their line ends; one without is the last of its file.

    Attributes:
        line: where its header stands in the patch, from 1.
        old_start: line of the old file as the header names it: the first, or with no old lines the one before.
        old: lines before, context included.
        new: lines after, context included.
        leading: context lines at the start.
        trailing: context lines at the end.
    """

    line: int
    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    leading: int
    trailing: int

    def reversed(self) -> Hunk:
        """The hunk that undoes it."""
        return replace(self, old_start=self.new_start, new_start=self.old_start, old=self.new, new=self.old)

    def without_carriage_returns(self) -> Hunk:
        """The same with LF line ends in place of CRLF."""
        return replace(self, old=tuple(map(_to_lf, self.old)), new=tuple(map(_to_lf, self.new)))


def _to_lf(line: bytes) -> bytes:
    return line[:-2] + b"\n" if line.endswith(b"\r\n") else line.removesuffix(b"\r")


@dataclass(frozen=True, slots=True)
class BinaryChange:
    """One direction of a git binary patch: the whole content, or a delta against the old one."""

    is_delta: bool
    payload: bytes


@dataclass(frozen=True, slots=True)
class FilePatch:
    """All that a patch says of one file.

    Attributes:
        line: where it starts in the patch, from 1.
        action: what it does.
        old_path: the file it reads; empty for a new one.
        path: the file it leaves; for a deletion the one it removes.
        alternate_path: the other name of a plain diff, if `path` is not there.
        is_git: whether it has a git header, which says for sure what is created and removed.
        old_mode: the mode the patch expects, type and permissions; zero if it does not say.
        new_mode: the mode the patch sets; zero if it does not say.
        has_carriage_returns: the headers themselves end in CRLF, so the line ends of the content say nothing.
        old_id: full git object id of the old content, if the patch has it; that of the empty file also if abbreviated.
        new_id: full git object id of the new content, likewise.
        forward: the change of a binary file.
        backward: the change that undoes it.
        problem: why it cannot be applied, whatever the file is.
        commit: number of the diff it is part of, from 0; see number_commits.
        copied_from: of a deletion that undoes a copy: the file it was copied from, to whose content it must come back.
    """

    line: int
    action: Action
    old_path: bytes
    path: bytes
    alternate_path: bytes = b""
    is_git: bool = False
    old_mode: int = 0
    new_mode: int = 0
    has_carriage_returns: bool = False
    hunks: tuple[Hunk, ...] = ()
    old_id: str = ""
    new_id: str = ""
    forward: BinaryChange | None = None
    backward: BinaryChange | None = None
    problem: str = ""
    commit: int = 0
    copied_from: bytes = b""

    @property
    def is_binary(self) -> bool:
        """Whether it carries binary data instead of hunks."""
        return self.forward is not None

    def reversed(self) -> FilePatch:
        """The patch that undoes it."""
        copied_from = b""
        action, old_path, path = self.action, self.path, self.old_path
        if self.action is Action.CREATE:
            action, old_path, path = Action.DELETE, self.path, self.path
        elif self.action is Action.DELETE:
            action, old_path, path = Action.CREATE, b"", self.path
        elif self.action is Action.COPY:
            action, old_path, path, copied_from = Action.DELETE, self.path, self.path, self.old_path
        problem = self.problem
        if self.is_binary and self.backward is None and not problem:
            problem = "the patch holds this binary file in one direction only and cannot be reversed"
        return replace(
            self,
            action=action,
            old_path=old_path,
            path=path,
            old_mode=self.new_mode,
            new_mode=self.old_mode,
            hunks=tuple(hunk.reversed() for hunk in self.hunks),
            old_id=self.new_id,
            new_id=self.old_id,
            forward=self.backward if self.backward is not None else self.forward,
            backward=self.forward,
            problem=problem,
            copied_from=copied_from,
        )
