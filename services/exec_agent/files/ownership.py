"""Whose a new file is."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from services.exec_agent.files.resolving import exists, open_path


class Owner(NamedTuple):
    """User and group id inside the sandbox."""

    uid: int
    gid: int


DefaultOwner = Callable[[], tuple[int, int]]
"""Gives the uid and gid that new files get unless a call says otherwise: the sandbox's user."""


def owner_in(directory_fd: int, default: DefaultOwner) -> Owner:
    """Owner of something new in a directory: the default, with the directory's group where that is setgid."""
    status = os.stat(directory_fd)
    uid, gid = default()
    return Owner(uid, status.st_gid if status.st_mode & stat.S_ISGID else gid)


def give(descriptor: int, owner: Owner) -> None:
    """Make an open file or directory `owner`'s; no call is made where it is already.

    Raises:
        PermissionError: the agent may not, or the id does not exist in its user namespace.
    """
    status = os.fstat(descriptor)
    if (status.st_uid, status.st_gid) == owner:
        return
    try:
        os.fchown(descriptor, *owner)
    except OSError as error:
        raise _translated(error) from error


def give_entry(name: bytes, directory_fd: int, owner: Owner) -> None:
    """The same for an entry of a directory, without following it."""
    status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    if (status.st_uid, status.st_gid) == owner:
        return
    try:
        os.chown(name, *owner, dir_fd=directory_fd, follow_symlinks=False)
    except OSError as error:
        raise _translated(error) from error


def _translated(error: OSError) -> OSError:
    if error.errno == errno.EINVAL:
        return PermissionError(errno.EPERM, "the id is not mapped here")
    return error


def make_directory(name: bytes, parent_fd: int, mode: int, default: DefaultOwner) -> None:
    """Make a directory with exactly this mode, whatever the umask."""
    os.mkdir(name, 0o700, dir_fd=parent_fd)
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        inherited = os.fstat(descriptor).st_mode & stat.S_ISGID
        give(descriptor, owner_in(parent_fd, default))
        os.fchmod(descriptor, mode | inherited)
    finally:
        os.close(descriptor)


def make_parents(path: bytes, default: DefaultOwner) -> list[bytes]:
    """Make the directory `path` and those above it that are missing, mode 0755; returns the ones made, top first."""
    missing = []
    while path not in {b"", b"/"} and not exists(path):
        missing.append(path)
        path = os.path.dirname(path.rstrip(b"/"))
    made = []
    for directory in reversed(missing):
        parent, name = os.path.split(directory.rstrip(b"/"))
        if name in {b"", b".", b".."}:
            continue
        descriptor = open_path(parent or b"/", os.O_PATH | os.O_DIRECTORY)
        try:
            make_directory(name, descriptor, 0o755, default)
            made.append(directory)
        except FileExistsError:
            pass  # someone else was faster
        finally:
            os.close(descriptor)
    return made
