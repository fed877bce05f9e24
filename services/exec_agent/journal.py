"""The ids of every command of this sandbox, so that none ever runs twice, also not after the agent was restarted.

One line a step, appended to a file in the agent's own directory: "B id hash" before a command is spawned, "E id how"
when it ended or will never start. It outlives the agent's process and not the machine, as the sandbox itself does, so
nothing is synced to the disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from services.common.errors import ResourceExhaustedError

_NAME: Final = "journal"
_READ_SIZE: Final = 1 << 20


class JournalInUseError(Exception):
    """Another agent of this sandbox still runs."""


def _digest(exec_id: str) -> bytes:
    """Eight bytes instead of an id: a long-lived sandbox may have run a million commands."""
    return hashlib.blake2b(exec_id.encode(), digest_size=8).digest()


@dataclass(slots=True)
class Journal:
    """Open journal of one sandbox."""

    _descriptor: int
    interrupted: Mapping[str, str]
    """Ids, with their spec hashes, of commands that a previous agent had started and whose end it did not see."""
    _ended: set[bytes] = field(default_factory=set)

    @classmethod
    def open(cls, directory_fd: int) -> Journal:
        """Read what previous agents left, and go on writing there.

        Raises:
            JournalInUseError: another agent has it open.
            OSError: the directory cannot be written.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(_NAME, flags, 0o600, dir_fd=directory_fd)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise JournalInUseError("another agent of this sandbox still runs") from None
        begun: dict[str, str] = {}
        ended: set[bytes] = set()
        rest = b""
        while block := os.read(descriptor, _READ_SIZE):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                _replay(line.decode("ascii", "replace").split(" "), begun, ended)
        if rest:
            # The agent died in the middle of a line. Its command was not spawned yet, or its end is not known.
            os.write(descriptor, b"\n")
        return cls(descriptor, begun, ended)

    def ended(self, exec_id: str) -> bool:
        """Whether a command with this id has ended or will never start."""
        return _digest(exec_id) in self._ended

    def begin(self, exec_id: str, spec_hash: str) -> None:
        """Note that the command is about to be spawned.

        Raises:
            ResourceExhaustedError: the disk is full; the command must not be spawned.
        """
        line = f"B {exec_id} {spec_hash}\n".encode("ascii")
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise _full(error.strerror) from None
        if written < len(line):
            raise _full("a short write")

    def end(self, exec_id: str, how: str) -> None:
        """Note that the command has ended, or that it will never start."""
        self._ended.add(_digest(exec_id))
        try:
            os.write(self._descriptor, f"E {exec_id} {how}\n".encode("ascii"))
        except OSError:
            # Only a restarted agent reads it; it then says AGENT_RESTARTED, and still never runs the command again.
            return

    def close(self) -> None:
        """Close the file and let the next agent have it."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _replay(words: list[str], begun: dict[str, str], ended: set[bytes]) -> None:
    match words:
        case ["B", exec_id, spec_hash]:
            begun[exec_id] = spec_hash
        case ["E", exec_id, _]:
            begun.pop(exec_id, None)
            ended.add(_digest(exec_id))
        case _:  # a line that was cut short
            return


def _full(why: str | None) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"the agent cannot note the command before it starts it: {why}; free space in the platform's data directory",
        reason="NO_SPACE",
    )
