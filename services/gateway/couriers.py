"""Background work: secret environments to agents, use of sandboxes to the scheduler and to the usage table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final, Protocol

import grpc.aio

from services.common.errors import OrchardError, ResourceExhaustedError, UnavailableError
from services.common.hub import Hub
from services.common.logs import get_logger
from services.common.observed import Observed
from services.common.states import State
from services.common.tasks import TaskGroup
from services.common.watch_cache import WatchCache
from services.gateway.agents_client import Agent, Agents
from services.gateway.store import GatewayStore, SandboxUse, utc_now

_log = get_logger(__name__)

_SECRETS_HELD: Final = 10_000
_SECRET_WAIT_SECONDS: Final = 3600.0  # the longest start timeout
_SECRET_RETRY_SECONDS: Final = 0.1
_SECRET_TRIES: Final = 50
_FLUSH_SECONDS: Final = 1.0
_ACTIVITIES_AT_ONCE: Final = 10_000


class SecretCourier:
    """Holds secret environments in memory until their sandboxes' agents have them; bounded, and stored nowhere else."""

    def __init__(self, cache: WatchCache, agents: Agents, tasks: TaskGroup) -> None:
        self._cache = cache
        self._agents = agents
        self._tasks = tasks
        self._held = 0

    def check_room(self) -> None:
        """Raise ResourceExhaustedError if no more can be held."""
        if self._held >= _SECRETS_HELD:
            raise ResourceExhaustedError(
                "too many sandboxes with a secret environment are starting; try again when some are READY",
                reason="SECRET_ENV_BACKLOG",
                limit=_SECRETS_HELD,
            )

    def deliver_later(self, tenant: str, sandbox_id: str, env: dict[str, str]) -> None:
        """Deliver as soon as the sandbox is READY."""
        self._held += 1
        self._tasks.start(f"secret env of {sandbox_id}", self._deliver(tenant, sandbox_id, env), forever=False)

    async def _deliver(self, tenant: str, sandbox_id: str, env: dict[str, str]) -> None:
        try:
            seen = await self._cache.wait(
                tenant, sandbox_id, lambda now: now.state is not State.STARTING, _SECRET_WAIT_SECONDS
            )
            if seen is None or seen.state is not State.READY:
                return
            for _ in range(_SECRET_TRIES):
                try:
                    await self._agents.deliver_secret_env(tenant, sandbox_id, env)
                except UnavailableError:
                    await asyncio.sleep(_SECRET_RETRY_SECONDS)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                        _log.warning("secret env refused", sandbox_id=sandbox_id, status=error.code().name)
                        return
                    await asyncio.sleep(_SECRET_RETRY_SECONDS)
                except OrchardError:
                    return  # the sandbox has ended
                else:
                    return
            _log.warning("secret env could not be delivered", sandbox_id=sandbox_id)
        finally:
            self._held -= 1


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
        """Report for ever. A report that is lost costs one interval of idle time: the next one covers it."""
        while True:
            await asyncio.sleep(self._every)
            active = self._agents.take_active()
            for start in range(0, len(active), _ACTIVITIES_AT_ONCE):
                try:
                    await self._sink.report(active[start : start + _ACTIVITIES_AT_ONCE])
                except UnavailableError as error:
                    _log.warning("activity was not reported", sandboxes=len(active), why=error.message)


class UsageRecorder:
    """Writes when sandboxes were READY. What the database cannot take now waits, one entry a sandbox."""

    def __init__(self, store: GatewayStore, spec_of: Callable[[bytes], tuple[Mapping[str, str], float, int]]) -> None:
        self._store = store
        self._spec_of = spec_of
        self._hub: Hub[str, Observed] = Hub()
        self._backlog = self._hub.subscribe()
        self._synced: list[str] | None = None

    def saw(self, seen: Observed) -> None:
        """The watcher told of a change."""
        if seen.ready_ms:
            self._hub.publish(seen.uid, seen)

    def synced(self, living_uids: list[str]) -> None:
        """The watcher told of every sandbox: those that it did not name have ended while nobody looked."""
        self._synced = living_uids

    async def run(self) -> None:
        """Write for ever."""
        unwritten: dict[str, SandboxUse] = {}
        while True:
            changes = await self._backlog.next(_FLUSH_SECONDS)
            if changes:
                # One statement a second, however many sandboxes come and go.
                await asyncio.sleep(_FLUSH_SECONDS)
                changes += await self._backlog.next(0)
            for seen in changes:
                unwritten[seen.uid] = self._use(seen)
            try:
                if self._synced is not None:
                    await self._store.end_uses_except(self._synced, utc_now())
                    self._synced = None
                if unwritten:
                    await self._store.record_uses(list(unwritten.values()))
                    unwritten.clear()
            except UnavailableError:
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
            end_time=utc_now() if seen.state in (State.DELETED, State.FAILED) else None,
        )
