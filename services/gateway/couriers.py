"""Background work: secret environments to agents, use of sandboxes to the scheduler and to the usage table."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol, TypeAlias

import grpc
import grpc.aio

from services.common.backoff import Backoff
from services.common.errors import ResourceExhaustedError, UnavailableError
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
_SECRET_BYTES_HELD: Final = 64 << 20
_LOOK_SECONDS: Final = 60.0  # how often the scheduler is asked about a sandbox that stays in the queue
_FLUSH_SECONDS: Final = 1.0
_LAST_SECONDS: Final = 5.0
_ACTIVITIES_AT_ONCE: Final = 10_000

_Key: TypeAlias = tuple[str, str, str]  # tenant, sandbox id, request id


class SandboxRecords(Protocol):
    """What is asked about a sandbox that the runtime does not have."""

    async def is_over(self, who: Principal, sandbox_id: str, request_id: str) -> bool:
        """Whether the sandbox that this create made has ended or is no more. False where nobody can say."""


@dataclass(eq=False, slots=True)
class _Held:
    who: Principal
    env: Mapping[str, str]
    size: int
    delivering: bool = False


class SecretCourier:
    """Holds secret environments in memory while their sandboxes live, stored nowhere else, and hands them to the
    agents: to the first one, and to each fresh one that says that it has none.

    Bounded in number and bytes. What was delivered makes room for what was not; its creator can hand it in again. An id
    may be used again while the old sandbox is still known, so that a create is told by its request id.
    """

    def __init__(
        self,
        cache: WatchCache,
        agents: Agents,
        records: SandboxRecords,
        tasks: TaskGroup,
        *,
        look_seconds: float = _LOOK_SECONDS,
        most: int = _SECRETS_HELD,
        most_bytes: int = _SECRET_BYTES_HELD,
    ) -> None:
        self._cache = cache
        self._agents = agents
        self._records = records
        self._tasks = tasks
        self._look_seconds = look_seconds
        self._most = most
        self._most_bytes = most_bytes
        self._held: dict[_Key, _Held] = {}
        self._delivered: OrderedDict[_Key, int] = OrderedDict()  # with their sizes, the oldest first
        self._bytes = 0
        self._delivered_bytes = 0
        self._coming = self._coming_bytes = 0

    @contextmanager
    def room(self, env: Mapping[str, str]) -> Iterator[None]:
        """Keep room for one whose create is on its way.

        Raises:
            ResourceExhaustedError: no more can be held.
        """
        size, waiting_bytes = _size(env), self._bytes - self._delivered_bytes + self._coming_bytes
        if self.waiting + self._coming >= self._most or waiting_bytes + size > self._most_bytes:
            raise ResourceExhaustedError(
                "too many sandboxes with a secret environment are starting; try again when some are READY",
                reason="SECRET_ENV_BACKLOG",
                limit=self._most,
                limit_bytes=self._most_bytes,
            )
        self._coming += 1
        self._coming_bytes += size
        try:
            yield
        finally:
            self._coming -= 1
            self._coming_bytes -= size

    @property
    def held(self) -> int:
        """How many are held."""
        return len(self._held)

    @property
    def waiting(self) -> int:
        """How many of them are to be delivered."""
        return len(self._held) - len(self._delivered)

    def deliver_later(self, who: Principal, sandbox_id: str, request_id: str, env: Mapping[str, str]) -> None:
        """Deliver as soon as the sandbox that this create made is READY."""
        key = (who.tenant, sandbox_id, request_id)
        earlier = self._drop(key)
        held = _Held(who, env, _size(env), delivering=earlier is not None and earlier.delivering)
        self._held[key] = held
        self._bytes += held.size
        while self._delivered and (len(self._held) > self._most or self._bytes > self._most_bytes):
            self._drop(next(iter(self._delivered)))
        self._start(key, held)

    def deliver_again(self, agent: Agent) -> None:
        """An agent says that it has none: it is a fresh one."""
        seen = self._cache.get(agent.tenant, agent.sandbox_id)
        if seen is None or seen.uid != agent.uid:
            return
        key = (seen.tenant, seen.sandbox_id, seen.request_id)
        held = self._held.get(key)
        if held is not None:
            self._delivered_bytes -= self._delivered.pop(key, 0)
            self._start(key, held)

    def forget(self, seen: Observed) -> None:
        """A sandbox has ended."""
        self._drop((seen.tenant, seen.sandbox_id, seen.request_id))

    def _drop(self, key: _Key) -> _Held | None:
        held = self._held.pop(key, None)
        if held is not None:
            self._bytes -= held.size
            self._delivered_bytes -= self._delivered.pop(key, 0)
        return held

    def _start(self, key: _Key, held: _Held) -> None:
        if not held.delivering:
            held.delivering = True
            self._tasks.start(f"secret env of {key[1]}", self._deliver(held.who, key), forever=False)

    async def _deliver(self, who: Principal, key: _Key) -> None:
        delivered = False
        try:
            delivered = await self._until_delivered(who, key)
        finally:
            if not delivered:
                self._drop(key)
            elif (held := self._held.get(key)) is not None:
                held.delivering = False
                self._delivered[key] = held.size
                self._delivered_bytes += held.size

    async def _until_delivered(self, who: Principal, key: _Key) -> bool:
        """Whether the sandbox has it; False once there is nobody to give it to."""
        tenant, sandbox_id, request_id = key
        backoff = Backoff(0.1, 2.0)

        def started(now: Observed) -> bool:
            return now.request_id == request_id and now.state is not State.STARTING

        while (held := self._held.get(key)) is not None:
            seen = await self._cache.wait(tenant, sandbox_id, started, self._look_seconds)
            if seen is None or seen.request_id != request_id:
                # Still queued, or deleted before the runtime ever had it.
                over = await self._records.is_over(who, sandbox_id, request_id)
                # What was handed in meanwhile is of a create that came after this answer was given.
                if over and self._held.get(key) in (held, None):
                    return False
            elif seen.state is State.READY:
                held = self._held.get(key, held)
                outcome = await self._hand_over(seen, held.env)
                if outcome is not None and self._held.get(key) in (held, None):
                    return outcome
                if outcome is None:
                    await asyncio.sleep(backoff.next())
            elif seen.state is not State.STARTING:
                return False
        return False

    async def _hand_over(self, seen: Observed, env: Mapping[str, str]) -> bool | None:
        """Whether the agent has taken it; None if it may do so later."""
        try:
            await self._agents.deliver_secret_env(seen, env)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return None
            _log.warning("secret env refused", sandbox_id=seen.sandbox_id, uid=seen.uid, status=error.code().name)
            return False
        return True


def _size(env: Mapping[str, str]) -> int:
    return sum(len(key) + len(value.encode()) for key, value in env.items())


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
        self._some = asyncio.Event()
        self._ready: dict[str, Observed] = {}
        self._unwritten: dict[str, SandboxUse] = {}
        self._ended: dict[str, datetime] = {}
        self._synced: tuple[list[str], datetime] | None = None

    def saw(self, seen: Observed) -> None:
        """The watcher told of a change. Ends count even where this watcher does not know when they were READY."""
        if seen.ready_ms:
            self._ready[seen.uid] = seen
            self._some.set()
        if seen.state.terminal:
            self._ended.setdefault(seen.uid, utc_now())
            self._some.set()

    def synced(self, living_uids: list[str]) -> None:
        """The watcher told of every sandbox: those that it did not name have ended while nobody looked."""
        self._synced = (living_uids, utc_now())
        self._some.set()

    async def run(self) -> None:
        """Write for ever."""
        while True:
            await self._some.wait()
            # One statement a second, however many sandboxes come and go.
            await asyncio.sleep(_FLUSH_SECONDS)
            self._some.clear()
            try:
                await self._flush()
            except UnavailableError:
                self._some.set()

    async def close(self) -> None:
        """Write what is left, for a few seconds: nobody else may have seen those that came and went just now."""
        with suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                await self._flush()

    async def _flush(self) -> None:
        self._unwritten.update((uid, self._use(seen)) for uid, seen in self._ready.items())
        self._ready.clear()
        # Taken before anything is awaited: what is told meanwhile is written with the next round.
        ended, synced = self._ended, self._synced
        self._ended, self._synced = {}, None
        try:
            if self._unwritten:
                await self._store.record_uses(list(self._unwritten.values()))
                self._unwritten.clear()
            if ended:
                await self._store.end_uses(ended)
                ended = {}
            if synced is not None:
                await self._store.end_uses_except(*synced)
                synced = None
        finally:
            self._ended |= ended
            self._synced = self._synced or synced

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
