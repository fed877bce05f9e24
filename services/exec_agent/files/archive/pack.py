"""Packs a directory or file as a pax archive."""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Generator, Iterator
from typing import Final

from services.exec_agent.files.archive.headers import BLOCK
from services.exec_agent.files.errors import BelowError, file_errors
from services.exec_agent.files.reading import CHUNK_BYTES, open_regular, open_regular_entry
from services.exec_agent.files.resolving import open_path, status_of
from services.exec_agent.files.tree import Cursor, Node, walk

_MAXIMUM_HARD_LINKS: Final = 100_000  # remembered; more become files of their own
_TYPES: Final = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}


def pack(path: bytes) -> Generator[bytes, None, None]:
    """The archive in chunks of CHUNK_BYTES, the last one perhaps of fewer; memory stays flat.

    What vanishes meanwhile is left out; a file that shrinks is filled with zeros to the size that its header says, one
    that grows is cut there. Devices and sockets are left out. A link named by `path` itself is followed.
    """
    buffer = bytearray()
    with file_errors(path):
        for piece in _pieces(path):
            buffer += piece
            while len(buffer) >= CHUNK_BYTES:
                yield _taken(buffer)
    buffer += b"\0" * (2 * BLOCK)
    while buffer:
        yield _taken(buffer)


def _taken(buffer: bytearray) -> bytes:
    """The first chunk of a buffer, which then begins behind it."""
    with memoryview(buffer) as view:
        chunk = bytes(view[:CHUNK_BYTES])
    del buffer[:CHUNK_BYTES]
    return chunk


def _pieces(path: bytes) -> Iterator[bytes]:
    status = status_of(path, follow=True).status
    if not stat.S_ISDIR(status.st_mode):
        descriptor = open_regular(path)
        try:
            name = os.path.basename(path.rstrip(b"/"))
            yield _header(name, status, tarfile.REGTYPE, b"")
            yield from _content(descriptor, status.st_size)
        finally:
            os.close(descriptor)
        return
    hard_links: dict[tuple[int, int], bytes] = {}
    with Cursor(open_path(path, os.O_RDONLY | os.O_DIRECTORY)) as cursor:
        for node in walk(cursor, recursive=True):
            try:
                yield from _node(node, hard_links)
            except OSError as error:
                raise BelowError(error, node.path) from error


def _node(node: Node, hard_links: dict[tuple[int, int], bytes]) -> Iterator[bytes]:
    kind = _TYPES.get(stat.S_IFMT(node.status.st_mode))
    if kind is None:
        return
    if kind == tarfile.DIRTYPE:
        yield _header(node.path, node.status, kind, b"")
        return
    key = (node.status.st_dev, node.status.st_ino)
    if key in hard_links:
        yield _header(node.path, node.status, tarfile.LNKTYPE, hard_links[key])
        return
    try:
        if kind == tarfile.SYMTYPE:
            header = _header(node.path, node.status, kind, os.readlink(node.name, dir_fd=node.parent_fd))
        elif kind == tarfile.FIFOTYPE:
            header = _header(node.path, node.status, kind, b"")
        else:
            descriptor = open_regular_entry(node.name, node.parent_fd)
    except OSError as error:
        # Gone, or something else by now.
        if error.errno in {errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EINVAL}:
            return
        raise
    if kind != tarfile.REGTYPE:
        yield header
    else:
        try:
            status = os.fstat(descriptor)
            yield _header(node.path, status, kind, b"")
            yield from _content(descriptor, status.st_size)
        finally:
            os.close(descriptor)
    if node.status.st_nlink > 1 and len(hard_links) < _MAXIMUM_HARD_LINKS:
        hard_links[key] = node.path


def _header(path: bytes, status: os.stat_result, kind: bytes, link: bytes) -> bytes:
    info = tarfile.TarInfo(path.decode("utf-8", "surrogateescape"))
    info.type = kind
    info.mode = stat.S_IMODE(status.st_mode)
    info.uid, info.gid = status.st_uid, status.st_gid
    info.size = status.st_size if kind == tarfile.REGTYPE else 0
    info.linkname = link.decode("utf-8", "surrogateescape")
    seconds, nanoseconds = divmod(status.st_mtime_ns, 1_000_000_000)
    info.mtime = seconds
    if nanoseconds and seconds >= 0:
        info.pax_headers = {"mtime": f"{seconds}.{nanoseconds:09d}"}
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _content(descriptor: int, size: int) -> Iterator[bytes]:
    left = size
    while left:
        piece = os.read(descriptor, min(CHUNK_BYTES, left))
        if not piece:
            break
        left -= len(piece)
        yield piece
    while left:
        zeros = b"\0" * min(CHUNK_BYTES, left)
        left -= len(zeros)
        yield zeros
    if size % BLOCK:
        yield b"\0" * (BLOCK - size % BLOCK)
