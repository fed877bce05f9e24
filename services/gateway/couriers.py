"""Background work: secret environments to agents, use of sandboxes to the scheduler and to the usage table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final, Protocol

import grpc
import grpc.aio

from services.common.backoff import Backoff
from services.common.errors import ResourceExhaustedError, UnavailableError
from services.common.hub import Hub
from services.common.logs import get_logger
from services.common.observed import Observed
from services.common.states import State
from services.common.tasks import TaskGroup
from services.common.tokens import Principal
from services.common.watch_cache import WatchCache
from services.gateway.agents_client import Agent, Agents
from services.gateway.store import GatewayStore, SandboxUse, utc_now

_log = get_logger(__name__)

_SECRETS_HELD: Final = 10_000
_LOOK_SECONDS: Final = 60.0  # how often the scheduler is asked about a sandbox that stays in the queue
_FLUSH_SECONDS: Final = 1.0
_ACTIVITIES_AT_ONCE: Final = 10_000


class SandboxRecords(Protocol):
    """What is asked about a sandbox that the runtime does not have."""

    async def is_over(self, who: Principal, sandbox_id: str, request_id: str) -> bool:
        """Whether the sandbox that this create made has ended or is no more. False where nobody can say."""


class SecretCourier:
    """Holds secret environments in memory until their sandboxes' agents have them; bounded, and stored nowhere else.

    An id may be used again while the old sandbox is still known, so that a create is told by its request id.
    """

    def __init__(
        self,
        cache: WatchCache,
        agents: Agents,
        records: SandboxRecords,
        tasks: TaskGroup,
        *,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._cache = cache
        self._agents = agents
        self._records = records
        self._tasks = tasks
        self._look_seconds = look_seconds
        self._held: dict[tuple[str, str, str], Mapping[str, str]] = {}

    def check_room(self) -> None:
        """Raise ResourceExhaustedError if no more can be held."""
        if len(self._held) >= _SECRETS_HELD:
            raise ResourceExhaustedError(
                "too many sandboxes with a secret environment are starting; try again when some are READY",
                reason="SECRET_ENV_BACKLOG",
                limit=_SECRETS_HELD,
            )

    @property
    def held(self) -> int:
        """How many are held."""
        return len(self._held)

    def deliver_later(self, who: Principal, sandbox_id: str, request_id: str, env: Mapping[str, str]) -> None:
        """Deliver as soon as the sandbox that this create made is READY."""
        key = (who.tenant, sandbox_id, request_id)
        repeated = key in self._held
        self._held[key] = env
        if not repeated:
            self._tasks.start(f"secret env of {sandbox_id}", self._deliver(who, key), forever=False)

    async def _deliver(self, who: Principal, key: tuple[str, str, str]) -> None:
        tenant, sandbox_id, request_id = key
        backoff = Backoff(0.1, 2.0)

        def started(now: Observed) -> bool:
            return now.request_id == request_id and now.state is not State.STARTING

        try:
            while True:
                seen = await self._cache.wait(tenant, sandbox_id, started, self._look_seconds)
                if seen is None or seen.request_id != request_id:
                    # Still queued, or deleted before the runtime ever had it.
                    if await self._records.is_over(who, sandbox_id, request_id):
                        return
                elif seen.state is State.READY:
                    if await self._hand_over(seen, self._held[key]):
                        return
                    await asyncio.sleep(backoff.next())
                elif seen.state is not State.STARTING:
                    return
        finally:
            del self._held[key]

    async def _hand_over(self, seen: Observed, env: Mapping[str, str]) -> bool:
        """Whether there is nothing left to do."""
        try:
            await self._agents.deliver_secret_env(seen, env)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return False
            _log.warning("secret env refused", sandbox_id=seen.sandbox_id, uid=seen.uid, status=error.code().name)
        return True


class ActivitySink(Protocol):
    """Takes reports of use."""

    async def report(self, agents: list[Agent]) -> None:
        """Renew the idle leases of these sandboxes; raises UnavailableError."""


class ActivityReporter:
    """Reports every few seconds which sandboxes were used."""

    def __init__(self, agents: Agents, sink: ActivitySink, *, every_seconds: float) -> None:
        self._agents = agents
        self._sink = sink
        self._every = every_seconds

    async def run(self) -> None:
        """Report for ever. What could not be reported is reported again with the next."""
        while True:
            await asyncio.sleep(self._every)
            active = self._agents.take_active()
            for start in range(0, len(active), _ACTIVITIES_AT_ONCE):
                batch = active[start : start + _ACTIVITIES_AT_ONCE]
                try:
                    await self._sink.report(batch)
                except UnavailableError as error:
                    self._agents.put_back(batch)
                    _log.warning("activity was not reported", sandboxes=len(batch), why=error.message)


class UsageRecorder:
    """Writes when sandboxes were READY. What the database cannot take now waits, one entry a sandbox."""

    def __init__(self, store: GatewayStore, spec_of: Callable[[bytes], tuple[Mapping[str, str], float, int]]) -> None:
        self._store = store
        self._spec_of = spec_of
        self._hub: Hub[str, Observed] = Hub()
        self._backlog = self._hub.subscribe()
        self._synced: tuple[list[str], datetime] | None = None

    def saw(self, seen: Observed) -> None:
        """The watcher told of a change. Ends count even where this watcher does not know when they were READY."""
        if seen.ready_ms or seen.state.terminal:
            self._hub.publish(seen.uid, seen)

    def synced(self, living_uids: list[str]) -> None:
        """The watcher told of every sandbox: those that it did not name have ended while nobody looked."""
        self._synced = (living_uids, utc_now())

    async def run(self) -> None:
        """Write for ever."""
        unwritten: dict[str, SandboxUse] = {}
        ended: dict[str, datetime] = {}
        while True:
            changes = await self._backlog.next(_FLUSH_SECONDS)
            if changes:
                # One statement a second, however many sandboxes come and go.
                await asyncio.sleep(_FLUSH_SECONDS)
                changes += await self._backlog.next(0)
            for seen in changes:
                if seen.ready_ms:
                    unwritten[seen.uid] = self._use(seen)
                if seen.state.terminal:
                    ended.setdefault(seen.uid, utc_now())
            # Taken before anything is awaited: what is told meanwhile is written with the next round.
            synced, self._synced = self._synced, None
            try:
                if unwritten:
                    await self._store.record_uses(list(unwritten.values()))
                    unwritten.clear()
                if ended:
                    await self._store.end_uses(ended)
                    ended.clear()
                if synced is not None:
                    await self._store.end_uses_except(*synced)
            except UnavailableError:
                self._synced = self._synced or synced
                await asyncio.sleep(_FLUSH_SECONDS)

    def _use(self, seen: Observed) -> SandboxUse:
        labels, cpu, memory = self._spec_of(seen.spec)
        return SandboxUse(
            uid=seen.uid,
            tenant=seen.tenant,
            sandbox_id=seen.sandbox_id,
            labels=labels,
            cpu=cpu,
            memory_bytes=memory,
            ready_time=datetime.fromtimestamp(seen.ready_ms / 1000, UTC),
            end_time=None,
        )
