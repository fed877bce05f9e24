"""Files and folders that one process alone works on."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from orchard.data.errors import DataError, Where


class Holding:
    """What this process holds: nobody else gets it before it is closed or the process has ended."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def take(self, path: Path) -> None:
        """Hold a file or folder that is there, whatever becomes of its name.

        Raises:
            DataError: somebody else holds it.
            FileNotFoundError: it is not there.
        """
        while True:
            descriptor = os.open(path, os.O_RDONLY)
            self._descriptors.append(descriptor)
            if not _locked(descriptor):
                raise DataError(
                    "somebody else is writing it just now",
                    where=Where(str(path)),
                    fix="wait for that, or choose another name",
                )
            # Between the two steps whoever had it may have given it another name.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return

    def close(self) -> None:
        """Let go. Can be repeated."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def _locked(descriptor: int) -> bool:
    try:
        import fcntl
    except ImportError:  # not on every system
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # nor on every file system
        return True
    return True
