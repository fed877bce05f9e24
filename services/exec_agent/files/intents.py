"""What a change of several entries is about to do, so that a kill in the middle of it leaves no half of it for good.

A file for each such change in the agent's own directory. Its lines (lines.py) are JSON arrays that stand there before
what they tell of is done. The next agent reads what is left of them before it serves, and takes the change back or
finishes it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeAlias

from services.common import logs
from services.exec_agent import lines

_log = logs.get_logger(__name__)

_PREFIX: Final = "change-"
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC

Note: TypeAlias = list[Any]
"""A kind, and what belongs to it: paths as `text` makes them, numbers, lists of both."""


def text(path: bytes) -> str:
    """A path for a note."""
    return path.decode("latin-1")


def path_of(noted: str) -> bytes:
    """A path of a note."""
    return noted.encode("latin-1")


class Intent:
    """One change under way."""

    def __init__(self, descriptor: int) -> None:
        """Does not own `descriptor`."""
        self._descriptor = descriptor

    def note(self, kind: str, *rest: Any) -> None:
        """Note what is done next.

        Raises:
            OSError: there is no space for it; it must not be done.
        """
        lines.append(self._descriptor, json.dumps([kind, *rest]))


class Intents:
    """The changes of one sandbox that are under way."""

    def __init__(self, directory_fd: int) -> None:
        """`directory_fd` is the agent's own directory."""
        self._directory_fd = directory_fd

    @contextmanager
    def begin(self, kind: str, *rest: Any) -> Iterator[Intent]:
        """Around a change, which takes itself back if it fails. The first note says what kind of change it is.

        Raises:
            OSError: there is no space for it.
        """
        name = _PREFIX + secrets.token_hex(8)
        descriptor = os.open(name, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._directory_fd)
        try:
            intent = Intent(descriptor)
            intent.note(kind, *rest)
            yield intent
        finally:
            os.close(descriptor)
            self._forget(name)

    def settle(self, ways: dict[str, Callable[[Sequence[Note], Intent], None]]) -> None:
        """Settle what an agent before this one left, by the way of each kind; that may itself be killed, and called
        again.
        """
        for name in self._left():
            try:
                self._settle(name, ways)
            except Exception as error:  # noqa: BLE001 (whatever it is: the sandbox goes on)
                _log.warning("a change that was cut short stays so", error=repr(error))
            self._forget(name)

    @property
    def is_left(self) -> bool:
        """Whether an agent before this one left any."""
        return bool(self._left())

    def _left(self) -> list[str]:
        with os.scandir(self._directory_fd) as entries:
            return [entry.name for entry in entries if entry.name.startswith(_PREFIX)]

    def _settle(self, name: str, ways: dict[str, Callable[[Sequence[Note], Intent], None]]) -> None:
        descriptor = os.open(name, _FLAGS, dir_fd=self._directory_fd)
        try:
            notes = list(_notes(lines.read_whole(descriptor)))
            if notes:  # otherwise nothing was done yet
                ways[notes[0][0]](notes, Intent(descriptor))
        finally:
            os.close(descriptor)

    def _forget(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(name, dir_fd=self._directory_fd)


def _notes(written: Sequence[bytes]) -> Iterator[Note]:
    for line in written:
        body = lines.body_of(line)
        if body is None:
            return
        yield json.loads(body)
