"""Use cases of the scheduler: what each call of SandboxService and LeaseService does."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from services.common.errors import (
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from services.common.hub import Hubs
from services.common.logs import get_logger
from services.common.observed import Observed
from services.common.quota import UNLIMITED, Quota
from services.common.states import Reason, State
from services.common.times import now_ms
from services.common.watch_cache import WatchCache
from services.scheduler import refusals
from services.scheduler.records import Incarnation, Record, Terms, beyond_lifetime
from services.scheduler.store import LeaseStore, Name, OverQuotaError

_log = get_logger(__name__)

_WAIT_WAKE_SECONDS: Final = 30.0
_REAPPEAR_SECONDS: Final = 10.0
_LIST_READ_AT_ONCE: Final = 200
_LIST_LOOKED_AT: Final = 5000
_REBUILT_AT_ONCE: Final = 64
_LIST_SPEC_BYTES: Final = 1 << 20  # a message may have 4 MiB, and one spec up to 3


class Runtime(Protocol):
    """What the scheduler needs of a runtime."""

    async def check(self, tenant: str, sandbox_id: str, spec: bytes) -> None:
        """Raise what `create` would, without making anything (for instance NotFoundError for an unknown image)."""

    async def create(self, record: Record) -> str:
        """Make the sandbox of a record and return its uid. Idempotent by tenant, id and request id.

        Raises:
            UnavailableError: the runtime does not answer; try again.
            OrchardError: it never will (unknown image, something that this runtime cannot do).
        """

    async def delete(self, gone: Incarnation, *, force: bool = False) -> None:
        """Remove exactly this incarnation. Idempotent. Returns when it is gone, or is sure to go.

        `force`: one that has been going for too long is forgotten, whatever of it still runs where nobody can reach it.
        """

    async def update(self, kept: Incarnation, expire_ms: int) -> None:
        """Move its deadline, from which a lost lease is rebuilt.

        Raises:
            NotFoundError: it is no more.
        """

    async def is_gone(self, missing: Incarnation) -> bool:
        """Whether one that the watcher has not named for long is no more: asked before its record is ended."""


class TermsOf(Protocol):
    """Reads the scheduler's terms of a serialised spec."""

    def __call__(self, spec: bytes) -> Terms:
        """The terms."""


