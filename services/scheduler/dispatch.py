"""Takes creates from the queue and gives them to the runtime, and carries out deletes. A bounded number at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from services.common.backoff import Backoff
from services.common.errors import NotFoundError, OrchardError, ResourceExhaustedError, UnavailableError
from services.common.logs import get_logger
from services.common.observed import Observed
from services.common.states import Reason, State
from services.scheduler.records import Incarnation, Record
from services.scheduler.service import Runtime
from services.scheduler.store import LeaseStore, Name

_log = get_logger(__name__)

_IDLE_SECONDS: Final = 1.0  # creates of another scheduler, and claims that ran out
_RETRY_MS: Final = 500
_PUT_OFF_SECONDS: Final = 5.0
_DELETES_KEPT: Final = 100_000


class Dispatcher:
    """Starts and deletes sandboxes."""

    def __init__(self, store: LeaseStore, runtime: Runtime, *, claim_seconds: float, starts_in_flight: int) -> None:
        self._store = store
        self._runtime = runtime
        self._claim_ms = int(claim_seconds * 1000)
        self._starts_in_flight = starts_in_flight
        self._work = asyncio.Event()
        self._deletes: asyncio.Queue[tuple[Incarnation, bool]] = asyncio.Queue(_DELETES_KEPT)
        self._deleting: set[str] = set()
        self._starting: Counter[Name] = Counter()

    def attach(self, rebuild: Callable[[Observed], Awaitable[object]]) -> None:
        """What makes the record of a sandbox anew that was lost with the store while the runtime made it."""
        self._rebuild = rebuild

    @property
    def starting(self) -> int:
        """How many creates the runtime is making."""
        return self._starting.total()

    def is_starting(self, name: Name) -> bool:
        """Whether the runtime is making this sandbox, whatever the store says of it."""
        return name in self._starting

    def wake(self) -> None:
        """There is a create in the queue."""
        self._work.set()

    def delete_soon(self, gone: Incarnation, *, force: bool = False) -> None:
        """Remove an incarnation. What does not fit or is lost, the reconciler finds again."""
        if gone.uid and gone.uid not in self._deleting and not self._deletes.full():
            self._deleting.add(gone.uid)
            self._deletes.put_nowait((gone, force))

    async def run_starts(self) -> None:
        """Take creates for ever and start them, a bounded number at once."""
        backoff = Backoff(0.1, 2.0)
        slots = asyncio.Semaphore(self._starts_in_flight)
        async with asyncio.TaskGroup() as starts:
            while True:
                free = await _acquire_all(slots)
                # Cleared before looking: a create that arrives in between sets it again.
                self._work.clear()
                try:
                    taken = await self._store.take(self._claim_ms, free)
                    backoff.reset()
                except UnavailableError:
                    _release(slots, free)
                    await asyncio.sleep(backoff.next())
                    continue
                records = taken if isinstance(taken, list) else []
                for record in records:
                    starts.create_task(self._start_within(slots, record), name=f"start {record.sandbox_id}")
                _release(slots, free - len(records))
                if not isinstance(taken, list):
                    await self._idle(min(taken, _IDLE_SECONDS))

    async def _start_within(self, slots: asyncio.Semaphore, record: Record) -> None:
        name = (record.tenant, record.sandbox_id)
        self._starting[name] += 1
        try:
            await self._start(record)
        except UnavailableError as error:
            _log.warning("a start was put off", sandbox_id=record.sandbox_id, why=error.message)
            # The slot stays taken for a moment, so that a runtime that is away is not asked in a tight loop.
            await asyncio.sleep(_RETRY_MS / 1000)
        finally:
            self._starting -= Counter([name])
            slots.release()

    async def _idle(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._work.wait()
        except TimeoutError:
            return

    async def _start(self, record: Record) -> None:
        name = (record.tenant, record.sandbox_id)
        try:
            uid = await self._runtime.create(record)
        except UnavailableError as error:
            await self._store.release(name, record.request_id, _RETRY_MS, error.message)
            raise
        except OrchardError as error:
            await self._store.finish(name, record.request_id, State.FAILED, _reason_of(error), error.message)
            return
        made = Incarnation(*name, uid)
        outcome, expire_ms = await self._store.started(name, record.request_id, uid, create_ms=record.create_ms)
        if outcome == "unwanted":
            # It was deleted, or its record replaced, while it was being made.
            self.delete_soon(made)
        elif outcome == "missing":
            await self._rebuild(_made(record, uid))
        elif outcome == "started" and expire_ms != record.expire_ms:
            # Its life was made longer or shorter while it was being made, when the runtime could not be told.
            await self._update(made, expire_ms)

    async def _update(self, made: Incarnation, expire_ms: int) -> None:
        try:
            await self._runtime.update(made, expire_ms)
        except OrchardError as error:
            # It runs and its lease is right: only a lease rebuilt from the runtime would not be.
            _log.warning("the runtime has an old deadline", sandbox_id=made.sandbox_id, why=error.message)

    async def run_deletes(self) -> None:
        """One of several workers: delete for ever."""
        while True:
            gone, force = await self._deletes.get()
            try:
                # The watcher sees it go, and its record is ended then: one writer, one order.
                await self._runtime.delete(gone, force=force)
            except UnavailableError as error:
                _log.warning("a delete was put off", sandbox_id=gone.sandbox_id, why=error.message)
                # Here too, and not by its record alone: a store that is emptied meanwhile forgets what was asked for.
                asyncio.get_running_loop().call_later(_PUT_OFF_SECONDS, self.delete_soon, gone)
            except OrchardError as error:
                _log.error("a delete failed", sandbox_id=gone.sandbox_id, why=error.message)
            finally:
                self._deleting.discard(gone.uid)


async def _acquire_all(slots: asyncio.Semaphore) -> int:
    """Wait for a slot and take every free one; returns how many."""
    await slots.acquire()
    taken = 1
    while not slots.locked():
        await slots.acquire()
        taken += 1
    return taken


def _release(slots: asyncio.Semaphore, count: int) -> None:
    for _ in range(count):
        slots.release()


def _reason_of(error: OrchardError) -> Reason:
    """Why a start that can never succeed failed."""
    if isinstance(error, NotFoundError):
        return Reason.IMAGE_PULL
    return Reason.QUOTA if isinstance(error, ResourceExhaustedError) else Reason.UNSCHEDULABLE


def _made(record: Record, uid: str) -> Observed:
    """What the watcher is about to say of a sandbox that was just made."""
    return Observed(
        record.tenant,
        record.sandbox_id,
        uid,
        0,
        State.STARTING,
        create_ms=record.create_ms,
        expire_ms=record.expire_ms,
        request_id=record.request_id,
        spec_hash=record.spec_hash,
        spec=record.spec,
    )
