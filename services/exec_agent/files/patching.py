"""Applies patches to a directory: reads what they need, and carries their plan out by renames that can be undone."""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from services.common.errors import InvalidArgumentError
from services.exec_agent.files.beneath import Beneath, EscapeError
from services.exec_agent.files.errors import BelowError, file_errors, shown
from services.exec_agent.files.ownership import DefaultOwner, Owner, give, owner_in
from services.exec_agent.files.patch import (
    Change,
    Entry,
    Options,
    PatchMalformedError,
    PatchPathError,
    Plan,
    UnpatchableError,
    make_plan,
    parse,
)
from services.exec_agent.files.paths import DIRECTORY_FLAGS, rename_into_free_name, temporary_name
from services.exec_agent.files.reading import open_regular_entry
from services.exec_agent.files.tree import Cursor, walk
from services.exec_agent.files.writing import TemporaryFile, keep_owner

_MAXIMUM_FILE_BYTES: Final = 64 << 20


class _Seen(NamedTuple):
    """What a file was when it was read, to notice a change meanwhile."""

    inode: int
    size: int
    mtime_ns: int
    owner: Owner


def apply_patch(
    path: bytes, text: bytes, *, strip: int | None, dry_run: bool, options: Options, default_owner: DefaultOwner
) -> Plan:
    """Apply a patch below the directory `path`; see FileService.ApplyPatch."""
    try:
        patches = parse(text, strip)
        with file_errors(path), Beneath(path, default_owner) as beneath:
            plan = make_plan(patches, _DirectoryTree(beneath), options)
            if plan.changes and not dry_run:
                _Commit(beneath, default_owner).run(plan.changes)
            return plan
    except PatchMalformedError as error:
        raise InvalidArgumentError.of(
            "data", f"line {error.line} of the patch: {error.message}", reason="PATCH_MALFORMED", line=error.line
        ) from None
    except PatchPathError as error:
        raise InvalidArgumentError.of(
            "data", error.message, reason="PATCH_PATH_ESCAPES", path=shown(error.path)
        ) from None


def _split(path: bytes) -> tuple[list[bytes], bytes]:
    *parents, name = path.split(b"/")
    return parents, name


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
        parents, name = _split(path)
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
        parents, name = _split(path)
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
        return Entry(os.readlink(name, dir_fd=directory), status.st_mode, _seen(status))
    descriptor = open_regular_entry(name, directory)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_size > _MAXIMUM_FILE_BYTES:
            raise UnpatchableError(f"it has more than {_MAXIMUM_FILE_BYTES >> 20} MiB")
        return Entry(file.read(_MAXIMUM_FILE_BYTES), status.st_mode, _seen(status))


def _seen(status: os.stat_result) -> _Seen:
    return _Seen(status.st_ino, status.st_size, status.st_mtime_ns, Owner(status.st_uid, status.st_gid))


@dataclass(slots=True)
class _Step:
    """One change on its way.

    Attributes:
        made: parent directories made for it, topmost first.
        fresh: temporary name of the new content; empty if there is none, or it has got its place.
        backup: temporary name of the old content; empty if there is none yet.
        place: the parents with links followed, which may be gone when the backup is.
        is_placed: the new content has its name, or the old one has lost it.
    """

    change: Change
    parents: list[bytes]
    name: bytes
    made: list[list[bytes]]
    fresh: bytes = b""
    backup: bytes = b""
    place: Sequence[bytes] = ()
    is_placed: bool = False


