"""Commands to the journal's words, and back after an agent was restarted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable

from services.exec_agent.backlog import Waiting
from services.exec_agent.execution import Execution
from services.exec_agent.latch import wake
from services.exec_agent.model import Command, State
from services.exec_agent.records import Past


def past_of(execution: Execution, *, with_output: bool = False) -> Past:
    """What the journal is to say of a command. `with_output`: what it wrote, too."""
    command = execution.command
    past = Past(
        execution.exec_id,
        execution.sequence,
        execution.create_ns,
        "" if command is None else command.spec_hash,
        "" if command is None else command.display(),
        execution.journalled,
        execution.pid,
        execution.start_ns,
        execution.result,
        execution.start_error,
        end=execution.spool.end,
    )
    if with_output:
        past.start, past.output = execution.spool.noted()
    return past


def in_order(pasts: Iterable[Past], waiting: Iterable[Waiting]) -> list[tuple[str, int, Command | None]]:
    """Id, sequence and command of all that are known, in the order of their arrival."""
    found = [(past.exec_id, past.sequence, _command_of(past)) for past in pasts]
    found += [(one.exec_id, one.sequence, one.command) for one in waiting if one.command is not None]
    return sorted(found, key=lambda one: one[1])


def _command_of(past: Past) -> Command | None:
    """As much of a command as is needed once it has started."""
    if not past.spec_hash:
        return None
    return Command(
        spec_hash=past.spec_hash,
        shell=past.display,
        env={},
        timeout=None,
        queue_timeout=None,
        retained_limit=0,
        kill_grace=0.0,
    )


def restore(execution: Execution, past: Past) -> None:
    """Make a command what the journal says of it. One whose end it does not know is still to be ended."""
    execution.create_ns, execution.pid, execution.start_ns = past.create_ns, past.pid, past.start_ns
    execution.start_error, execution.result, execution.journalled = past.error, past.result, past.begun
    execution.spool.restore(past.start, past.output, past.end)
    if past.result is None:
        return
    execution.state = State.ENDED
    age = max(0, time.time_ns() - past.result.end_ns) / 1e9
    execution.end_monotonic = asyncio.get_running_loop().time() - age
    execution.spool.finish()
    execution.begun.set()
    execution.done.set()


def restore_waiting(execution: Execution, waiting: Waiting) -> None:
    """Make a command that was not begun what its file says of it."""
    execution.create_ns = waiting.create_ns
    if execution.stdin is not None:
        execution.stdin.restore(waiting.stdin, ended=waiting.stdin_ended)


async def gone(pids: Iterable[int], seconds: float) -> None:
    """Wait until processes that are no children of ours are gone, for so long at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for pid in pids:
                await _gone(pid)


async def _gone(pid: int) -> None:
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it is gone, or this kernel does not tell
        return
    over: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(descriptor, wake, over)
        await over
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
