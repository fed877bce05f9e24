"""The scheduler's parts around a real store, with a runtime and a watcher that do as they are told."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from services.common.health import Health
from services.common.observed import Observed
from services.common.watch_cache import WatchCache
from services.scheduler.dispatch import Dispatcher
from services.scheduler.reconcile import Reconciler
from services.scheduler.records import Incarnation, Record, Terms
from services.scheduler.service import Scheduler
from services.scheduler.store import LeaseStore
from tests.integration.scheduler.records import DAY
from tests.support.background import at_work


class ScriptedCache(WatchCache):
    """Told by the test instead of by a stream."""

    def __init__(self, saw: Callable[[Observed], None]) -> None:
        super().__init__("unix:/nonexistent", Health(), include_spec=True, on_change=saw)
        self.live = True

    def tell(self, seen: Observed) -> None:
        self._apply(seen)


class ScriptedRuntime:
    """Makes sandboxes "u-<id>" and notes what it is asked."""

    def __init__(self) -> None:
        self.creating: Callable[[Record], Awaitable[None]] | None = None
        self.deleting: Callable[[str], Awaitable[None]] | None = None
        self.updating: Callable[[str], Awaitable[None]] | None = None
        self.created: asyncio.Queue[str] = asyncio.Queue()
        self.deleted: asyncio.Queue[str] = asyncio.Queue()
        self.forced: asyncio.Queue[str] = asyncio.Queue()
        self.there: set[str] = set()
        self.deadlines: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def check(self, tenant: str, sandbox_id: str, spec: bytes) -> None:
        """Takes everything."""

    async def create(self, record: Record) -> str:
        if self.creating is not None:
            await self.creating(record)
        self.created.put_nowait(record.sandbox_id)
        return f"u-{record.sandbox_id}"

    async def delete(self, gone: Incarnation, *, force: bool = False) -> None:
        (self.forced if force else self.deleted).put_nowait(gone.uid)
        if self.deleting is not None:
            await self.deleting(gone.uid)

    async def update(self, kept: Incarnation, expire_ms: int) -> None:
        if self.updating is not None:
            await self.updating(kept.uid)
        self.deadlines.put_nowait((kept.uid, expire_ms))

    async def is_gone(self, missing: Incarnation) -> bool:
        return missing.uid not in self.there


@dataclass(frozen=True)
class Pieces:
    store: LeaseStore
    runtime: ScriptedRuntime
    cache: ScriptedCache
    dispatcher: Dispatcher
    reconciler: Reconciler
    scheduler: Scheduler

    async def create(self, sandbox_id: str, request_id: str = "", spec: bytes = b"spec") -> Record:
        return await self.scheduler.create(
            "t", sandbox_id, request_id or f"r-{sandbox_id}", spec, "h", expects_secret_env=False
        )

    def dispatching(self) -> AbstractAsyncContextManager[None]:
        """With the dispatcher at work."""
        return at_work(self.dispatcher.run_starts(), self.dispatcher.run_deletes())

    def reconciling(self) -> AbstractAsyncContextManager[None]:
        """With the reconciler writing what it sees and telling of changes."""
        return at_work(self.reconciler.run_writes(), self.reconciler.run_changes())


def assemble(store: LeaseStore, terms: Terms = DAY, *, stuck_seconds: float = math.inf) -> Pieces:
    """As the composition root does."""
    runtime = ScriptedRuntime()
    dispatcher = Dispatcher(store, runtime, claim_seconds=30, starts_in_flight=4)
    reconciler = Reconciler(store, runtime, dispatcher, Health(), grace_seconds=20, stuck_seconds=stuck_seconds)
    cache = ScriptedCache(reconciler.saw)
    scheduler = Scheduler(
        store,
        runtime,
        cache,
        terms_of=lambda spec: terms,
        queue_limit=10_000,
        wake_dispatcher=dispatcher.wake,
        delete_soon=dispatcher.delete_soon,
        is_starting=dispatcher.is_starting,
    )
    dispatcher.attach(scheduler.rebuild)
    reconciler.attach(cache, scheduler)
    return Pieces(store, runtime, cache, dispatcher, reconciler, scheduler)
