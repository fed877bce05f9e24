"""Background tasks with an owner: every task is named, and one that dies takes its service down loudly."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Self

from services.common.logs import get_logger

_log = get_logger(__name__)


class TaskGroup:
    """Owns background tasks that should run as long as the service.

    `failed` resolves with the first task that ended by an exception, or that ended at all although `forever`. The
    service's main loop waits for it, turns NOT_SERVING and exits non-zero.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def start(self, name: str, work: Coroutine[object, object, None], *, forever: bool = True) -> asyncio.Task[None]:
        """Run `work` in the background under `name`. With `forever`, ending normally is a failure too."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, forever))
        return task

    def _ended(self, task: asyncio.Task[None], forever: bool) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            error: BaseException | None = (
                RuntimeError(f"background task {task.get_name()} was cancelled") if forever else None
            )
        else:
            error = task.exception()
            if error is None and forever:
                error = RuntimeError(f"background task {task.get_name()} ended")
        if error is None or self._closing:
            return
        if not self.failed.done():
            self.failed.set_result(error)
        _log.error("background task died", task=task.get_name(), exc_info=error)

    async def close(self) -> None:
        """Cancel every task and wait until each has finished."""
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
