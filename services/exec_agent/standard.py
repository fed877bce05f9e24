"""The standard descriptors of a command: the ends that it gets, and ours."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from services.exec_agent.model import STDERR, STDOUT, Command
from services.exec_agent.terminal import open_terminal
from services.exec_agent.users import ResolvedUser


@dataclass(slots=True)
class Standard:
    """Pipes, or a terminal. Close it unless its descriptors were handed on."""

    given: list[int] = field(default_factory=list)
    """Ends of the command, to be closed here once it has them."""
    outputs: dict[int, int] = field(default_factory=dict)
    """Ends to read from, and the streams they bring."""
    stdin: int = -1
    """Where its input is written; negative if there is none."""
    descriptors: tuple[int, int, int] = (-1, -1, -1)
    """What the command gets as 0, 1 and 2."""

    def open(self, command: Command, identity: ResolvedUser | None, null_fd: int) -> None:
        """Open what a command needs; without input it reads `null_fd`.

        Raises:
            OSError: no descriptor is left.
            FailedPreconditionError: PTY_UNAVAILABLE.
        """
        if command.tty is not None:
            theirs, ours = open_terminal(command.tty, identity)
            self.given.append(theirs)
            self.outputs[ours] = STDOUT
            self.stdin = os.dup(ours)
            self.descriptors = (theirs, theirs, theirs)
            return
        for stream in (STDOUT,) if command.merge_stderr else (STDOUT, STDERR):
            read, write = os.pipe2(os.O_CLOEXEC)
            self.given.append(write)
            self.outputs[read] = stream
        source = null_fd
        if command.stdin or command.stdin_open:
            source, self.stdin = os.pipe2(os.O_CLOEXEC)
            self.given.append(source)
        self.descriptors = (source, self.given[0], self.given[0] if command.merge_stderr else self.given[1])

    def close(self) -> None:
        """Close all of it that was not handed on."""
        for descriptor in (*self.given, *self.outputs, *((self.stdin,) if self.stdin >= 0 else ())):
            os.close(descriptor)
        self.given, self.outputs, self.stdin = [], {}, -1
