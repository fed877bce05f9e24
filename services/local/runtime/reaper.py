"""Reaps every child of the node daemon, also the orphans that it adopts as a subreaper.

Agents are grandchildren of the zygote whose parents end at once. As a zombie an agent would keep its sandbox's init
from finishing.
"""

from __future__ import annotations

import asyncio
import os
import signal

from services.local.runtime import linux


class Reaper:
    """At most one in a process, in its main thread. Nothing else there may wait for children."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._expected: dict[int, asyncio.Future[int]] = {}
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        # Not the loop's add_signal_handler: uvloop keeps this signal to itself. It does wake up for handlers of
        # Python's.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: self._loop.call_soon_threadsafe(self._sweep))
        self._sweep()

    def close(self) -> None:
        """Stop; zombies from now on are left to whoever adopts them."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    async def wait(self, pid: int) -> int:
        """Wait for a child that was started by this process since the last turn of the event loop; returns its exit
        code.
        """
        future = self._expected.setdefault(pid, self._loop.create_future())
        try:
            return await future
        finally:
            self._expected.pop(pid, None)

    def _sweep(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            future = self._expected.get(pid)
            if future is not None and not future.done():
                future.set_result(os.waitstatus_to_exitcode(status))
