"""Removes files and trees."""

from __future__ import annotations

import errno
import os
import stat
from itertools import islice
from typing import Final

from services.exec_agent.files.errors import BelowError, file_errors
from services.exec_agent.files.paths import DIRECTORY_FLAGS, open_directory, split_entry
from services.exec_agent.files.tree import Cursor

_BATCH: Final = 10_000


def remove(path: bytes, *, recursive: bool, missing_ok: bool) -> None:
    """Remove an entry; a link itself, never what it points to. Without `recursive` a directory must be empty."""
    parent, name = split_entry(path)
    try:
        with file_errors(path), open_directory(parent) as directory:
            remove_entry(name, directory, recursive=recursive)
    except Exception as error:
        if not (missing_ok and isinstance(error.__cause__, FileNotFoundError)):
            raise


def remove_entry(name: bytes, directory_fd: int, *, recursive: bool) -> None:
    """The same for a name in an open directory.

    Raises:
        OSError: of the entry itself, or BelowError of something in it.
    """
    status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=directory_fd)
        return
    if recursive:
        with Cursor(os.open(name, DIRECTORY_FLAGS, dir_fd=directory_fd)) as cursor:
            _empty(cursor)
    os.rmdir(name, dir_fd=directory_fd)


def _empty(cursor: Cursor) -> None:
    """Remove all that is below the cursor."""
    path: list[bytes] = []
    pending: list[list[bytes]] = [[]]
    while True:
        if pending[-1]:
            name = pending[-1].pop()
            path.append(name)
            try:
                cursor.enter(name)
            except (FileNotFoundError, NotADirectoryError):
                path.pop()  # replaced meanwhile; the next look at the directory shows by what
                continue
            except OSError as error:
                raise BelowError(error, b"/".join(path)) from error
            pending.append([])
            continue
        # Look again until nothing is left: a directory may be larger than a batch, or filled meanwhile.
        directories, is_empty = _remove_files(cursor, path)
        if not is_empty:
            pending[-1] = directories
            continue
        pending.pop()
        if not pending:
            return
        cursor.leave()
        _remove_emptied(cursor, path)
        path.pop()


def _remove_emptied(cursor: Cursor, path: list[bytes]) -> None:
    try:
        os.rmdir(path[-1], dir_fd=cursor.fd)
    except OSError as error:
        # Gone, filled or replaced meanwhile: the next look at the directory above shows it.
        if error.errno not in {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
            raise BelowError(error, b"/".join(path)) from error


def _remove_files(cursor: Cursor, path: list[bytes]) -> tuple[list[bytes], bool]:
    """Remove what is no directory in the cursor's, a batch at most.

    Returns the directories met, and whether there was nothing at all.
    """
    directories = []
    with os.scandir(cursor.fd) as entries:
        batch = [(os.fsencode(e.name), e.is_dir(follow_symlinks=False)) for e in islice(entries, _BATCH)]
    for name, is_directory in batch:
        if is_directory:
            directories.append(name)
            continue
        try:
            os.unlink(name, dir_fd=cursor.fd)
        except FileNotFoundError:
            continue
        except IsADirectoryError:
            directories.append(name)
        except OSError as error:
            raise BelowError(error, b"/".join([*path, name])) from error
    return directories, not batch
