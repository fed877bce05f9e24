"""Reads files in chunks."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from typing import Final, NamedTuple

from services.exec_agent.files.errors import file_errors
from services.exec_agent.files.resolving import open_path

CHUNK_BYTES: Final = 1 << 20
"""Of one message: at 256 KiB each byte costs gRPC a quarter more."""
_FIRST_BYTES: Final = 64 << 10
"""Of the first message, each of whose followers is twice as large: where connections break again and again, every one
still brings something."""
_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class FileHead(NamedTuple):
    """What is known of a file when it is opened: its size in bytes and permission bits."""

    size: int
    mode: int


def open_regular(path: bytes) -> int:
    """Open a regular file for reading; never waits for the other end of a pipe.

    Raises:
        OSError: EISDIR for a directory, ENXIO for a device, socket or pipe.
    """
    return _checked(open_path(path, _FLAGS))


def open_regular_entry(name: bytes, directory_fd: int) -> int:
    """The same for an entry of an open directory, which is not followed if it is a link."""
    return _checked(os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=directory_fd))


def _checked(descriptor: int) -> int:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
    raise OSError(number, os.strerror(number))


def read_file(path: bytes, offset: int, length: int) -> Generator[tuple[FileHead | None, bytes], None, None]:
    """A file's bytes from `offset`, at most `length` (0: to the end), in chunks; the head comes with the first.

    Something always comes, also of an empty file. Reading goes by what is there, not by the size: files of /proc have
    none, and a file may grow or shrink meanwhile.
    """
    with file_errors(path):
        descriptor = open_regular(path)
    try:
        with file_errors(path):
            status = os.fstat(descriptor)
            head: FileHead | None = FileHead(status.st_size, stat.S_IMODE(status.st_mode))
            left, largest = length or 1 << 62, _FIRST_BYTES
            while left > 0 or head is not None:
                piece = os.pread(descriptor, min(largest, left), offset)
                if not piece and head is None:
                    return
                yield head, piece
                head = None
                offset += len(piece)
                left -= len(piece)
                largest = min(2 * largest, CHUNK_BYTES)
                if not piece:
                    return
    finally:
        os.close(descriptor)
