"""Places the changes of a patch by renames that can be undone, also after a kill in the middle of them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from services.exec_agent.files.beneath import Beneath, EscapeError
from services.exec_agent.files.errors import BelowError
from services.exec_agent.files.intents import Intent, Intents, Note, path_of, text
from services.exec_agent.files.ownership import DefaultOwner, Owner, give, owner_in
from services.exec_agent.files.patch import Change
from services.exec_agent.files.paths import DIRECTORY_FLAGS, rename_into_free_name, temporary_name
from services.exec_agent.files.tree import Cursor, walk
from services.exec_agent.files.writing import TemporaryFile, keep_owner

PATCH: Final = "patch"
"""The kind of these changes; then the base and, of each step, its path, and whether nothing is there before and after
it. The notes that follow begin with one of these, and all but the last with a step's number."""
_MAKE: Final = "M"  # the directory: it is made
_FRESH: Final = "F"  # two temporary names: of the new content, and of the same on its way to that
_PLACE: Final = "P"  # temporary name of the old content, the parents with links followed, identity of the new
_UNDONE: Final = "U"
_COMMITTED: Final = "C"


class Seen(NamedTuple):
    """What a file was when it was read, to notice a change meanwhile."""

    inode: int
    size: int
    mtime_ns: int
    owner: Owner


def seen_of(status: os.stat_result) -> Seen:
    """Of a file's status."""
    return Seen(status.st_ino, status.st_size, status.st_mtime_ns, Owner(status.st_uid, status.st_gid))


def split(path: bytes) -> tuple[list[bytes], bytes]:
    """The directories of a patch's path, and its name."""
    *parents, name = path.split(b"/")
    return parents, name


@dataclass(slots=True)
class _Step:
    """One change on its way.

    Attributes:
        number: its place in the order.
        parents: the directories of its path.
        name: the rest of it.
        is_new: nothing is there before.
        is_removal: nothing is there after it.
        made: parent directories made for it, topmost first.
        fresh: temporary name of the new content; empty if there is none, or it has got its place.
        spare: another, which it may have on its way to that.
        backup: temporary name of the old content; empty if there is none yet.
        place: the parents with links followed, which may be gone when the backup is.
        identity: what the new content is known by.
        is_placed: the new content has its name, or the old one has lost it.
    """

    number: int
    parents: list[bytes]
    name: bytes
    is_new: bool
    is_removal: bool
    made: list[list[bytes]] = field(default_factory=list)
    fresh: bytes = b""
    spare: bytes = b""
    backup: bytes = b""
    place: list[bytes] = field(default_factory=list)
    identity: tuple[int, ...] = ()
    is_placed: bool = False


