"""Paths of requests, and the two system calls on names that Python lacks or hides."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final

from services.common.errors import InvalidArgumentError
from services.exec_agent.files.resolving import open_path

DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RENAME_NOREPLACE: Final = 1


def absolute(path: str, working_directory: str) -> bytes:
    """The path's bytes; a relative one starts at the working directory."""
    return os.path.join(working_directory.encode(), path.encode())


def split_entry(path: bytes, field: str = "path") -> tuple[bytes, bytes]:
    """Parent directory and name of an entry that shall be made, moved or removed itself.

    Raises:
        InvalidArgumentError: the path ends in "." or "..", or is the root.
    """
    parent, _, name = path.rstrip(b"/").rpartition(b"/")
    if name in {b"", b".", b".."}:
        raise InvalidArgumentError.of(field, "must end in a name, not in '/', '.' or '..'", reason="PATH_INVALID")
    return parent or b"/", name


@contextmanager
def open_directory(path: bytes) -> Iterator[int]:
    """A descriptor for names in a directory. It needs no read permission; links in the path are followed."""
    descriptor = open_path(path, os.O_PATH | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def temporary_name() -> bytes:
    """A name that nobody else uses, for something about to be renamed."""
    return b".orchard-" + secrets.token_hex(8).encode() + b".tmp"


def identity_of(name: bytes, directory_fd: int) -> tuple[int, int]:
    """Device and inode of an entry, of a link itself.

    Raises:
        OSError: as stat.
    """
    status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    return status.st_dev, status.st_ino


@cache
def _renameat2() -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    return function


def rename_into_free_name(source: bytes, source_fd: int, target: bytes, target_fd: int) -> None:
    """Rename, but fail with EEXIST where the target exists.

    Atomic where kernel and file system can do it, else by looking first.
    """
    function = _renameat2()
    if function is not None:
        if function(source_fd, source, target_fd, target, _RENAME_NOREPLACE) == 0:
            return
        number = ctypes.get_errno()
        if number not in {errno.ENOSYS, errno.EINVAL}:
            raise OSError(number, os.strerror(number))
    try:
        os.stat(target, dir_fd=target_fd, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)
    else:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
