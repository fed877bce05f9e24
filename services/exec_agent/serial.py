"""The queue: of the serial commands one runs, and the others wait in the order of their arrival, whichever agent took
them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from services.common.errors import ResourceExhaustedError
from services.exec_agent.backlog import Backlog
from services.exec_agent.execution import Execution
from services.exec_agent.model import Command


class SerialQueue:
    """See the module. It is held up until `go_on`. All methods run on the event loop."""

    def __init__(self, backlog: Backlog, start: Callable[[Execution, Command], None]) -> None:
        """`start` starts a command whose turn it is."""
        self._loop = asyncio.get_running_loop()
        self._backlog = backlog
        self._start = start
        self._waiting: deque[Execution] = deque()
        self._running: Execution | None = None
        self._held_up = True

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def __contains__(self, execution: Execution) -> bool:
        """Whether it waits."""
        return execution in self._waiting

    def put(self, execution: Execution, command: Command) -> None:
        """Start it if it is its turn, or let it wait.

        Raises:
            ResourceExhaustedError: it cannot be noted that it waits; then it does not.
        """
        self._waiting.append(execution)
        self._start_next()
        if not self._waiting or self._waiting[-1] is not execution:
            return
        try:
            self._backlog.add(execution.exec_id, execution.sequence, execution.create_ns, command)
        except ResourceExhaustedError:
            self._waiting.pop()
            raise
        self._wait(execution, command)

    def put_back(self, execution: Execution, command: Command) -> None:
        """It waited under an agent before this one. Before `go_on`, in the order of their arrival."""
        self._waiting.append(execution)
        self._wait(execution, command)

    def go_on(self) -> None:
        """From now on commands are started."""
        self._held_up = False
        self._start_next()

    def hold_up(self) -> None:
        """No command is started any more."""
        self._held_up = True

    def leave(self, execution: Execution) -> None:
        """A serial command, or another, has ended."""
        if self._running is execution:
            self._running = None
        elif execution in self._waiting:
            self._waiting.remove(execution)
        if self._waiting:
            # Not at once: a thousand queued commands that all fail to start would nest a thousand deep.
            self._loop.call_soon(self._start_next)

    def _wait(self, execution: Execution, command: Command) -> None:
        if execution.stdin is not None:
            execution.stdin.log = self._backlog.input_of(execution.exec_id)
        execution.queue(command, max(0, time.time_ns() - execution.create_ns) / 1e9)

    def _start_next(self) -> None:
        """Start the first that waits, if none runs."""
        while self._waiting and self._running is None and not self._held_up:
            execution = self._waiting.popleft()
            if execution.command is not None and execution.result is None:
                self._running = execution
                self._start(execution, execution.command)
