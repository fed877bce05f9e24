"""Work that comes to its end although whoever waits for it leaves: what was paid for must be kept."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def whole(work: Coroutine[Any, Any, T], stopping: asyncio.Event | None = None) -> T:
    """The result of some work, which is not cancelled with its caller: the cancellation is passed on once it has ended.

    Args:
        work: must end by itself.
        stopping: once this is set, work whose caller has left is cancelled after all.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _ended(task, stopping)
        if not task.cancelled():
            task.exception()  # nobody is left to be told
        raise


async def _ended(task: asyncio.Task[T], stopping: asyncio.Event | None) -> None:
    stop = asyncio.ensure_future(stopping.wait()) if stopping else None
    waits: set[asyncio.Future[Any]] = {task} if stop is None else {task, stop}
    try:
        while not task.done():
            # However often the caller is cancelled.
            with suppress(asyncio.CancelledError):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if stop is not None and stop.done():
                task.cancel()
                waits = {task}
    finally:
        if stop is not None:
            stop.cancel()
