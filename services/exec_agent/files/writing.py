"""Writes files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from services.exec_agent.files.errors import file_errors
from services.exec_agent.files.ownership import DefaultOwner, Owner, give, make_directory, make_parents, owner_in
from services.exec_agent.files.paths import open_directory, split_entry, temporary_name
from services.exec_agent.files.resolving import is_directory, status_of

_MAKES: Final = 16
"""How often a directory is made again that others take away."""


class TemporaryFile:
    """A file without a name yet in the directory where it shall get one.

    Where the file system can, it has no name at all (O_TMPFILE): not even a killed agent leaves anything behind.
    """

    def __init__(self, directory_fd: int, name: bytes = b"") -> None:
        """`name` is the one that it gets where it cannot be without; empty: any."""
        self._directory = os.dup(directory_fd)
        self._spare = name or temporary_name()
        self._name: bytes | None = None
        self.fd = -1
        try:
            self._create(directory_fd)
        except BaseException:
            self.discard()
            raise

    def _create(self, directory_fd: int) -> None:
        try:
            self.fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
            # It gets its name through /proc, which a bare root file system may lack.
            os.lstat(f"/proc/self/fd/{self.fd}")
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}:
                raise
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self.fd = os.open(self._spare, flags, 0o600, dir_fd=directory_fd)
            self._name = self._spare

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Append all of the pieces."""
        left = [memoryview(piece) for piece in pieces if len(piece)]
        while left:
            written = os.writev(self.fd, left[:64])
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]

    def publish(self, name: bytes, *, replace: bool) -> None:
        """Give it its name, over a file of that name or, without `replace`, only if there is none.

        Raises:
            FileExistsError: there is one.
        """
        if not replace:
            self._link(name)
            self.discard()
            return
        if self._name is None:
            self._link(self._spare)
            self._name = self._spare
        os.rename(self._name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        self._name = None
        self.discard()

    def go_to(self, directory_fd: int) -> None:
        """Get the name in another directory of the same file system."""
        os.close(self._directory)
        self._directory = os.dup(directory_fd)

    def _link(self, name: bytes) -> None:
        if self._name is None:
            os.link(f"/proc/self/fd/{self.fd}", name, dst_dir_fd=self._directory, follow_symlinks=True)
        else:
            os.link(self._name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory, follow_symlinks=False)

    def discard(self) -> None:
        """Close it, and remove its temporary name if it still has one. Safe to call again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._name is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=self._directory)
            self._name = None
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write.

    Attributes:
        mode: permission bits; zero: an existing file's own, else 0644.
        owner: who gets it; None: an existing file's own, else the default.
        make_parents: make missing parent directories.
        exclusive: fail instead of replacing.
    """

    mode: int = 0
    owner: Owner | None = None
    make_parents: bool = False
    exclusive: bool = False


class FileWriter:
    """One file being written: `open`, any number of `write`, then `finish` or `abort`."""

    def __init__(self, path: bytes, options: WriteOptions, default_owner: DefaultOwner) -> None:
        self._path = path
        self._options = options
        self._default_owner = default_owner
        self._made: list[bytes] = []
        self._parent = b""
        self._name = b""
        self._directory = -1
        self._file: TemporaryFile | None = None
        self._existing: os.stat_result | None = None
        self.size = 0

    def open(self) -> None:
        """Find the place and begin."""
        with file_errors(self._path):
            self._open()

    def _open(self) -> None:
        path = self._path
        if path.endswith(b"/"):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Writing through a link changes the file it points to, as a shell's redirection does.
        if not self._options.exclusive and _is_link(path):
            path = os.path.realpath(path)
        self._parent, self._name = split_entry(path)
        self._directory = self._open_parent()
        with suppress(FileNotFoundError):
            self._existing = os.stat(self._name, dir_fd=self._directory, follow_symlinks=False)
        if self._existing is not None:
            _refuse(self._existing, exclusive=self._options.exclusive)
        self._file = TemporaryFile(self._directory)

    def _open_parent(self) -> int:
        """A descriptor of the directory of the file, made where that was asked for.

        An upload that is given up takes the empty directories along that it made: also from under those that came later
        and found them there.
        """
        left = _MAKES if self._options.make_parents else 1
        while True:
            left -= 1
            try:
                if self._options.make_parents:
                    self._made += make_parents(self._parent, self._default_owner)
                with open_directory(self._parent) as directory:
                    return os.dup(directory)
            except FileNotFoundError:
                if not left:
                    raise

    def write(self, pieces: Sequence[bytes]) -> None:
        """Append bytes."""
        with file_errors(self._path):
            assert self._file is not None  # noqa: S101 (open comes first)
            self._file.write(pieces)
        self.size += sum(map(len, pieces))

    def finish(self) -> int:
        """Let the file appear; returns its size in bytes."""
        with file_errors(self._path):
            assert self._file is not None  # noqa: S101
            self._publish(self._file)
        self._made = []
        self._close()
        return self.size

    def _publish(self, file: TemporaryFile) -> None:
        left = _MAKES if self._options.make_parents else 1
        while True:
            left -= 1
            self._set_attributes(file.fd)
            try:
                file.publish(self._name, replace=not self._options.exclusive)
            except FileNotFoundError:  # the directory is gone, see _open_parent
                if not left:
                    raise
            else:
                return
            self._close()
            self._directory = self._open_parent()
            file.go_to(self._directory)

    def abort(self) -> None:
        """Leave nothing behind, neither a temporary file nor directories made for it. Safe to call after anything."""
        if self._file is not None:
            self._file.discard()
        self._close()
        for directory in reversed(self._made):
            with suppress(OSError):
                os.rmdir(directory)
        self._made = []

    def _close(self) -> None:
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def _set_attributes(self, descriptor: int) -> None:
        options, existing = self._options, self._existing
        if options.owner is not None:
            give(descriptor, options.owner)
        elif existing is not None:
            keep_owner(descriptor, Owner(existing.st_uid, existing.st_gid))
        else:
            give(descriptor, owner_in(self._directory, self._default_owner))
        # After the owner, whose change clears set-id bits.
        mode = options.mode or (stat.S_IMODE(existing.st_mode) if existing is not None else 0o644)
        os.fchmod(descriptor, mode)


def _is_link(path: bytes) -> bool:
    try:
        return stat.S_ISLNK(status_of(path, follow=False).status.st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _refuse(existing: os.stat_result, *, exclusive: bool) -> None:
    """Only a regular file may be replaced."""
    number = 0
    if exclusive:
        number = errno.EEXIST
    elif stat.S_ISDIR(existing.st_mode):
        number = errno.EISDIR
    elif not stat.S_ISREG(existing.st_mode):
        number = errno.ENXIO
    if number:
        raise OSError(number, os.strerror(number))


def keep_owner(descriptor: int, owner: Owner) -> None:
    """Give a new file the old one's owner; its group only where possible, as for anyone who may not give files away.

    Raises:
        PermissionError: it would belong to another user than the old one.
    """
    try:
        give(descriptor, owner)
    except PermissionError:
        if os.fstat(descriptor).st_uid != owner.uid:
            raise


def make_one_directory(path: bytes, mode: int, *, parents: bool, default_owner: DefaultOwner) -> None:
    """Make a directory; with `parents` also those above it, and one that is there is accepted."""
    parent, name = split_entry(path)
    with file_errors(path):
        if parents:
            if is_directory(path):
                return
            make_parents(parent, default_owner)
        with open_directory(parent) as directory:
            try:
                make_directory(name, directory, mode or 0o755, default_owner)
            except FileExistsError:
                if not (parents and is_directory(path)):
                    raise