class Commit:
    """Writes the new contents under temporary names and moves them into place; all of them back if one cannot be."""

    def __init__(self, beneath: Beneath, default_owner: DefaultOwner, intents: Intents) -> None:
        self._beneath = beneath
        self._default_owner = default_owner
        self._intents = intents
        self._undoing = _Undoing(beneath)
        self._removed: set[bytes] = set()

    def run(self, changes: Sequence[Change]) -> None:
        """Make the changes.

        Raises:
            BelowError: one of them failed, and all is as before. ESTALE if a file changed since the plan was made.
            OSError: there is no space to note what is done.
        """
        # Removals come first: a directory may take the place of a file.
        ordered = sorted(changes, key=lambda change: change.after is not None)
        self._removed = {change.path for change in changes if change.after is None}
        told = [(text(change.path), change.before is None, change.after is None) for change in ordered]
        with self._intents.begin(PATCH, text(self._beneath.path), told) as intent:
            self._run(list(zip(_steps(told), ordered, strict=True)), intent)

    def _run(self, steps: Sequence[tuple[_Step, Change]], intent: Intent) -> None:
        try:
            for work in (self._prepare_if_possible, self._place):
                for step, change in steps:
                    _with_path(work, step, change, intent)
            intent.note(_COMMITTED)
        except BaseException:
            for step, _change in reversed(steps):
                self._undoing.undo(step)
            raise
        for step, _change in steps:
            self._undoing.tidy(step)

    def _prepare_if_possible(self, step: _Step, change: Change, intent: Intent) -> None:
        if any(b"/".join(step.parents[:depth]) in self._removed for depth in range(1, len(step.parents) + 1)):
            return  # a link that is yet to be removed would lead elsewhere
        with suppress(NotADirectoryError):  # a file that is yet to be removed
            self._prepare(step, change, intent)

    def _prepare(self, step: _Step, change: Change, intent: Intent) -> None:
        """Write the new content next to its place."""
        after = change.after
        if after is None:
            return
        self._make_parents(step, intent)
        with self._beneath.directory(step.parents) as directory:
            name, spare = temporary_name(), temporary_name()
            intent.note(_FRESH, step.number, text(name), text(spare))
            if after.is_link:
                os.symlink(after.data, name, dir_fd=directory)
                step.fresh = name
                return
            file = TemporaryFile(directory, spare)
            try:
                file.write([after.data])
                if isinstance(after.token, Seen):
                    keep_owner(file.fd, after.token.owner)
                else:
                    give(file.fd, owner_in(directory, self._default_owner))
                os.fchmod(file.fd, stat.S_IMODE(after.mode))
                file.publish(name, replace=False)
                step.fresh = name
            finally:
                file.discard()

    def _make_parents(self, step: _Step, intent: Intent) -> None:
        for depth in range(1, len(step.parents) + 1):
            parents = step.parents[:depth]
            try:
                with self._beneath.directory(parents):
                    continue
            except FileNotFoundError:
                intent.note(_MAKE, step.number, list(map(text, parents)))
                step.made.append(parents)
                with self._beneath.directory(parents, make=True):
                    pass

    def _place(self, step: _Step, change: Change, intent: Intent) -> None:
        """Move the old content away and the new one in."""
        if not step.is_removal and not step.fresh:
            self._prepare(step, change, intent)
        with self._beneath.directory(step.parents) as directory:
            step.place, backup = list(self._beneath.followed(step.parents)), temporary_name()
            identity = _identity(step.fresh, directory) if step.fresh else ()
            intent.note(_PLACE, step.number, text(backup), list(map(text, step.place)), identity)
            if change.before is None:
                self._clear(step, backup, directory)
                rename_into_free_name(step.fresh, directory, step.name, directory)
            else:
                status = os.stat(step.name, dir_fd=directory, follow_symlinks=False)
                if seen_of(status) != change.before.token:
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
                step.backup = backup
                if step.is_removal:
                    self._undoing.backups.add(backup)
                    os.rename(step.name, backup, src_dir_fd=directory, dst_dir_fd=directory)
                else:
                    _link_or_rename(step.name, backup, directory)
                    os.rename(step.fresh, step.name, src_dir_fd=directory, dst_dir_fd=directory)
        step.fresh = b""
        step.is_placed = True

    def _clear(self, step: _Step, backup: bytes, directory: int) -> None:
        """Move a directory out of a file's way, if all that is left in it are backups of ours."""
        try:
            self._refuse_others(step.name, directory)
        except (FileNotFoundError, NotADirectoryError):
            return
        step.backup = backup
        os.rename(step.name, step.backup, src_dir_fd=directory, dst_dir_fd=directory)
        self._refuse_others(step.backup, directory)  # one may have come before the rename

    def _refuse_others(self, name: bytes, directory: int) -> None:
        with Cursor(os.open(name, DIRECTORY_FLAGS, dir_fd=directory)) as cursor:
            if any(
                node.name not in self._undoing.backups for node in walk(cursor, recursive=True) if not node.is_directory
            ):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


