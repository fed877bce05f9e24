"""The reader that a caller of StartExec is going to be."""

from __future__ import annotations

import asyncio

from services.exec_agent.execution import Execution
from services.exec_agent.latch import wake


class ExpectedReader:
    """Holds a command up for a reader that is still to come, as one would that follows and has read nothing.

    Without it, what the command writes before that reader is there would be dropped once it is more than is retained.
    Close it when the call ends.

    Args:
        most: bytes of output; with more there is no point in waiting for the end of the command.
    """

    def __init__(self, execution: Execution, most: int) -> None:
        self.offset = 0
        self.lagging = False
        self._execution = execution
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._over = False
        """It has come, or it comes too late or not at all."""
        execution.spool.listeners.add(self)
        self.changed()

    async def wait(self, seconds: float) -> None:
        """Until the command has ended, has written more than `most` or all that is retained, or for so long."""
        if self._is_enough or seconds <= 0:
            return
        waiter = self._waiter = self._loop.create_future()
        timer = self._loop.call_later(seconds, wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def changed(self) -> None:
        """See Listener."""
        pump = self._execution.pump
        if pump is not None and not self._over:
            if pump.followers or self._execution.spool.start > 0:
                self._over = True
            else:
                pump.expected.add(self)
        if self._waiter is not None and self._is_enough:
            wake(self._waiter)

    def close(self, keep_seconds: float) -> None:
        """The call ends; the reader may still come for so long."""
        if keep_seconds > 0:
            self._loop.call_later(keep_seconds, self._give_up)
        else:
            self._give_up()

    @property
    def _is_enough(self) -> bool:
        execution, pump = self._execution, self._execution.pump
        if execution.result is not None or execution.interrupted:
            return True
        return execution.spool.end > self._most or (pump is not None and pump.is_held_up)

    def _give_up(self) -> None:
        self._over = True
        self._execution.spool.listeners.discard(self)
        pump = self._execution.pump
        if pump is not None and self in pump.expected:
            pump.expected.remove(self)
            pump.follower_moved()
