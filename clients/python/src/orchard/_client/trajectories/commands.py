"""A sandbox's commands as steps: each is a tool call, and its output the observation."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from orchard._client.observing import ObservedCommand
from orchard._client.text import decode_in_order
from orchard._client.trajectories.types import Role, Step, ToolCall
from orchard._client.trajectories.writer import Prepared, prepared

_log: Final = logging.getLogger("orchard")
TOOL: Final = "exec"
"""Name of the tool that a command is a call of."""
_ARGUMENT_BYTES: Final = 256 << 10


class CommandSteps:
    """Makes steps of commands, once whoever ran them has their results.

    Args:
        take: is given the two steps of each.
    """

    def __init__(self, take: Callable[[Sequence[Prepared]], None]) -> None:
        self._take = take
        self._waiting: list[ObservedCommand] = []

    def ended(self, command: ObservedCommand) -> None:
        """See observing.Observer."""
        command.end_time = dt.datetime.now(dt.UTC)
        self._waiting.append(command)
        # A generator that is thrown away may end without a loop: then the next step, or the recording's end, makes it.
        with suppress(RuntimeError):
            asyncio.get_running_loop().call_soon(self.make)

    def make(self) -> None:
        """Make the steps of what has ended; before anything else is added, so that the order is kept."""
        waiting, self._waiting = self._waiting, []
        for command in waiting:
            try:
                self._take([prepared(step) for step in steps_of(command)])
            except Exception as error:  # noqa: BLE001 (a recording never breaks a command)
                _log.warning("a command could not be recorded: %s", error)


def steps_of(command: ObservedCommand) -> tuple[Step, Step]:
    """The call and the observation of a command."""
    call = ToolCall(command.exec_id, TOOL, _arguments(command))
    result = command.result
    text, extra = _observation(command)
    return (
        Step(Role.ASSISTANT, tool_calls=(call,), time=command.start_time),
        Step(
            Role.TOOL,
            text,
            tool_call_id=command.exec_id,
            name=TOOL,
            time=command.end_time,
            is_error=command.error is not None or (result is not None and not result.ok),
            extra=extra,
        ),
    )


def _arguments(command: ObservedCommand) -> str:
    spec = command.spec
    shown: Any = spec.shell if spec.WhichOneof("command") == "shell" else list(spec.argv.args)
    arguments: dict[str, Any] = {"command": shown}
    for name in ("cwd", "user"):
        if getattr(spec, name):
            arguments[name] = getattr(spec, name)
    if spec.HasField("timeout"):
        arguments["timeout"] = spec.timeout.seconds + spec.timeout.nanos / 1e9
    if command.background:
        arguments["background"] = True
    text = json.dumps(arguments, ensure_ascii=False)
    if len(text) > _ARGUMENT_BYTES // 4:
        # A command of a megabyte: its begin says what it was.
        whole = shown if isinstance(shown, str) else " ".join(shown)
        arguments |= {"command": whole[: _ARGUMENT_BYTES // 16], "command_characters": len(whole)}
        text = json.dumps(arguments, ensure_ascii=False)
    return text


def _observation(command: ObservedCommand) -> tuple[str, dict[str, Any]]:
    result, error = command.result, command.error
    chunks = command.chunks or ()
    extra: dict[str, Any] = {}
    if result is not None:
        for name, data in () if command.chunks else result.chunks:
            command.saw(name, data)
        chunks = command.chunks
        extra = {"ended": str(result.ended), "seconds": round(result.duration, 6), "output_bytes": result.output_size}
        if result.exit_code >= 0:
            extra["exit_code"] = result.exit_code
        if result.signal:
            extra["signal"] = result.signal
    missing = command.missing + (result.dropped_bytes if result is not None else 0)
    if missing:
        extra["missing_bytes"] = missing
    text = decode_in_order(chunks)
    if command.background and result is None and error is None:
        text = "started"
    if error is not None:
        named = getattr(error, "reason", "") or type(error).__name__
        reason = named if isinstance(error, Exception) else "CANCELLED"
        extra |= {"ended": extra.get("ended") or "unknown", "error": reason, "message": str(error)[:4096]}
    return text, extra
