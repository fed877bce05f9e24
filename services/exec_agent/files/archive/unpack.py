"""Unpacks a tar stream below a directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from services.common.errors import InvalidArgumentError
from services.exec_agent.files.archive.headers import Entry, Kind
from services.exec_agent.files.archive.numbers import ArchiveError
from services.exec_agent.files.archive.parser import Data, End, TarParser
from services.exec_agent.files.beneath import Beneath, EscapeError
from services.exec_agent.files.errors import file_error, file_errors, shown
from services.exec_agent.files.ownership import (
    DefaultOwner,
    Owner,
    give,
    give_entry,
    make_directory,
    make_parents,
    owner_in,
)
from services.exec_agent.files.paths import temporary_name
from services.exec_agent.files.writing import TemporaryFile

ArchiveOwner = Callable[[Entry], Owner]
"""Gives the owner that an archive's entry names, by name where the sandbox knows it, else by number."""


class Unpacked(NamedTuple):
    """What an archive brought: entries made, and bytes of regular files."""

    entries: int
    size: int


@dataclass(frozen=True, slots=True)
class _Directory:
    """Attributes that a directory gets when all is in it: filling it changes its time, and it may be read-only."""

    parts: tuple[bytes, ...]
    mode: int
    mtime_ns: int


@dataclass(slots=True)
class _OpenFile:
    entry: Entry
    name: bytes
    owner: Owner
    file: TemporaryFile
    position: int = 0


