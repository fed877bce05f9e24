"""Commands that wait in the queue, kept so that an agent that is started again goes on with them.

A file for each in the agent's own directory, made before its caller is told that it was accepted, and gone once the
journal says that it was begun or will never be. Its lines, each with its CRC-32 (lines.py):

    Q sequence create-ns command    the command: a JSON object
    I offset base64                 input that was taken, before its writer was told so
    F offset                        its input ends there

Nothing of the sandbox's secret environment is in it. A file that cannot be read, or that was emptied since the journal
had no room for the end, is of a command that will never start.
"""

from __future__ import annotations

import binascii
import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any, Final

from services.common.errors import ResourceExhaustedError
from services.exec_agent import lines
from services.exec_agent.model import Command
from services.exec_agent.stdin import InputLog

_PREFIX: Final = "queued-"
_NEW: Final = ".new"  # no id has a dot
_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Waiting:
    """A command that an agent before this one had accepted and not begun.

    Attributes:
        exec_id: its id.
        sequence: its place among all commands, in the order of their arrival.
        create_ns: when it arrived, in nanoseconds since the epoch.
        command: what to run; None where that cannot be read.
        stdin: the input that was taken.
        stdin_ended: whether that is all of it.
    """

    exec_id: str
    sequence: int = 0
    create_ns: int = 0
    command: Command | None = None
    stdin: bytes = b""
    stdin_ended: bool = False


class Backlog:
    """The files of one sandbox."""

    def __init__(self, directory_fd: int) -> None:
        self._directory_fd = directory_fd
        self._names: set[str] = set()

    def read(self) -> list[Waiting]:
        """What an agent before this one left, in the order of arrival."""
        with os.scandir(self._directory_fd) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(_PREFIX)]
        for name in names:
            if name.endswith(_NEW):  # nobody was told that it was accepted
                self._unlink(name)
            else:
                self._names.add(name)
        found = [_parse(name.removeprefix(_PREFIX), self._load(name)) for name in self._names]
        return sorted(found, key=lambda waiting: waiting.sequence)

    def add(self, exec_id: str, sequence: int, create_ns: int, command: Command) -> None:
        """A command that waits.

        Raises:
            ResourceExhaustedError: the disk is full; it must not wait.
        """
        name = _PREFIX + exec_id
        try:
            flags = _FLAGS | os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            descriptor = os.open(name + _NEW, flags, 0o600, dir_fd=self._directory_fd)
            try:
                lines.append(descriptor, f"Q {sequence} {create_ns} {_encode(command)}")
            finally:
                os.close(descriptor)
            os.rename(name + _NEW, name, src_dir_fd=self._directory_fd, dst_dir_fd=self._directory_fd)
        except OSError as error:
            self._unlink(name + _NEW)
            raise _no_space("a command that waits", error) from None
        self._names.add(name)

    def input_of(self, exec_id: str) -> InputLog:
        """Where input of a command that waits is noted."""
        return _Input(self, exec_id)

    def remove(self, exec_id: str, *, noted: bool = True) -> None:
        """It waits no longer. `noted`: the journal says what became of it."""
        name = _PREFIX + exec_id
        if name not in self._names:
            return
        if noted:
            self._names.discard(name)
            self._unlink(name)
        else:
            with contextlib.suppress(OSError):
                descriptor = os.open(name, _FLAGS | os.O_WRONLY | os.O_TRUNC, dir_fd=self._directory_fd)
                os.close(descriptor)

    def note_input(self, exec_id: str, text: str) -> None:
        """Add a line on input.

        Raises:
            ResourceExhaustedError: the disk is full; the input must not be taken.
        """
        try:
            descriptor = os.open(_PREFIX + exec_id, _FLAGS | os.O_WRONLY | os.O_APPEND, dir_fd=self._directory_fd)
            try:
                lines.append(descriptor, text)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _no_space("input of a command that waits", error) from None

    def _load(self, name: str) -> list[bytes]:
        with contextlib.suppress(OSError):
            descriptor = os.open(name, _FLAGS | os.O_RDWR, dir_fd=self._directory_fd)
            try:
                return lines.read_whole(descriptor)
            finally:
                os.close(descriptor)
        return []

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._directory_fd)


class _Input:
    """See stdin.InputLog."""

    def __init__(self, backlog: Backlog, exec_id: str) -> None:
        self._backlog = backlog
        self._exec_id = exec_id

    def took(self, offset: int, data: memoryview) -> None:
        text = binascii.b2a_base64(data, newline=False).decode()
        self._backlog.note_input(self._exec_id, f"I {offset} {text}")

    def ended(self, offset: int) -> None:
        self._backlog.note_input(self._exec_id, f"F {offset}")


def _no_space(what: str, error: OSError) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"the agent cannot note {what}: {error.strerror}; free space in the platform's data directory",
        reason="NO_SPACE",
    )


def _parse(exec_id: str, written: list[bytes]) -> Waiting:
    try:
        bodies = [_body_of(line) for line in written]
        kind, sequence, create_ns, command = bodies[0].split(" ", 3)
        if kind != "Q":
            return Waiting(exec_id)
        stdin, ended = _input_of(bodies[1:])
        return Waiting(exec_id, int(sequence), int(create_ns), _decode(command), stdin, ended)
    except (IndexError, ValueError, TypeError):  # of an agent of another version, perhaps
        return Waiting(exec_id)


def _body_of(line: bytes) -> str:
    body = lines.body_of(line)
    if body is None:
        raise ValueError("a line is not as it was written")
    return body


def _input_of(bodies: list[str]) -> tuple[bytes, bool]:
    stdin = bytearray()
    for body in bodies:
        kind, offset, *rest = body.split(" ")
        if int(offset) != len(stdin):
            raise ValueError("a hole in the input")
        if kind == "F":
            return bytes(stdin), True
        stdin += binascii.a2b_base64(rest[0])
    return bytes(stdin), False


def _encode(command: Command) -> str:
    fields: dict[str, Any] = {field.name: getattr(command, field.name) for field in dataclasses.fields(command)}
    del fields["tty"]  # what has a terminal never waits
    fields["env"] = dict(command.env)
    fields["stdin"] = binascii.b2a_base64(command.stdin, newline=False).decode()
    return json.dumps(fields)


def _decode(text: str) -> Command:
    fields = json.loads(text)
    fields["argv"] = tuple(fields["argv"])
    fields["stdin"] = binascii.a2b_base64(fields["stdin"])
    return Command(**fields)
