"""Removes what sandboxes left with ids that an ordinary user only has inside of a user namespace."""

from __future__ import annotations

import asyncio
import os

from services.local.runtime.plan import Ids
from services.local.runtime.removal import RemovalError
from services.local.runtime.steps import StartError
from services.local.runtime.zygote_client import Zygote, ZygoteDiedError, ZygoteError


class MappedRemovals:
    """Removes folders through the zygote: those that come while one removal is at work make the next, all together."""

    def __init__(self, ids: Ids, zygote: Zygote) -> None:
        self._ids = ids
        self._zygote = zygote
        self._pending: dict[str, asyncio.Future[None]] = {}
        self._working: asyncio.Task[None] | None = None

    async def remove(self, folder: str) -> None:
        """Remove one; returns when it is gone.

        Raises:
            RemovalError: it cannot be removed.
        """
        mine = self._pending.setdefault(folder, asyncio.get_running_loop().create_future())
        if self._working is None:
            # Of nobody who waits: one that gives up takes no other with it.
            self._working = asyncio.get_running_loop().create_task(self._work(), name="remove folders")
        await asyncio.shield(mine)

    async def _work(self) -> None:
        batch: dict[str, asyncio.Future[None]] = {}
        try:
            while self._pending:
                batch, self._pending = self._pending, {}
                await self._remove_all(batch)
        finally:
            self._working = None
            for future in (*batch.values(), *self._pending.values()):
                if not future.done():  # only where this task was cancelled, or there is a fault of ours
                    future.cancel()
            self._pending.clear()

    async def _remove_all(self, batch: dict[str, asyncio.Future[None]]) -> None:
        error: Exception | None = None
        try:
            await self._zygote.remove(self._ids, list(batch))
        except (StartError, ZygoteError, ZygoteDiedError, OSError) as raised:
            error = raised
        for folder, future in batch.items():
            if error is not None and os.path.exists(folder):  # noqa: PTH110, ASYNC240 (one look)
                future.set_exception(RemovalError(str(error)))
                future.exception()  # whoever wanted it may have given up
            else:
                future.set_result(None)
