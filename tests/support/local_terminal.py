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
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

BACKSTOP = 100.0
_LAST = b"<no program shows this>"
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
            if self.process.poll() is None:
                self._look()
                continue
            self._look_at_the_rest()
            found = self.seen.find(wanted, after)
            assert found >= 0, f"it ended: {self.seen[-2000:]!r}"
        return found + len(wanted)

    def exit(self) -> int:
        """Look until the program ends; its exit code."""
        end = time.monotonic() + BACKSTOP
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it does not end: {self.seen[-2000:]!r}"
            self._look()
        self._look_at_the_rest()
        return self.process.returncode

    def _look_at_the_rest(self) -> None:
        """All that a program showed which has ended: the kernel brings it here in its own time, and in order."""
        os.set_blocking(self._theirs, False)
        end, last = time.monotonic() + BACKSTOP, memoryview(_LAST)
        while not self.seen.endswith(_LAST):
            assert time.monotonic() < end, f"something else is shown still: {self.seen[-2000:]!r}"
            with suppress(BlockingIOError):  # there is no room before we have looked
                last = last[os.write(self._theirs, last) :]
            self._look()
        self.seen = self.seen.removesuffix(_LAST)

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