class _Commit:
    """Writes the new contents under temporary names and moves them into place; all of them back if one cannot be."""

    def __init__(self, beneath: Beneath, default_owner: DefaultOwner) -> None:
        self._beneath = beneath
        self._default_owner = default_owner
        self._backups: set[bytes] = set()
        self._removed: set[bytes] = set()

    def run(self, changes: Sequence[Change]) -> None:
        """Make the changes.

        Raises:
            BelowError: one of them failed, and all is as before. ESTALE if a file changed since the plan was made.
        """
        # Removals come first: a directory may take the place of a file.
        ordered = sorted(changes, key=lambda change: change.after is not None)
        self._removed = {change.path for change in changes if change.after is None}
        steps = [_Step(change, *_split(change.path), []) for change in ordered]
        try:
            for work in (self._prepare_if_possible, self._place):
                for step in steps:
                    _with_path(work, step)
        except BaseException:
            for step in reversed(steps):
                self._undo(step)
            raise
        for step in steps:
            self._tidy(step)

    def _prepare_if_possible(self, step: _Step) -> None:
        if any(b"/".join(step.parents[:depth]) in self._removed for depth in range(1, len(step.parents) + 1)):
            return  # a link that is yet to be removed would lead elsewhere
        with suppress(NotADirectoryError):  # a file that is yet to be removed
            self._prepare(step)

    def _prepare(self, step: _Step) -> None:
        """Write the new content next to its place."""
        after = step.change.after
        if after is None:
            return
        self._make_parents(step)
        with self._beneath.directory(step.parents) as directory:
            name = temporary_name()
            if after.is_link:
                os.symlink(after.data, name, dir_fd=directory)
                step.fresh = name
                return
            file = TemporaryFile(directory)
            try:
                file.write([after.data])
                if isinstance(after.token, _Seen):
                    keep_owner(file.fd, after.token.owner)
                else:
                    give(file.fd, owner_in(directory, self._default_owner))
                os.fchmod(file.fd, stat.S_IMODE(after.mode))
                file.publish(name, replace=False)
                step.fresh = name
            finally:
                file.discard()

    def _make_parents(self, step: _Step) -> None:
        for depth in range(1, len(step.parents) + 1):
            parents = step.parents[:depth]
            try:
                with self._beneath.directory(parents):
                    continue
            except FileNotFoundError:
                step.made.append(parents)
                with self._beneath.directory(parents, make=True):
                    pass

    def _place(self, step: _Step) -> None:
        """Move the old content away and the new one in."""
        before, after = step.change.before, step.change.after
        if after is not None and not step.fresh:
            self._prepare(step)
        with self._beneath.directory(step.parents) as directory:
            step.place = self._beneath.followed(step.parents)
            if before is None:
                self._clear(step, directory)
                rename_into_free_name(step.fresh, directory, step.name, directory)
            else:
                status = os.stat(step.name, dir_fd=directory, follow_symlinks=False)
                if _seen(status) != before.token:
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
                step.backup = temporary_name()
                if after is None:
                    self._backups.add(step.backup)
                    os.rename(step.name, step.backup, src_dir_fd=directory, dst_dir_fd=directory)
                else:
                    _link_or_rename(step.name, step.backup, directory)
                    os.rename(step.fresh, step.name, src_dir_fd=directory, dst_dir_fd=directory)
        step.fresh = b""
        step.is_placed = True

    def _clear(self, step: _Step, directory: int) -> None:
        """Move a directory out of a file's way, if all that is left in it are backups of ours."""
        try:
            self._refuse_others(step.name, directory)
        except (FileNotFoundError, NotADirectoryError):
            return
        step.backup = temporary_name()
        os.rename(step.name, step.backup, src_dir_fd=directory, dst_dir_fd=directory)
        self._refuse_others(step.backup, directory)  # one may have come before the rename

    def _refuse_others(self, name: bytes, directory: int) -> None:
        with Cursor(os.open(name, DIRECTORY_FLAGS, dir_fd=directory)) as cursor:
            if any(node.name not in self._backups for node in walk(cursor, recursive=True) if not node.is_directory):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))

    def _undo(self, step: _Step) -> None:
        """Bring the old content back."""
        with suppress(OSError, EscapeError), self._beneath.directory(step.parents) as directory:
            if step.backup:
                with suppress(FileNotFoundError):
                    if step.is_placed and step.change.before is None:
                        _unlink(step.name, directory)
                    os.rename(step.backup, step.name, src_dir_fd=directory, dst_dir_fd=directory)
            elif step.is_placed:
                _unlink(step.name, directory)
            # Renaming onto another link of the same file does nothing and leaves both.
            _unlink(step.backup, directory)
            _unlink(step.fresh, directory)
        for parents in reversed(step.made):
            self._remove_if_empty(parents)

    def _tidy(self, step: _Step) -> None:
        """Drop the old content, and parents that a removal leaves empty, as git does."""
        if step.backup:
            with suppress(OSError, EscapeError):
                self._remove_backup([*step.place, step.backup])
        if step.change.after is None:
            for depth in range(len(step.parents), 0, -1):
                if not self._remove_if_empty(step.parents[:depth]):
                    break

    def _remove_backup(self, parts: list[bytes]) -> None:
        """Remove a file; of a directory only what is ours, and not itself if another made something in it meanwhile."""
        directories = [parts]
        with self._beneath.directory(parts[:-1]) as directory:
            try:
                descriptor = os.open(parts[-1], DIRECTORY_FLAGS, dir_fd=directory)
            except NotADirectoryError:
                os.unlink(parts[-1], dir_fd=directory)
                return
            with Cursor(descriptor) as cursor:
                for node in walk(cursor, recursive=True):
                    if node.is_directory:
                        directories.append([*parts, *node.path.split(b"/")])
                    elif node.name in self._backups:
                        _unlink(node.name, node.parent_fd)
        for parts_of_one in reversed(directories):
            self._remove_if_empty(parts_of_one)

    def _remove_if_empty(self, parts: list[bytes]) -> bool:
        try:
            with self._beneath.directory(parts[:-1]) as directory:
                os.rmdir(parts[-1], dir_fd=directory)
        except (OSError, EscapeError):
            return False
        return True


def _with_path(work: Callable[[_Step], None], step: _Step) -> None:
    try:
        work(step)
    except EscapeError as error:
        raise BelowError(OSError(errno.ESTALE, os.strerror(errno.ESTALE)), step.change.path) from error
    except OSError as error:
        raise BelowError(error, step.change.path) from error


def _link_or_rename(name: bytes, backup: bytes, directory: int) -> None:
    """Keep the old content under a second name too; where links cannot be, move it."""
    try:
        os.link(name, backup, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    except OSError:
        os.rename(name, backup, src_dir_fd=directory, dst_dir_fd=directory)


def _unlink(name: bytes, directory: int) -> None:
    if name:
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)