class _Undoing:
    """Takes steps back, and clears away what they leave when all are made.

    Attributes:
        backups: temporary names of what was removed.
    """

    def __init__(self, beneath: Beneath) -> None:
        self._beneath = beneath
        self.backups: set[bytes] = set()

    def undo(self, step: _Step) -> None:
        """Bring the old content back."""
        with suppress(OSError, EscapeError), self._beneath.directory(step.parents) as directory:
            if step.is_placed and step.is_new:
                _unlink(step.name, directory)
            if step.backup:
                with suppress(FileNotFoundError):
                    os.rename(step.backup, step.name, src_dir_fd=directory, dst_dir_fd=directory)
            # Renaming onto another link of the same file does nothing and leaves both.
            for name in (step.backup, step.fresh, step.spare):
                _unlink(name, directory)
        for parents in reversed(step.made):
            self._remove_if_empty(parents)

    def look(self, step: _Step) -> None:
        """See whether a step that was noted has been made."""
        with suppress(OSError, EscapeError), self._beneath.directory(step.parents) as directory:
            step.is_placed = step.is_new and _identity(step.name, directory) == step.identity

    def tidy(self, step: _Step) -> None:
        """Drop the old content, and parents that a removal leaves empty, as git does."""
        if step.backup:
            with suppress(OSError, EscapeError):
                self._remove_backup([*step.place, step.backup])
        if step.is_removal:
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
                    elif node.name in self.backups:
                        _unlink(node.name, node.parent_fd)
        for parts_of_one in reversed(directories):
            self._remove_if_empty(parts_of_one)

    def _remove_if_empty(self, parts: list[bytes]) -> bool:
        """Whether it is gone."""
        try:
            with self._beneath.directory(parts[:-1]) as directory:
                os.rmdir(parts[-1], dir_fd=directory)
        except FileNotFoundError:
            return True  # an agent before this one has removed it
        except (OSError, EscapeError):
            return False
        return True


def settle(notes: Sequence[Note], intent: Intent) -> None:
    """Take back what an agent before this one had begun, or clear away what is left of it. See Intents.settle."""
    steps = _steps(notes[0][2])
    told, undone = {note[0] for note in notes}, {note[1] for note in notes if note[0] == _UNDONE}
    for kind, number, *rest in (note for note in notes[1:] if len(note) > 1):
        if kind == _MAKE:
            steps[number].made.append(list(map(path_of, rest[0])))
        elif kind == _FRESH:
            steps[number].fresh, steps[number].spare = map(path_of, rest)
        elif kind == _PLACE:
            steps[number].backup, steps[number].place = path_of(rest[0]), list(map(path_of, rest[1]))
            steps[number].identity = tuple(rest[2])
    with Beneath(path_of(notes[0][1]), lambda: (os.geteuid(), os.getegid())) as beneath:
        undoing = _Undoing(beneath)
        undoing.backups.update(step.backup for step in steps if step.is_removal and step.backup)
        if _COMMITTED in told:
            for step in steps:
                undoing.tidy(step)
            return
        for step in reversed(steps):
            if step.number not in undone:  # what is there by now may be what was there before
                undoing.look(step)
                undoing.undo(step)
                intent.note(_UNDONE, step.number)


def _steps(told: Sequence[Sequence[Any]]) -> list[_Step]:
    return [
        _Step(number, *split(path_of(path)), is_new, is_removal)
        for number, (path, is_new, is_removal) in enumerate(told)
    ]


def _with_path(work: Callable[[_Step, Change, Intent], None], step: _Step, change: Change, intent: Intent) -> None:
    try:
        work(step, change, intent)
    except EscapeError as error:
        raise BelowError(OSError(errno.ESTALE, os.strerror(errno.ESTALE)), change.path) from error
    except OSError as error:
        raise BelowError(error, change.path) from error


def _identity(name: bytes, directory: int) -> tuple[int, ...]:
    """Numbers of inodes are used again."""
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


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
