"""Keeps records and sandboxes in step.

Writes what the watcher sees, ends leases, rebuilds what Redis lost, finishes what got stuck.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from contextlib import suppress
from typing import Final, NamedTuple

from services.common.errors import UnavailableError
from services.common.health import Health
from services.common.hub import Hub
from services.common.logs import get_logger
from services.common.observed import Observed
from services.common.states import Reason, State
from services.common.watch_cache import WatchCache, clock_ms
from services.scheduler.dispatch import Dispatcher
from services.scheduler.records import Incarnation, Record
from services.scheduler.service import Runtime, Scheduler
from services.scheduler.store import LeaseStore

_log = get_logger(__name__)

STORE_DEPENDENCY: Final = "lease store"
_REAP_SECONDS: Final = 0.5
_RECONCILE_SECONDS: Final = 2.0
_ELECTED_MS: Final = 6000
_AT_ONCE: Final = 500
_WRITES_AT_ONCE: Final = 64


class _Absence(NamedTuple):
    """Since when the sandbox of a record is missing.

    Attributes:
        create: the request id of the create that it is of, as its id may be another's by now; None of one in the queue.
    """

    create: str | None
    since_ms: int


class Reconciler:
    """The scheduler's background work."""

    def __init__(
        self,
        store: LeaseStore,
        runtime: Runtime,
        dispatcher: Dispatcher,
        health: Health,
        *,
        grace_seconds: float,
        stuck_seconds: float = math.inf,
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._dispatcher = dispatcher
        self._health = health
        self._grace_ms = int(grace_seconds * 1000)
        self._me = secrets.token_hex(8)
        self._stuck_ms = stuck_seconds * 1000
        self._absences: dict[tuple[str, str], _Absence] = {}
        self._going_since: dict[str, int] = {}
        self._strangers: dict[tuple[str, str], str] = {}
        """Uids of living sandboxes whose id has the record of another."""
        self._seen: Hub[str, Observed] = Hub()
        self._backlog = self._seen.subscribe()
        self._synced = asyncio.Event()
        self.queue_lengths: dict[str, int] = {}

    def attach(self, cache: WatchCache, scheduler: Scheduler) -> None:
        """The cache, which calls `saw`, and the use cases; both need this object first."""
        self._cache = cache
        self._scheduler = scheduler

    def saw(self, seen: Observed) -> None:
        """The watcher told of a change; the newest of each sandbox is kept until it is written.

        Only what changes a record: that a sandbox starts or is being removed, the scheduler knows from having asked for
        it, and if it did not ask, what follows says so. What holds a start up it cannot know.
        """
        says_why = seen.state is State.STARTING and (seen.message or seen.reason)
        if says_why or seen.state in (State.READY, State.FAILED, State.DELETED):
            self._seen.publish(seen.uid, seen)

    def synced(self) -> None:
        """The watcher has told everything: creates may be waiting for the round that comes of it."""
        self._synced.set()

    def queue_counts(self) -> dict[str, int]:
        """Queued creates by tenant, as of the last round, and of "all tenants", which also tells of an empty queue."""
        return {"all tenants": sum(self.queue_lengths.values()), **self.queue_lengths}

    async def run_writes(self) -> None:
        """Write what the watcher tells, for ever."""
        while True:
            changes = await self._backlog.next(_RECONCILE_SECONDS)
            for start in range(0, len(changes), _WRITES_AT_ONCE):
                # Each is of another sandbox.
                await asyncio.gather(*(self._write(seen) for seen in changes[start : start + _WRITES_AT_ONCE]))

    async def _write(self, seen: Observed) -> None:
        while True:
            try:
                outcome = await self._scheduler.rebuild(seen)
            except UnavailableError:
                # Redis is away: this event waits, newer ones of other sandboxes gather behind it, one each.
                await asyncio.sleep(_REAP_SECONDS)
                continue
            if outcome == "other":
                self._strangers[seen.tenant, seen.sandbox_id] = seen.uid
            # Its record has ended, now or earlier: what the runtime still has of it nobody else would remove.
            over = seen.state is State.FAILED or outcome == "ended"
            if over and seen.state not in (State.DELETING, State.DELETED):
                self._dispatcher.delete_soon(Incarnation(seen.tenant, seen.sandbox_id, seen.uid))
            return

    async def run_changes(self) -> None:
        """Wake waiters when a record changes, for ever."""
        while True:
            try:
                async for name in self._store.changes(self._connected):
                    if name[1]:
                        self._scheduler.notify(name)
                    else:
                        self._dispatcher.wake()
            except UnavailableError:
                await asyncio.sleep(_REAP_SECONDS)

    def _connected(self) -> None:
        """No change is missed from now on. A store that was away may have come back without its last moments: what the
        watcher told of sandboxes that it will not tell again is written again.
        """
        self._scheduler.notify_all()
        for seen in self._cache.living():
            self.saw(seen)

    async def run_reaper(self) -> None:
        """End leases that ran out, for ever."""
        while True:
            try:
                for name in await self._store.expire(_AT_ONCE):
                    record = await self._store.get(name)
                    if record is not None:
                        self._dispatcher.delete_soon(record.incarnation)
                await self._health.well(STORE_DEPENDENCY)
            except UnavailableError as error:
                await self._health.unwell(STORE_DEPENDENCY, error.message, detail=error.cause)
            await asyncio.sleep(_REAP_SECONDS)

    async def run_rounds(self) -> None:
        """Reconcile for ever; of several schedulers one does."""
        while True:
            try:
                if self._cache.live and await self._store.elect(self._me, _ELECTED_MS):
                    await self._round(self._cache)
                else:
                    # What was missing may only not have been told, or have come back unnoticed: it is missed anew.
                    self._absences = {}
                    self._going_since = {}
                self.queue_lengths = await self._store.queue_lengths()
            except UnavailableError as error:
                _log.warning("a round of reconciling was skipped", why=error.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(_RECONCILE_SECONDS):
                    await self._synced.wait()
            self._synced.clear()

    async def _round(self, cache: WatchCache) -> None:
        if await self._store.lost_everything():
            sandboxes = await self._scheduler.rebuild_all()
            await self._store.mark_rebuilt()
            _log.info("lease store was empty; records rebuilt from the runtime", sandboxes=sandboxes)
            self._scheduler.notify_all()
            self._dispatcher.wake()
        names = await self._store.living()
        recorded = set(names)
        for seen in cache.living():
            if seen.state is State.FAILED or (seen.tenant, seen.sandbox_id) not in recorded:
                await self._write(seen)
        self._push_stuck(cache)
        self._strangers = {name: uid for name, uid in self._strangers.items() if name in recorded}
        missing = [name for name in names if not self._is_there(cache.get(*name), name)]
        self._absences = {name: self._absences[name] for name in missing if name in self._absences}
        # Not every round reads the records of all that wait in the queue or for their sandbox: they can be thousands.
        due = [name for name in missing if self._is_over(self._absences.get(name), cache.heard_ms)]
        for start in range(0, len(due), _AT_ONCE):
            for record in await self._store.get_many(due[start : start + _AT_ONCE]):
                if record is not None:
                    await self._mend(record, cache.heard_ms)
        while await self._store.sweep(_AT_ONCE) == _AT_ONCE:
            pass

    def _is_there(self, seen: Observed | None, name: tuple[str, str]) -> bool:
        """Whether a record's sandbox is. One of another create has its id where the store lost its last moments."""
        return seen is not None and seen.state is not State.DELETED and self._strangers.get(name) != seen.uid

    def _push_stuck(self, cache: WatchCache) -> None:
        """Have the runtime forget what has been going for too long, as where its node is lost."""
        now, going = clock_ms(), {}
        for seen in cache.living():
            if seen.state is State.DELETING:
                since = going[seen.uid] = self._going_since.get(seen.uid, now)
                if now - since >= self._stuck_ms:
                    _log.warning(
                        "a delete is stuck and is forced; its node may still run it",
                        tenant=seen.tenant,
                        sandbox_id=seen.sandbox_id,
                        uid=seen.uid,
                        seconds=(now - since) // 1000,
                    )
                    self._dispatcher.delete_soon(Incarnation(seen.tenant, seen.sandbox_id, seen.uid), force=True)
        self._going_since = going

    def _is_over(self, absence: _Absence | None, heard_ms: int) -> bool:
        """Whether the grace of a sandbox that is missing has not begun, or is over."""
        return absence is None or heard_ms - absence.since_ms >= self._grace_ms

    async def _mend(self, record: Record, heard_ms: int) -> None:
        """End a record whose sandbox is gone.

        A sandbox counts as gone when the watcher, still talking after the whole grace, has not named it: one that is
        behind or stalled, or a runtime that is busy, must not look like one that lost it. Then the runtime is asked.
        """
        name = (record.tenant, record.sandbox_id)
        create = None if record.state is State.QUEUED else record.request_id
        absence = self._absences.get(name)
        if absence is None or absence.create != create or create is None:
            absence = self._absences[name] = _Absence(create, clock_ms())
        if create is None or not self._is_over(absence, heard_ms):
            return
        if record.uid and not await self._runtime.is_gone(record.incarnation):
            _log.warning("the watcher does not name a sandbox that is there", sandbox_id=record.sandbox_id)
            return
        if record.state is State.DELETING:
            await self._finish(record, State.DELETED, record.reason, "")
        elif record.uid:
            message = "it was removed without the platform being asked"
            await self._finish(record, State.FAILED, Reason.DELETED_EXTERNALLY, message)

    async def _finish(self, record: Record, state: State, reason: Reason, message: str) -> None:
        _log.info("record ended by reconciling", sandbox_id=record.sandbox_id, state=state.name, reason=reason.name)
        await self._store.finish((record.tenant, record.sandbox_id), record.request_id, state, reason, message)
