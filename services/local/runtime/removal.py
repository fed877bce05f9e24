"""Removes what a sandbox left: trees of any depth with any modes."""

from __future__ import annotations

import os
from pathlib import Path


class RemovalError(Exception):
    """Something does not go away; the message says what holds it."""


def remove_tree(top: Path) -> None:
    """Remove a folder and all that is in it; one that is not there is no error.

    Folders are moved up to `top` before they are emptied, so that neither recursion nor the length of a path bounds
    the depth; the kernel's overlay work folders, of mode 000, are opened up first.

    Raises:
        OSError: something cannot be removed.
    """
    pending = [str(top)]
    moved = 0
    while pending:
        folder = pending[-1]
        found_folder = False
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            pending.pop()
            continue
        except PermissionError:
            os.chmod(folder, 0o700)  # noqa: PTH101
            entries = list(os.scandir(folder))
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if folder == pending[0]:
                    pending.append(entry.path)
                else:
                    moved += 1
                    pending.append(_move_up(entry.path, f"{pending[0]}/.removing-{moved}"))
                found_folder = True
            else:
                _unlink(entry.path)
        if not found_folder:
            os.rmdir(folder)  # noqa: PTH106
            pending.pop()


def _move_up(path: str, target: str) -> str:
    try:
        os.rename(path, target)  # noqa: PTH104
    except PermissionError:
        # Moving a folder rewrites its "..": it must be writable, and so must the one that holds it.
        os.chmod(os.path.dirname(path), 0o700)  # noqa: PTH101, PTH120
        os.chmod(path, 0o700)  # noqa: PTH101
        os.rename(path, target)  # noqa: PTH104
    return target


def _unlink(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108
    except PermissionError:
        os.chmod(os.path.dirname(path), 0o700)  # noqa: PTH101, PTH120
        os.unlink(path)  # noqa: PTH108
