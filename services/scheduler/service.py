"""Use cases of the scheduler: what each call of SandboxService and LeaseService does."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from services.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.hub import Hub
from services.common.logs import get_logger
from services.common.observed import Observed
from services.common.states import Reason, State
from services.common.times import now_ms
from services.common.watch_cache import WatchCache
from services.scheduler.records import Incarnation, Record, Terms
from services.scheduler.store import LeaseStore, Name

_log = get_logger(__name__)

_WAIT_WAKE_SECONDS: Final = 30.0
_REAPPEAR_SECONDS: Final = 10.0
_LIST_READ_AT_ONCE: Final = 200
_LIST_LOOKED_AT: Final = 5000
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
        wake_dispatcher: Callable[[], None],
        delete_soon: Callable[[Incarnation], None],
        is_starting: Callable[[Name], bool],
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._cache = cache
        self._terms_of = terms_of
        self._queue_limit = queue_limit
        self._wake_dispatcher = wake_dispatcher
        self._delete_soon = delete_soon
        self._is_starting = is_starting
        self._changes: dict[Name, Hub[Name, Name]] = {}

    async def create(
        self, tenant: str, sandbox_id: str, request_id: str, spec: bytes, spec_hash: str, *, expects_secret_env: bool
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
        )
        await self._runtime.check(tenant, wanted.sandbox_id, spec)
        # A store that was emptied has forgotten this sandbox; the runtime has not.
        name = (tenant, wanted.sandbox_id)
        if not await self._recall(name):
            await self._check_memory(starting=self._is_starting(name) and await self._store.get(name) is None)
        terms = self._terms_of(spec)
        outcome, found_id, created_ms = await self._store.create(wanted, terms, queue_limit=self._queue_limit)
        if outcome == "request_conflict":
            raise AlreadyExistsError(
                f"request id {request_id!r} was used for sandbox {found_id!r} with another spec; use a new request id",
                reason="REQUEST_ID_REUSED",
                request_id=request_id,
                sandbox_id=found_id,
            )
        if outcome == "request_ended":
            raise AlreadyExistsError(
                f"request id {request_id!r} was used for sandbox {found_id!r}, which has ended, and another request "
                "has that id now; use a new request id",
                reason="REQUEST_ENDED",
                request_id=request_id,
                sandbox_id=found_id,
            )
        if outcome == "taken":
            raise AlreadyExistsError(
                f"sandbox {found_id!r} exists; choose another id or delete it first",
                reason="SANDBOX_EXISTS",
                sandbox_id=found_id,
            )
        if outcome == "queue_full":
            raise ResourceExhaustedError(
                f"{self._queue_limit} creates of this tenant are queued already; wait for some to start",
                reason="QUEUE_FULL",
                limit=self._queue_limit,
            )
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
            raise not_found(sandbox_id)
        return record

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
        """
        found: list[Record] = []
        looked_at = spec_bytes = 0
        while True:
            entries = await self._store.page(tenant, before, _LIST_READ_AT_ONCE)
            for entry, record in zip(
                entries, await self._store.get_many([(tenant, entry_id) for _, entry_id in entries]), strict=True
            ):
                matches = (
                    record is not None
                    and (record.state in states if states else not record.state.terminal)
                    and (not labels or labels.items() <= labels_of(record.spec).items())
                )
                if record is not None and matches:
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
        hub = self._changes.setdefault(name, Hub())
        last: Record | None = None
        try:
            with hub.subscribe() as changes:
                while not stopping.is_set():
                    record = await self.get(tenant, sandbox_id) if last is None else await self._reread(name, last)
                    if last is None or _shown(record) != _shown(last):
                        yield record
                    if record.state.terminal or (record.state is State.READY and not until_terminal):
                        return
                    last = record
                    await changes.next(_WAIT_WAKE_SECONDS)
        finally:
            if not hub.subscribed:
                self._changes.pop(name, None)
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
            return record
        await self._check_memory(starting=starting)
        return _lost(last)

    async def update(self, tenant: str, sandbox_id: str, ttl_ms: int) -> Record:
        """Move the end of its time to live."""
        record = await self.get(tenant, sandbox_id)
        if record.state.terminal or record.state is State.DELETING:
            raise _ended(sandbox_id)
        expire_ms = now_ms() + ttl_ms
        # The runtime first: a lease rebuilt from it must not be shorter than what was promised.
        told = await self._tell_deadline(record, expire_ms)
        outcome = await self._store.update((tenant, sandbox_id), expire_ms)
        if outcome == "ended":
            raise _ended(sandbox_id)
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
            raise _ended(record.sandbox_id) from None
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
            raise not_found(sandbox_id)
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

    async def _recall(self, name: Name) -> bool:
        """Rebuild the record of a sandbox that the runtime has and the store has not. Whether there is one now."""
        seen = self._cache.get(*name)
        if seen is None or seen.state in (State.DELETED, State.DELETING):
            return False
        if await self._store.rebuild(seen, self._terms_of(seen.spec), now_ms()):
            _log.info("record rebuilt from the runtime", tenant=name[0], sandbox_id=name[1])
            await self._store.observe(seen)
        return True

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

    def notify(self, name: Name) -> None:
        """A record changed."""
        hub = self._changes.get(name)
        if hub is not None:
            hub.publish(name, name)

    def notify_all(self) -> None:
        """Any record may have changed, or the server stops."""
        for hub in list(self._changes.values()):
            hub.wake()


def _lost(last: Record) -> Record:
    """The end of one that neither the store nor the runtime has any more."""
    if last.state is State.DELETING:
        return replace(last, state=State.DELETED, message="", end_ms=now_ms())
    if last.uid:
        reason, message = Reason.DELETED_EXTERNALLY, "it was removed without the platform being asked"
    else:
        reason = Reason.QUEUE_LOST
        message = "the create was lost with the lease store; repeat it under the same request id"
    return replace(last, state=State.FAILED, reason=reason, message=message, end_ms=now_ms())


def _shown(record: Record) -> tuple[State, Reason, str]:
    return record.state, record.reason, record.message


def _ended(sandbox_id: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"sandbox {sandbox_id!r} has ended", reason="SANDBOX_ENDED", sandbox_id=sandbox_id)


def new_sandbox_id() -> str:
    """A random id of the form that sandbox ids have."""
    return f"sb-{secrets.token_hex(8)}"


def not_found(sandbox_id: str) -> NotFoundError:
    """There is no sandbox of this id in the caller's tenant."""
    return NotFoundError(f"there is no sandbox {sandbox_id!r}", reason="SANDBOX_NOT_FOUND", sandbox_id=sandbox_id)
