"""The few calls of Linux that Python does not have."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

_PR_SET_CHILD_SUBREAPER: Final = 36
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8


def become_subreaper() -> None:
    """From now on, processes below this one whose parent dies become its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, *(ctypes.c_ulong(value) for value in (1, 0, 0, 0))) != 0:
        _fail("prctl(PR_SET_CHILD_SUBREAPER)")


def detach_mount(point: Path) -> None:
    """Unmount, also if something still uses it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(point), _MNT_DETACH | _UMOUNT_NOFOLLOW) != 0:
        _fail(f"umount {point}")


def _fail(what: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")
