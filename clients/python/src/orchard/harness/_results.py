"""How a command's end looks to a harness. Needs no harness."""

from __future__ import annotations

from typing import Final

from orchard._client.errors import CommandNotStarted, InvalidArgument, OrchardError
from orchard._client.types import ExecEnd, ExecResult

# What a shell says of a command that it cannot find, cannot start, and that KILL ended.
NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126
KILLED: Final = 137

_REFUSALS: Final = {
    "COMMAND_NOT_FOUND": NOT_FOUND,
    "SHELL_NOT_FOUND": NOT_FOUND,
    "COMMAND_NOT_EXECUTABLE": NOT_EXECUTABLE,
    "CWD_NOT_FOUND": NOT_EXECUTABLE,
    "CWD_NOT_A_DIRECTORY": NOT_EXECUTABLE,
    "CWD_NOT_ACCESSIBLE": NOT_EXECUTABLE,
}


def shell_status(result: ExecResult) -> int:
    """The exit status that a shell would report: 128 + n for signal n, 137 for what the platform's limits killed.

    A timeout has none of its own (124 is `timeout`'s, which a command can exit with too): callers look at `timed_out`
    first.
    """
    if result.ended is ExecEnd.EXITED:
        return result.exit_code
    if result.ended is ExecEnd.SIGNALLED:
        return 128 + result.signal
    return KILLED


def remark(result: ExecResult) -> str:
    """What the output alone does not say: why it was ended, and what of its output is gone. Empty if nothing."""
    parts = []
    if result.timed_out:
        parts.append(f"the command was ended by its timeout after {result.duration:.0f} s")
    elif result.ended not in (ExecEnd.EXITED, ExecEnd.SIGNALLED):
        parts.append(result.message or f"the command was ended: {result.ended.replace('_', ' ')}")
    if result.dropped_bytes:
        parts.append(f"{result.dropped_bytes} bytes of its output are no longer retained")
    return "; ".join(parts)


def refusal(error: OrchardError) -> int | None:
    """The status of a command that could not start by its own fault: no such program, no such directory, an argument
    that no program can have. None: not the command's fault, so it is no result.
    """
    if isinstance(error, InvalidArgument):
        return NOT_EXECUTABLE
    return _REFUSALS.get(error.reason) if isinstance(error, CommandNotStarted) else None
