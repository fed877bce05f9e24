"""Work that a thread or the engine carries out, whether or not somebody still waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

_PATIENCE_SECONDS: Final = 20.0


async def carried_out(work: Coroutine[Any, Any, T]) -> T:
    """Its result. Whoever is cancelled here waits for its end first, for some seconds: what follows finds it done."""
    doing = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing], timeout=_PATIENCE_SECONDS)
        if not doing.done():
            doing.cancel()
        elif not doing.cancelled():
            doing.exception()  # seen: what was given up may fail
        raise


def give_up(task: asyncio.Task[Any]) -> None:
    """Cancel a task, once: a second time would end its wait for what is carried out."""
    if not task.cancelling():
        task.cancel()
