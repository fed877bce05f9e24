"""Values of the agent's domain."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

STDOUT: Final = 1
STDERR: Final = 2
DEFAULT_RETAINED: Final = 64 << 20
"""Bytes of a command's output that are kept."""


class State(enum.IntEnum):
    """orchard.exec.v1.ExecState."""

    QUEUED = 1
    RUNNING = 2
    ENDED = 3


class End(enum.IntEnum):
    """orchard.exec.v1.ExecEnd."""

    EXITED = 1
    SIGNALLED = 2
    TIMED_OUT = 3
    OUT_OF_MEMORY = 4
    KILLED = 5
    OUTPUT_LIMIT = 6
    ORPHANED = 7
    NOT_STARTED = 8
    AGENT_RESTARTED = 9


@dataclass(frozen=True, slots=True)
class Tty:
    """The terminal that a command is to get."""

    rows: int
    columns: int
    term: str
    """TERM of the command, unless its environment has that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to run and how, checked and with defaults filled in. Durations in seconds, sizes in bytes."""

    spec_hash: str
    """Two requests with one exec id must agree in it."""
    argv: tuple[str, ...] = ()
    """Run as it is; empty for a shell command."""
    shell: str = ""
    login_shell: bool = False
    env: Mapping[str, str]
    cwd: str = ""
    user: str = ""
    timeout: float | None
    queue_timeout: float | None
    concurrent: bool = False
    merge_stderr: bool = False
    output_limit: int = 0
    """Zero: none."""
    retained_limit: int
    orphan_timeout: float | None = None
    kill_grace: float
    stdin: bytes = b""
    stdin_open: bool = False
    """Its standard input is written while it runs."""
    tty: Tty | None = None
    """Its standard descriptors are a terminal, which takes input while it runs."""

    def display(self) -> str:
        """The command line for people, at most 256 characters."""
        # Only the beginning is shown, so only the beginning is joined.
        text = self.shell[:257] or " ".join(argument[:257] for argument in self.argv[:128])
        return text if len(text) <= 256 else text[:253] + "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a command ended. Times in nanoseconds since the epoch."""

    ended: End
    exit_code: int = -1
    signal: int = 0
    message: str = ""
    end_ns: int
    user_us: int = 0
    system_us: int = 0
    peak_bytes: int = 0


class Chunk(NamedTuple):
    """Output bytes of one stream at a position among all output."""

    offset: int
    stream: int
    data: bytes


class Gap(NamedTuple):
    """Output that is no longer retained."""

    offset: int
    size: int