class Unpacker:
    """One archive being unpacked: `open`, any number of `write`, then `finish` or `abort`.

    Each file appears whole; what was unpacked before an error stays.
    """

    def __init__(self, path: bytes, default_owner: DefaultOwner, archive_owner: ArchiveOwner | None) -> None:
        self._path = path
        self._default_owner = default_owner
        self._archive_owner = archive_owner
        self._parser = TarParser()
        self._beneath: Beneath | None = None
        self._made_target = False
        self._directories: list[_Directory] = []
        self._file: _OpenFile | None = None
        self._entries = 0
        self._size = 0

    def open(self) -> None:
        """Find the target directory; make it and its parents if missing."""
        with file_errors(self._path):
            self._made_target = bool(make_parents(self._path, self._default_owner))
            self._beneath = Beneath(self._path, self._default_owner)

    def write(self, pieces: Sequence[bytes]) -> None:
        """Take the next bytes of the stream."""
        try:
            for piece in pieces:
                for event in self._parser.feed(piece):
                    if isinstance(event, Data):
                        self._data(event)
                    elif isinstance(event, End):
                        self._end()
                    else:
                        self._begin(event)
        except ArchiveError as error:
            raise _malformed(error) from error

    def finish(self) -> Unpacked:
        """Take the stream's end; give directories their modes and times."""
        try:
            self._parser.finish()
        except ArchiveError as error:
            raise _malformed(error) from error
        for directory in reversed(self._directories):
            with self._errors(b"/".join(directory.parts)), self._below.directory(directory.parts) as descriptor:
                os.chmod(b".", directory.mode, dir_fd=descriptor)
                os.utime(b".", ns=(directory.mtime_ns, directory.mtime_ns), dir_fd=descriptor)
        self._close()
        return Unpacked(self._entries, self._size)

    def abort(self) -> None:
        """Drop the file that is not whole. Safe to call after anything."""
        if self._file is not None:
            self._file.file.discard()
            self._file = None
        self._close()

    def _close(self) -> None:
        if self._beneath is not None:
            self._beneath.close()

    @property
    def _below(self) -> Beneath:
        assert self._beneath is not None  # noqa: S101 (open comes first)
        return self._beneath

    def _errors(self, name: bytes) -> _EntryErrors:
        return _EntryErrors(self._path, name)

    def _begin(self, entry: Entry) -> None:
        if entry.kind is Kind.VOLUME:
            return
        if entry.kind is Kind.DEVICE:
            raise _escapes(entry.name, "is a device")
        parts = _parts(entry.name, entry.name)
        with self._errors(entry.name):
            if entry.kind is Kind.DIRECTORY:
                self._directory(entry, parts)
                return
            if not parts:
                raise ArchiveError(f"{shown(entry.name)!r} does not name a file")
            with self._below.directory(parts[:-1], make=True) as directory:
                self._make(entry, parts[-1], directory)
        self._entries += 1

    def _make(self, entry: Entry, name: bytes, directory: int) -> None:
        if entry.kind is Kind.FILE:
            owner = owner_in(directory, self._default_owner)
            self._file = _OpenFile(entry, name, owner, TemporaryFile(directory))
            return
        temporary = temporary_name()
        try:
            if entry.kind is Kind.SYMLINK:
                os.symlink(entry.link, temporary, dir_fd=directory)
            elif entry.kind is Kind.PIPE:
                os.mkfifo(temporary, 0o600, dir_fd=directory)
            else:
                self._hard_link(entry, temporary, directory)
            if entry.kind is not Kind.HARD_LINK:
                give_entry(temporary, directory, owner_in(directory, self._default_owner))
                self._give_archive_owner(entry, temporary, directory)
                if entry.kind is Kind.PIPE:
                    os.chmod(temporary, entry.mode, dir_fd=directory)
                os.utime(temporary, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=directory, follow_symlinks=False)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        finally:
            # Renaming onto another link of the same file does nothing and leaves both.
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=directory)

    def _hard_link(self, entry: Entry, temporary: bytes, directory: int) -> None:
        target = _parts(entry.link, entry.name)
        if not target:
            raise ArchiveError(f"{shown(entry.name)!r} is a hard link to nothing")
        try:
            with self._below.directory(target[:-1]) as source:
                os.link(target[-1], temporary, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            raise ArchiveError(
                f"{shown(entry.name)!r} is a hard link to {shown(entry.link)!r}, which is not there"
            ) from None

    def _directory(self, entry: Entry, parts: tuple[bytes, ...]) -> None:
        if not parts:
            # "./": the target itself. One that was there keeps what it has.
            if self._made_target:
                self._directories.append(_Directory(parts, entry.mode, entry.mtime_ns))
            return
        with self._below.directory(parts[:-1], make=True) as parent, suppress(FileExistsError):
            # Readable to its owner until all is in it.
            make_directory(parts[-1], parent, entry.mode | 0o700, self._default_owner)
        with self._below.directory(parts) as descriptor:
            self._give_archive_owner(entry, b".", descriptor)
        self._directories.append(_Directory(parts, entry.mode, entry.mtime_ns))
        self._entries += 1

    def _data(self, data: Data) -> None:
        open_file = self._file
        if open_file is None:
            return
        with self._errors(open_file.entry.name):
            if data.offset != open_file.position:
                os.lseek(open_file.file.fd, data.offset, os.SEEK_SET)
            open_file.file.write([data.view])
            open_file.position = data.offset + len(data.view)

    def _end(self) -> None:
        open_file = self._file
        if open_file is None:
            return
        entry, file = open_file.entry, open_file.file
        with self._errors(entry.name):
            if open_file.position != entry.size:
                os.ftruncate(file.fd, entry.size)  # a hole at the end
            give(file.fd, open_file.owner)
            if self._archive_owner is not None:
                with suppress(PermissionError):
                    give(file.fd, self._archive_owner(entry))
            os.fchmod(file.fd, entry.mode)
            os.utime(file.fd, ns=(entry.mtime_ns, entry.mtime_ns))
            file.publish(open_file.name, replace=True)
        self._file = None
        self._size += entry.size

    def _give_archive_owner(self, entry: Entry, name: bytes, directory: int) -> None:
        """Where the runtime can: not every id exists in a user namespace, and not every agent is root."""
        if self._archive_owner is not None:
            with suppress(PermissionError):
                give_entry(name, directory, self._archive_owner(entry))


class _EntryErrors:
    """Turns errors about an entry into the call's."""

    def __init__(self, path: bytes, name: bytes) -> None:
        self._path = path
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, EscapeError):
            raise _escapes(self._name, "leads out of the target through a link") from error
        if isinstance(error, OSError):
            raise file_error(error, os.path.join(self._path, self._name), "data") from error


def _parts(name: bytes, entry: bytes) -> tuple[bytes, ...]:
    """The components of a name in the archive."""
    if name.startswith(b"/"):
        raise _escapes(entry, "has an absolute path" if name == entry else f"links to the absolute {shown(name)!r}")
    parts = tuple(part for part in name.split(b"/") if part not in {b"", b"."})
    if b".." in parts:
        raise _escapes(entry, "has a '..' in its path" if name == entry else f"links to {shown(name)!r}")
    return parts


def _escapes(name: bytes, why: str) -> InvalidArgumentError:
    return InvalidArgumentError.of(
        "data",
        f"the archive's entry {shown(name)!r} {why}; entries must stay below the target directory",
        reason="ARCHIVE_ENTRY_ESCAPES",
        entry=shown(name),
    )


def _malformed(error: ArchiveError) -> InvalidArgumentError:
    return InvalidArgumentError.of("data", error.message, reason=error.reason)
