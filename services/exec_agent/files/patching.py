"""Applies patches to a directory: reads what they need, and has their plan carried out."""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect
from collections.abc import Container
from contextlib import suppress
from typing import Final

from services.common.errors import InvalidArgumentError
from services.exec_agent.files.beneath import Beneath, EscapeError
from services.exec_agent.files.errors import BelowError, file_errors, shown
from services.exec_agent.files.intents import Intents
from services.exec_agent.files.ownership import DefaultOwner
from services.exec_agent.files.patch import (
    Entry,
    Options,
    PatchMalformedError,
    PatchPathError,
    Plan,
    UnpatchableError,
    make_plan,
    parse,
)
from services.exec_agent.files.paths import DIRECTORY_FLAGS
from services.exec_agent.files.placing import Commit, seen_of, split
from services.exec_agent.files.reading import open_regular_entry
from services.exec_agent.files.tree import Cursor, walk

_MAXIMUM_FILE_BYTES: Final = 64 << 20


def apply_patch(
    path: bytes,
    text: bytes,
    *,
    strip: int | None,
    dry_run: bool,
    options: Options,
    default_owner: DefaultOwner,
    intents: Intents,
) -> Plan:
    """Apply a patch below the directory `path`; see FileService.ApplyPatch."""
    try:
        patches = parse(text, strip)
        with file_errors(path), Beneath(path, default_owner) as beneath:
            plan = make_plan(patches, _DirectoryTree(beneath), options)
            if plan.changes and not dry_run:
                Commit(beneath, default_owner, intents).run(plan.changes)
            return plan
    except PatchMalformedError as error:
        raise InvalidArgumentError.of(
            "data", f"line {error.line} of the patch: {error.message}", reason="PATCH_MALFORMED", line=error.line
        ) from None
    except PatchPathError as error:
        raise InvalidArgumentError.of(
            "data", error.message, reason="PATCH_PATH_ESCAPES", path=shown(error.path)
        ) from None


class _DirectoryTree:
    """The files below a directory, for make_plan."""

    def __init__(self, beneath: Beneath) -> None:
        self._beneath = beneath
        self._names: dict[tuple[int, int, bytes], bytes] = {}

    def read(self, path: bytes) -> Entry | None:
        """See patch.Tree."""
        try:
            return self._read(path)
        except EscapeError:
            raise PatchPathError(
                path, f"the patch's path {shown(path)!r} leads out of the target directory through a link"
            ) from None
        except OSError as error:
            if error.errno in {errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENAMETOOLONG, errno.ELOOP}:
                raise UnpatchableError(_REASONS[error.errno]) from error
            raise BelowError(error, path) from error

    def _read(self, path: bytes) -> Entry | None:
        parents, name = split(path)
        try:
            with self._beneath.directory(parents) as directory:
                self._refuse_second_name(path, name, directory)
                return _read(name, directory)
        except FileNotFoundError:
            self._refuse_missing_directories(path)
            return None

    def _refuse_second_name(self, path: bytes, name: bytes, directory: int) -> None:
        """One file by two names, through a link to a directory: it cannot become what is planned for each."""
        status = os.fstat(directory)
        other = self._names.setdefault((status.st_dev, status.st_ino, name), path)
        if other != path:
            raise UnpatchableError(f"it is the same file as {shown(other)!r}, by way of a link")

    def _refuse_missing_directories(self, path: bytes) -> None:
        """What a link to nothing leads to must not come to be, for it has a name of its own; others are made."""
        parts = path.split(b"/")
        missing = bisect(range(len(parts)), False, key=lambda depth: not self._is_directory(parts[:depth]))
        if missing == len(parts):
            return
        with self._beneath.directory(parts[: missing - 1]) as directory:
            self._refuse_second_name(path, b"/".join(parts[missing - 1 :]), directory)
            with suppress(FileNotFoundError):
                if stat.S_ISLNK(os.stat(parts[missing - 1], dir_fd=directory, follow_symlinks=False).st_mode):
                    raise UnpatchableError("a parent of it is a symbolic link to nothing")

    def _is_directory(self, parts: list[bytes]) -> bool:
        try:
            with self._beneath.directory(parts):
                return True
        except FileNotFoundError:
            return False

    def holds_others(self, path: bytes, removed: Container[bytes]) -> bool | None:
        """See patch.Tree."""
        parents, name = split(path)
        with (
            suppress(FileNotFoundError, NotADirectoryError, EscapeError),
            self._beneath.directory(parents) as directory,
            Cursor(os.open(name, DIRECTORY_FLAGS, dir_fd=directory)) as cursor,
        ):
            return any(
                not node.is_directory and path + b"/" + node.path not in removed
                for node in walk(cursor, recursive=True)
            )
        return None


_REASONS: Final = {
    errno.ENOTDIR: "a parent of it is no directory",
    errno.EISDIR: "it is a directory",
    errno.ENXIO: "it is a device, socket or pipe",
    errno.ENAMETOOLONG: "its name is too long",
    errno.ELOOP: "its path leads through too many symbolic links",
}


def _read(name: bytes, directory: int) -> Entry:
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        return Entry(os.readlink(name, dir_fd=directory), status.st_mode, seen_of(status))
    descriptor = open_regular_entry(name, directory)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_size > _MAXIMUM_FILE_BYTES:
            raise UnpatchableError(f"it has more than {_MAXIMUM_FILE_BYTES >> 20} MiB")
        return Entry(file.read(_MAXIMUM_FILE_BYTES), status.st_mode, seen_of(status))