class Scheduler:
    """Sandboxes of every tenant. Each method acts within the tenant it is given."""

    def __init__(
        self,
        store: LeaseStore,
        runtime: Runtime,
        cache: WatchCache,
        *,
        terms_of: TermsOf,
        queue_limit: int,
        maximum_lifetime_ms: int = 0,
        wake_dispatcher: Callable[[], None],
        delete_soon: Callable[[Incarnation], None],
        is_starting: Callable[[Name], bool],
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._cache = cache
        self._terms_of = terms_of
        self._queue_limit = queue_limit
        self._maximum_lifetime_ms = maximum_lifetime_ms
        self._wake_dispatcher = wake_dispatcher
        self._delete_soon = delete_soon
        self._is_starting = is_starting
        self._changes: Hubs[Name, Name] = Hubs()

    def lifetime_ms(self, quota: Quota) -> int:
        """How long a sandbox of a tenant may live at most; 0: not bounded."""
        bounds = [bound for bound in (quota.maximum_lifetime_ms, self._maximum_lifetime_ms) if bound]
        return min(bounds, default=0)

    async def create(
        self,
        tenant: str,
        sandbox_id: str,
        request_id: str,
        spec: bytes,
        spec_hash: str,
        *,
        expects_secret_env: bool,
        quota: Quota = UNLIMITED,
    ) -> Record:
        """Accept a create; see SandboxService.CreateSandbox."""
        wanted = Record(
            tenant=tenant,
            sandbox_id=sandbox_id or new_sandbox_id(),
            request_id=request_id or f"auto-{secrets.token_hex(12)}",
            spec_hash=spec_hash,
            spec=spec,
            state=State.QUEUED,
            expects_secret_env=expects_secret_env,
            lifetime_ms=self.lifetime_ms(quota),
        )
        await self._runtime.check(tenant, wanted.sandbox_id, spec)
        # A store that was emptied has forgotten this sandbox; the runtime has not.
        name = (tenant, wanted.sandbox_id)
        if not await self._recall(name):
            await self._check_memory(starting=self._is_starting(name) and await self._store.get(name) is None)
        terms = self._terms_of(spec)
        try:
            outcome, found_id, created_ms = await self._store.create(
                wanted, terms, queue_limit=self._queue_limit, quota=quota
            )
        except OverQuotaError as error:
            raise refusals.over_quota(error) from None
        refusal = refusals.of_create(outcome, request_id, found_id, self._queue_limit)
        if refusal is not None:
            raise refusal
        if outcome == "created":
            self._wake_dispatcher()
            return replace(wanted, sandbox_id=found_id, create_ms=created_ms, expire_ms=created_ms + terms.ttl_ms)
        return await self.get(tenant, found_id)

    async def get(self, tenant: str, sandbox_id: str) -> Record:
        """One sandbox.

        Raises:
            NotFoundError: there is none of this id, nor was there within the last 24 h.
            UnavailableError: nobody can say at the moment.
        """
        name = (tenant, sandbox_id)
        starting = self._is_starting(name)
        record = await self._store.get(name)
        if record is None and await self._recall(name):
            record = await self._store.get(name)
        if record is None:
            await self._check_memory(starting=starting)
            raise refusals.not_found(sandbox_id)
        return await self._explained(record)

    async def _explained(self, record: Record) -> Record:
        """A queued record, with what its tenant's queue waits for: one text for all of it, so no record has it."""
        if record.state is not State.QUEUED:
            return record
        return replace(record, message=await self._store.waits_for(record.tenant))

    async def list_page(
        self,
        tenant: str,
        *,
        states: frozenset[State],
        labels: Mapping[str, str],
        labels_of: Callable[[bytes], Mapping[str, str]],
        before: tuple[int, str] | None,
        count: int,
    ) -> tuple[list[Record], tuple[int, str] | None]:
        """At most `count` matching records after the position `before`, newest first, and where to go on from.

        A page ends early, even empty, when it becomes large or took long to find.

        Raises:
            UnavailableError: the store was emptied, and nobody can say what there is.
        """
        await self._recall_all()

        def matches(record: Record) -> bool:
            wanted = record.state in states if states else not record.state.terminal
            return wanted and (not labels or labels.items() <= labels_of(record.spec).items())

        found, after = await self._find(tenant, matches, before, count)
        if any(record.state is State.QUEUED for record in found):
            waits = await self._store.waits_for(tenant)
            found = [replace(one, message=waits) if one.state is State.QUEUED else one for one in found]
        return found, after

    async def _find(
        self, tenant: str, matches: Callable[[Record], bool], before: tuple[int, str] | None, count: int
    ) -> tuple[list[Record], tuple[int, str] | None]:
        found: list[Record] = []
        looked_at = spec_bytes = 0
        while True:
            entries = await self._store.page(tenant, before, _LIST_READ_AT_ONCE)
            records = await self._store.get_many([(tenant, entry_id) for _, entry_id in entries])
            for entry, record in zip(entries, records, strict=True):
                if record is not None and matches(record):
                    spec_bytes += len(record.spec)
                    if found and spec_bytes > _LIST_SPEC_BYTES:
                        return found, before
                    found.append(record)
                before = entry
                looked_at += 1
                if len(found) == count or looked_at == _LIST_LOOKED_AT:
                    return found, before
            if len(entries) < _LIST_READ_AT_ONCE:
                return found, None

    async def wait(
        self, tenant: str, sandbox_id: str, *, until_terminal: bool, stopping: asyncio.Event
    ) -> AsyncIterator[Record]:
        """The present state, then each change, until READY or a terminal state.

        Raises:
            NotFoundError: there is no such sandbox.
            UnavailableError: the server stops; call again.
        """
        name = (tenant, sandbox_id)
        last: Record | None = None
        with self._changes.subscribe(name) as changes:
            while not stopping.is_set():
                record = await self.get(tenant, sandbox_id) if last is None else await self._reread(name, last)
                if last is None or _shown(record) != _shown(last):
                    yield record
                if record.state.terminal or (record.state is State.READY and not until_terminal):
                    return
                last = record
                await changes.next(_WAIT_WAKE_SECONDS)
        raise UnavailableError("the scheduler stops; wait again", reason="SERVER_STOPPING")

    async def _reread(self, name: Name, last: Record) -> Record:
        """The record after a change. One that was lost with the store while it was queued ends as QUEUE_LOST."""
        starting = self._is_starting(name)
        record = await self._store.get(name)
        if record is None and last.state is not State.QUEUED and not starting:
            await self._cache.wait(*name, lambda _seen: True, _REAPPEAR_SECONDS)
        if record is None and await self._recall(name):
            record = await self._store.get(name)
        if record is not None:
            return await self._explained(record)
        await self._check_memory(starting=starting)
        return refusals.lost(last)

    async def update(self, tenant: str, sandbox_id: str, ttl_ms: int) -> Record:
        """Move the end of its time to live."""
        record = await self.get(tenant, sandbox_id)
        if record.state.terminal or record.state is State.DELETING:
            raise refusals.ended(sandbox_id)
        expire_ms = now_ms() + ttl_ms
        if record.lifetime_ms and expire_ms > record.create_ms + record.lifetime_ms:
            raise beyond_lifetime("ttl", record.create_ms + record.lifetime_ms)
        # The runtime first: a lease rebuilt from it must not be shorter than what was promised.
        told = await self._tell_deadline(record, expire_ms)
        outcome = await self._store.update((tenant, sandbox_id), expire_ms)
        if outcome == "ended":
            raise refusals.ended(sandbox_id)
        record = await self.get(tenant, sandbox_id)
        if not told:
            # It may have started in between, with the old deadline.
            await self._tell_deadline(record, expire_ms)
        return record

    async def _tell_deadline(self, record: Record, expire_ms: int) -> bool:
        """Tell the runtime of a new deadline; False if there is no incarnation yet."""
        if not record.uid:
            return False
        try:
            await self._runtime.update(record.incarnation, expire_ms)
        except NotFoundError:
            raise refusals.ended(record.sandbox_id) from None
        return True

    async def delete(self, tenant: str, sandbox_id: str, uid: str) -> Record:
        """Begin to remove a sandbox."""
        name = (tenant, sandbox_id)
        starting = self._is_starting(name)
        outcome, record = await self._store.delete(name, uid, Reason.REQUESTED)
        if record is None and await self._recall(name):
            outcome, record = await self._store.delete(name, uid, Reason.REQUESTED)
        if record is None:
            await self._check_memory(starting=starting)
            raise refusals.not_found(sandbox_id)
        if outcome == "other_uid":
            raise FailedPreconditionError(
                f"sandbox {sandbox_id!r} is another incarnation now", reason="UID_MISMATCH", sandbox_id=sandbox_id
            )
        if outcome == "deleting":
            self._delete_soon(record.incarnation)
        return record

    async def heartbeat(self, tenant: str, sandbox_ids: Sequence[str]) -> list[str]:
        """Renew heartbeat leases; returns the ids that are not alive.

        Raises:
            UnavailableError: nobody can say at the moment whether some are.
        """
        starting = {sandbox_id for sandbox_id in sandbox_ids if self._is_starting((tenant, sandbox_id))}
        missing = await self._store.renew("last_heartbeat_ms", [(tenant, sandbox_id, "") for sandbox_id in sandbox_ids])
        recalled = [(*name, "") for name in missing if await self._recall(name)]
        if len(recalled) < len(missing):
            await self._check_memory(starting=any(name[1] in starting for name in missing))
        # One that the runtime still has need not be alive: it may be about to be deleted.
        dead = set(missing) - {(name_tenant, name_id) for name_tenant, name_id, _uid in recalled}
        dead.update(await self._store.renew("last_heartbeat_ms", recalled) if recalled else [])
        return [name[1] for name in missing if name in dead]

    async def report_activity(self, activities: Sequence[tuple[str, str, str]]) -> None:
        """Renew idle leases of (tenant, id, uid)."""
        await self._store.renew("last_active_ms", activities)

    async def note_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Heed quotas that have changed."""
        await self._store.note_quotas(quotas)

    async def _recall(self, name: Name) -> bool:
        """Rebuild the record of a sandbox that the runtime has and the store has not. Whether there is one now."""
        seen = self._cache.get(*name)
        if seen is None or seen.state in (State.DELETED, State.DELETING):
            return False
        if await self._store.rebuild(seen, self._terms_of(seen.spec), now_ms()):
            _log.info("record rebuilt from the runtime", tenant=name[0], sandbox_id=name[1])
            await self._store.observe(seen)
        return True

    async def _recall_all(self) -> None:
        """Where the store was emptied and the reconciler has not come to it yet: whoever looks must not miss any."""
        if not await self._store.lost_everything():
            return
        await self._check_memory(starting=False)
        await self.rebuild_all()

    async def _check_memory(self, *, starting: bool) -> None:
        """Raise UNAVAILABLE if what has no record may exist: the runtime was making it when the store was emptied, or
        the runtime cannot be asked.
        """
        if starting or (not self._cache.live and await self._store.lost_everything()):
            raise UnavailableError(
                "the lease store was emptied and the runtime's sandboxes are not known yet; retry",
                reason="LEASE_STORE_REBUILDING",
            )

    async def rebuild(self, seen: Observed) -> str:
        """Make sure that a sandbox of the runtime has a record that says what was seen; see LeaseStore.observe."""
        outcome = await self._store.observe(seen)
        if outcome == "missing" and seen.state not in (State.DELETED, State.DELETING):
            await self._store.rebuild(seen, self._terms_of(seen.spec), now_ms())
            outcome = await self._store.observe(seen)
        return outcome

    async def rebuild_all(self) -> int:
        """Make sure of the record of every sandbox that the runtime has; returns how many those are."""
        living = list(self._cache.living())
        for start in range(0, len(living), _REBUILT_AT_ONCE):
            await asyncio.gather(*(self.rebuild(seen) for seen in living[start : start + _REBUILT_AT_ONCE]))
        return len(living)

    def notify(self, name: Name) -> None:
        """A record changed."""
        self._changes.publish(name, name)

    def notify_all(self) -> None:
        """Any record may have changed, or the server stops."""
        self._changes.wake()


def _shown(record: Record) -> tuple[State, Reason, str]:
    return record.state, record.reason, record.message


def new_sandbox_id() -> str:
    """A random id of the form that sandbox ids have."""
    return f"sb-{secrets.token_hex(8)}"
