"""Work that goes on behind its caller, with the client as its owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from orchard._client.runtime import leak

T = TypeVar("T")
_log: Final = logging.getLogger("orchard")


class Background:
    """The tasks of one client that must be carried through even when the caller is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work`; an error that nobody waits for is logged."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("%s failed: %s", task.get_name(), error)

    async def shielded(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, which goes on if the waiter is cancelled."""
        return await asyncio.shield(self.start(name, work))

    async def drain(self, timeout: float) -> None:
        """Wait until everything is done, at most `timeout` seconds, then cancel the rest."""
        loop = asyncio.get_running_loop()
        tasks = {task for task in self._tasks if task.get_loop() is loop and task is not asyncio.current_task()}
        if not tasks:
            return
        _done, pending = await asyncio.wait(tasks, timeout=timeout)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def after_fork(self) -> None:
        """In a forked child: the tasks are the parent's."""
        leak(self._tasks)
        self._tasks = set()
