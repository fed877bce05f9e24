"""Opens the paths of requests, step by step and by descriptors.

The agent is older than its sandbox: some of its descriptors lie outside, and /proc/self/fd shows them as links that the
kernel follows to the thing itself, whatever its name. Commands cannot reach them, but a path of a request is the
agent's to open, and a link to such a place is easily planted. Here every link is read as text, as if after a chroot: it
leads to a name in the sandbox or to nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import Final, NamedTuple

_MAXIMUM_LINKS: Final = 40  # as the kernel
_STEP: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PathStatus(NamedTuple):
    """What a path names: its status, and where it leads if it is a link that was not followed."""

    status: os.stat_result
    target: bytes


def open_path(path: bytes, flags: int) -> int:
    """As os.open of an absolute path: with O_NOFOLLOW the last link is not followed. Closed on exec.

    Raises:
        OSError: as open; PermissionError also for what /proc has of the agent itself.
    """
    directory, name = _place(path, follow=not flags & os.O_NOFOLLOW)
    try:
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        _refuse_own(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def status_of(path: bytes, *, follow: bool) -> PathStatus:
    """As os.stat, or os.lstat and os.readlink.

    Raises:
        OSError: as they.
    """
    descriptor = open_path(path, os.O_PATH | (0 if follow else os.O_NOFOLLOW))
    try:
        status = os.fstat(descriptor)
        return PathStatus(status, os.readlink(b"", dir_fd=descriptor) if stat.S_ISLNK(status.st_mode) else b"")
    finally:
        os.close(descriptor)


def exists(path: bytes) -> bool:
    """Whether there is such an entry, be it a link to nothing."""
    with suppress(OSError):
        os.close(open_path(path, os.O_PATH | os.O_NOFOLLOW))
        return True
    return False


def is_directory(path: bytes) -> bool:
    """Whether it is a directory or a link to one."""
    with suppress(OSError):
        os.close(open_path(path, os.O_PATH | os.O_DIRECTORY))
        return True
    return False


def _place(path: bytes, *, follow: bool) -> tuple[int, bytes]:
    """A descriptor of the directory that a path ends in, and the name there; "." where it ends in a slash."""
    todo = _parts(path)
    must_be_directory = _ends_in_slash(path)
    links = 0
    current = os.open(b"/", _STEP)
    try:
        while todo:
            part = todo.pop()
            is_last = not todo
            if is_last and not must_be_directory:
                target = _link(part, current) if follow else None
                if target is None:
                    return current, part
            else:
                try:
                    current = _replaced(current, os.open(part, _STEP, dir_fd=current))
                    continue
                except NotADirectoryError:
                    target = _link(part, current)
                    if target is None:
                        raise
            links = _one_more(links)
            must_be_directory = must_be_directory or (is_last and _ends_in_slash(target))
            todo += _parts(target)
            if target.startswith(b"/"):
                current = _replaced(current, os.open(b"/", _STEP))
    except BaseException:
        os.close(current)
        raise
    return current, b"."


def _one_more(links: int) -> int:
    if links == _MAXIMUM_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return links + 1


def _replaced(old: int, new: int) -> int:
    os.close(old)
    return new


def _parts(path: bytes) -> list[bytes]:
    """Names, the first one last."""
    return [part for part in reversed(path.split(b"/")) if part not in {b"", b"."}]


def _ends_in_slash(path: bytes) -> bool:
    return path.endswith((b"/", b"/."))


def _link(name: bytes, directory_fd: int) -> bytes | None:
    """The text of a link; None for anything else, also for what is not there."""
    try:
        return os.readlink(name, dir_fd=directory_fd)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.ENOENT}:
            return None
        raise


def _refuse_own(descriptor: int) -> None:
    """Raise PermissionError for what lies in /proc/self: the agent's memory is no file of the sandbox."""
    try:
        if os.fstat(descriptor).st_dev != os.stat(b"/proc").st_dev:
            return
        parts = os.readlink(b"/proc/self/fd/%d" % descriptor).split(b"/")
    except OSError:
        return  # there is no /proc
    if len(parts) > 2 and parts[2].isdigit() and os.path.exists(b"/proc/self/task/" + parts[2]):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
