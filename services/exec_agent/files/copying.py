"""Copies trees with all that a move must keep: modes, owners, times, links, hard links, holes, extended attributes."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Final, NamedTuple

from services.exec_agent.files.errors import BelowError
from services.exec_agent.files.paths import DIRECTORY_FLAGS
from services.exec_agent.files.reading import open_regular_entry
from services.exec_agent.files.tree import Cursor, walk

_CHUNK_BYTES: Final = 1 << 20
_MAXIMUM_HARD_LINKS: Final = 100_000  # remembered; more become files of their own


class _Attributes(NamedTuple):
    status: os.stat_result
    extended: dict[str, bytes]


def copy_entry(name: bytes, source_fd: int, target: bytes, target_fd: int) -> None:
    """Copy a file or tree to a new name."""
    status = os.stat(name, dir_fd=source_fd, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        _copy_leaf(name, source_fd, target, target_fd, status)
        return
    os.mkdir(target, 0o700, dir_fd=target_fd)
    with (
        Cursor(os.open(name, DIRECTORY_FLAGS, dir_fd=source_fd)) as source,
        Cursor(os.open(target, DIRECTORY_FLAGS, dir_fd=target_fd)) as copy,
        Cursor(os.dup(copy.fd)) as top,
    ):
        _copy_below(source, copy, top.fd)
        _set_attributes(top.fd, _read_attributes(name, source_fd, status))


def _copy_below(source: Cursor, copy: Cursor, top_fd: int) -> None:
    open_directories: list[_Attributes] = []
    hard_links: dict[tuple[int, int], bytes] = {}
    for node in walk(source, recursive=True):
        # A directory's attributes come last: filling it changes its times, and it may be read-only.
        while copy.depth > node.path.count(b"/"):
            _set_attributes(copy.fd, open_directories.pop())
            copy.leave()
        try:
            if node.is_directory:
                os.mkdir(node.name, 0o700, dir_fd=copy.fd)
                open_directories.append(_read_attributes(node.name, node.parent_fd, node.status))
                copy.enter(node.name)
                continue
            key = (node.status.st_dev, node.status.st_ino)
            if key in hard_links:
                os.link(hard_links[key], node.name, src_dir_fd=top_fd, dst_dir_fd=copy.fd, follow_symlinks=False)
                continue
            _copy_leaf(node.name, node.parent_fd, node.name, copy.fd, node.status)
            if node.status.st_nlink > 1 and len(hard_links) < _MAXIMUM_HARD_LINKS:
                hard_links[key] = node.path
        except OSError as error:
            raise BelowError(error, node.path) from error
    while copy.depth:
        _set_attributes(copy.fd, open_directories.pop())
        copy.leave()


def _copy_leaf(name: bytes, source_fd: int, target: bytes, target_fd: int, status: os.stat_result) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFREG:
        _copy_file(name, source_fd, target, target_fd, status)
        return
    if kind == stat.S_IFLNK:
        os.symlink(os.readlink(name, dir_fd=source_fd), target, dir_fd=target_fd)
    elif kind == stat.S_IFIFO:
        os.mkfifo(target, 0o600, dir_fd=target_fd)
    else:
        os.mknod(target, status.st_mode, status.st_rdev, dir_fd=target_fd)
    with suppress(PermissionError):
        os.chown(target, status.st_uid, status.st_gid, dir_fd=target_fd, follow_symlinks=False)
    if kind != stat.S_IFLNK:
        os.chmod(target, stat.S_IMODE(status.st_mode), dir_fd=target_fd)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=target_fd, follow_symlinks=False)


def _copy_file(name: bytes, source_fd: int, target: bytes, target_fd: int, status: os.stat_result) -> None:
    source = open_regular_entry(name, source_fd)
    try:
        copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target_fd)
        try:
            _copy_content(source, copy, status.st_size)
            _set_attributes(copy, _Attributes(status, _extended_attributes(source)))
        finally:
            os.close(copy)
    finally:
        os.close(source)


def _copy_content(source: int, copy: int, size: int) -> None:
    """Copy the data between the holes."""
    position = 0
    while position < size:
        try:
            start = os.lseek(source, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # a hole to the end
        end = os.lseek(source, start, os.SEEK_HOLE)
        os.lseek(copy, start, os.SEEK_SET)
        os.lseek(source, start, os.SEEK_SET)
        position = start
        while position < end:
            piece = os.read(source, min(_CHUNK_BYTES, end - position))
            if not piece:
                break
            view = memoryview(piece)
            while view:
                view = view[os.write(copy, view) :]
            position += len(piece)
        position = end
    os.ftruncate(copy, max(size, os.fstat(copy).st_size))


def _read_attributes(name: bytes, parent_fd: int, status: os.stat_result) -> _Attributes:
    descriptor = os.open(name, DIRECTORY_FLAGS, dir_fd=parent_fd)
    try:
        return _Attributes(status, _extended_attributes(descriptor))
    finally:
        os.close(descriptor)


def _extended_attributes(descriptor: int) -> dict[str, bytes]:
    try:
        return {name: os.getxattr(descriptor, name) for name in os.listxattr(descriptor)}
    except OSError:
        return {}  # the file system has none, or one went meanwhile


def _set_attributes(copy: int, attributes: _Attributes) -> None:
    """Owner where the agent may, then mode, extended attributes where the file system has them, and times."""
    status = attributes.status
    try:
        os.fchown(copy, status.st_uid, status.st_gid)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.EINVAL}:
            raise
    os.fchmod(copy, stat.S_IMODE(status.st_mode))
    for name, value in attributes.extended.items():
        with suppress(OSError):
            os.setxattr(copy, name, value)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
