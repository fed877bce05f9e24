"""Collects the appends of many writers into shared transactions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from services.common.errors import InternalError, OrchardError, UnavailableError
from services.common.logs import get_logger
from services.trajectories.store.appends import Append

_log = get_logger(__name__)

_BATCH_APPENDS: Final = 1000
_BATCH_BYTES: Final = 16 << 20
_WAITING_BYTES: Final = 128 << 20
_WORKERS: Final = 2
# Where several writers are at work, the next of them is about to arrive, and a commit costs as much for one as for
# hundreds: wait for them, as PostgreSQL's own commit_delay does. A writer alone is never kept waiting.
_GATHER_SECONDS: Final = 0.003
_GATHERINGS: Final = 4


class Store(Protocol):
    """What the appender needs."""

    async def append(
        self, appends: list[Append], early: Callable[[Mapping[int, int]], None]
    ) -> list[int | OrchardError]:
        """See store.appends.AppendStore."""


@dataclass(slots=True)
class _Waiting:
    append: Append
    size: int
    result: asyncio.Future[int]


class Appender:
    """Appends in batches: while one is being committed, the next gathers."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[_Waiting] = deque()
        self._size = 0
        self._arrived = asyncio.Condition()

    async def append(self, append: Append) -> int:
        """Add steps; returns the index of the next one when they are durable.

        Raises:
            OrchardError: why not.
            UnavailableError: also when more is waiting to be written than the database keeps up with.
        """
        size = sum(len(step.body) for step in append.steps)
        if self._size + size > _WAITING_BYTES:
            raise UnavailableError(
                "more steps wait to be written than the database keeps up with; retry",
                reason="APPEND_BACKLOG",
                retry_seconds=1.0,
            )
        waiting = _Waiting(append, size, asyncio.get_running_loop().create_future())
        async with self._arrived:
            self._size += size
            self._waiting.append(waiting)
            self._arrived.notify()
        return await waiting.result

    @property
    def waiting_bytes(self) -> int:
        """Bytes of steps that wait or are being written."""
        return self._size

    async def run(self) -> None:
        """Write for ever."""
        async with asyncio.TaskGroup() as workers:
            for number in range(_WORKERS):
                workers.create_task(self._work(), name=f"append {number}")

    async def _work(self) -> None:
        alone = True
        while True:
            async with self._arrived:
                await self._arrived.wait_for(lambda: self._waiting)
            if not alone or len(self._waiting) > 1:
                await self._gather()
            batch = self._take()
            alone = len(batch) <= 1
            if not batch:
                continue  # the other worker was quicker
            try:
                for waiting, result in zip(batch, await self._write(batch), strict=True):
                    _settle(waiting.result, result)
            finally:
                self._size -= sum(waiting.size for waiting in batch)
                for waiting in batch:
                    _settle(waiting.result, UnavailableError("the append was interrupted; retry"))

    async def _gather(self) -> None:
        """Wait while more arrive, a few milliseconds at most."""
        for _ in range(_GATHERINGS):
            before = len(self._waiting)
            await asyncio.sleep(_GATHER_SECONDS)
            if len(self._waiting) <= before or len(self._waiting) >= _BATCH_APPENDS:
                return

    async def _write(self, batch: list[_Waiting]) -> list[int | OrchardError]:
        """What became of each. What the database does not take of one writer fails for that one alone, and what one has
        to wait for delays no other's answer.
        """

        def early(added: Mapping[int, int]) -> None:
            for place, next_index in added.items():
                _settle(batch[place].result, next_index)

        try:
            return await self._store.append([waiting.append for waiting in batch], early)
        except OrchardError as error:
            return [error] * len(batch)
        except Exception as error:  # noqa: BLE001 (whatever is wrong with one, the others go on)
            if len(batch) > 1:
                return [result for waiting in batch for result in await self._write([waiting])]
            refused = batch[0].append
            _log.error("steps cannot be written", trajectory_id=refused.trajectory_id, exc_info=error)
            return [InternalError("these steps cannot be written; the service's log says why", reason="APPEND_FAILED")]

    def _take(self) -> list[_Waiting]:
        """The next batch. A writer has one append under way, so the same trajectory twice is two writers: they are told
        apart in the order of their arrival.
        """
        batch: list[_Waiting] = []
        size = 0
        while self._waiting and len(batch) < _BATCH_APPENDS and size < _BATCH_BYTES:
            batch.append(self._waiting.popleft())
            size += batch[-1].size
        return batch


def _settle(future: asyncio.Future[int], result: int | OrchardError) -> None:
    if future.done():
        return  # its caller has gone; the steps are there all the same
    if isinstance(result, OrchardError):
        future.set_exception(result)
    else:
        future.set_result(result)
