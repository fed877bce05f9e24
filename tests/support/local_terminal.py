"""A person at a terminal: runs a program on a real one, types, looks, and resizes the window."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

BACKSTOP = 100.0
# In a session of its own with the terminal as its controlling one, as from a window.
_IN_A_WINDOW = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class LocalTerminal:
    """A program on a terminal of its own. `seen` is everything that it showed."""

    def __init__(
        self, *command: str, environment: Mapping[str, str], rows: int = 24, columns: int = 80, term: str = "xterm"
    ) -> None:
        self._ours, self._theirs = os.openpty()
        self.resize(rows, columns)
        self.attributes = self._attributes()
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_A_WINDOW, *command],
            env={**environment, "TERM": term},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def until(self, wanted: bytes, after: int = 0) -> int:
        """Look until `wanted` is shown behind `after`; returns where it ends."""
        end = time.monotonic() + BACKSTOP
        while (found := self.seen.find(wanted, after)) < 0:
            assert time.monotonic() < end, f"{wanted!r} does not come: {self.seen[-2000:]!r}"
            assert self._look() or self.process.poll() is None, f"it ended: {self.seen[-2000:]!r}"
        return found + len(wanted)

    def exit(self) -> int:
        """Look until the program ends; its exit code."""
        end = time.monotonic() + BACKSTOP
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it does not end: {self.seen[-2000:]!r}"
            self._look()
        while self._look(0.0):
            pass
        return self.process.returncode

    @property
    def is_as_before(self) -> bool:
        """Whether the terminal is as it was before the program."""
        return self._attributes() == self.attributes

    def _attributes(self) -> list[Any]:
        return termios.tcgetattr(self._theirs)

    def _look(self, seconds: float = 0.05) -> bool:
        if not select.select((self._ours,), (), (), seconds)[0]:
            return False
        self.seen += os.read(self._ours, 65_536)
        return True
