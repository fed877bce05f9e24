"""Moves files and trees, across devices too."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from services.common.errors import InvalidArgumentError
from services.exec_agent.files.copying import copy_entry
from services.exec_agent.files.errors import file_errors, shown
from services.exec_agent.files.intents import Intent, Intents, Note, path_of, text
from services.exec_agent.files.paths import (
    identity_of,
    open_directory,
    rename_into_free_name,
    split_entry,
    temporary_name,
)
from services.exec_agent.files.removing import remove_entry

MOVE: Final = "move"
"""The kind of a move that takes a copy; then parent and name of the source, and of the target, the copy's temporary
name, and device and inode of the source."""
_PLACE: Final = "P"  # device and inode of the copy, which gets the target's name next


def move(source: bytes, target: bytes, *, overwrite: bool, intents: Intents) -> None:
    """Rename `source` to `target`. With `overwrite` a file may replace a file, a directory an empty directory.

    Where a rename cannot do it (another device; a lower directory of an overlay), the source is copied next to the
    target, renamed into place and only then removed. After a kill the next agent takes that back or finishes it.
    """
    source_parent, source_name = split_entry(source, "source_path")
    target_parent, target_name = split_entry(target, "target_path")
    with file_errors(source, "source_path"), open_directory(source_parent) as source_fd:
        os.stat(source_name, dir_fd=source_fd, follow_symlinks=False)
        with file_errors(target, "target_path"), open_directory(target_parent) as target_fd:
            if _renamed(source_name, source_fd, target_name, target_fd, overwrite=overwrite):
                return
            copy = temporary_name()
            places = (os.path.realpath(source_parent), source_name, os.path.realpath(target_parent), target_name, copy)
            with intents.begin(MOVE, *map(text, places), *identity_of(source_name, source_fd)) as intent:
                try:
                    with file_errors(source, "source_path"):
                        copy_entry(source_name, source_fd, copy, target_fd)
                    intent.note(_PLACE, *identity_of(copy, target_fd))
                    _rename(copy, target_fd, target_name, target_fd, overwrite=overwrite)
                except BaseException:
                    with suppress(OSError):
                        remove_entry(copy, target_fd, recursive=True)
                    raise
                remove_entry(source_name, source_fd, recursive=True)


def settle(notes: Sequence[Note], _intent: Intent) -> None:
    """Take back what an agent before this one had begun, or finish it. See Intents.settle."""
    source_parent, source, target_parent, target, copy = map(path_of, notes[0][1:6])
    with open_directory(target_parent) as target_fd:
        try:
            remove_entry(copy, target_fd, recursive=True)
        except FileNotFoundError:
            if notes[-1][0] != _PLACE or identity_of(target, target_fd) != tuple(notes[-1][1:]):
                return
        else:
            return  # it had not got the target's name
    with open_directory(source_parent) as source_fd:
        # What another made in its place meanwhile stays.
        if identity_of(source, source_fd) == tuple(notes[0][6:8]):
            remove_entry(source, source_fd, recursive=True)


def _renamed(source: bytes, source_fd: int, target: bytes, target_fd: int, *, overwrite: bool) -> bool:
    """Rename; False where it takes a copy."""
    try:
        _rename(source, source_fd, target, target_fd, overwrite=overwrite)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise InvalidArgumentError.of(
                "target_path", "lies inside source_path; a directory cannot move into itself", path=shown(target)
            ) from error
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def _rename(source: bytes, source_fd: int, target: bytes, target_fd: int, *, overwrite: bool) -> None:
    if overwrite:
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)
    else:
        rename_into_free_name(source, source_fd, target, target_fd)
