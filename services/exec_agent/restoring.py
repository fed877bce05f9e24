"""Commands to the journal's words, and back after an agent was restarted."""

from __future__ import annotations

import asyncio
import time

from services.exec_agent.execution import Execution
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


def command_of(past: Past) -> Command | None:
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
