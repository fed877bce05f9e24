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
        self._working = asyncio.Lock()

    async def remove(self, folder: str) -> None:
        """Remove one; returns when it is gone.

        Raises:
            RemovalError: it cannot be removed.
        """
        mine = self._pending.setdefault(folder, asyncio.get_running_loop().create_future())
        async with self._working:
            batch, self._pending = self._pending, {}
            if batch:
                await self._remove_all(batch)
        await mine

    async def _remove_all(self, batch: dict[str, asyncio.Future[None]]) -> None:
        try:
            await self._zygote.remove(self._ids, list(batch))
        except (StartError, ZygoteError, ZygoteDiedError) as error:
            for folder, future in batch.items():
                if os.path.exists(folder):  # noqa: PTH110, ASYNC240 (one look)
                    future.set_exception(RemovalError(str(error)))
                else:
                    future.set_result(None)
        else:
            for future in batch.values():
                future.set_result(None)
