"""Records, leases and the queue in Redis, changed by Lua scripts (lua/) alone: no read-modify-write from here."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import redis.asyncio as redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.common.errors import UnavailableError
from services.common.observed import Observed
from services.common.quota import UNLIMITED, Quota
from services.common.states import Reason, State
from services.common.tls import ClientContext, TlsFiles
from services.scheduler.records import Record, Terms
from services.scheduler.scripts import Argument, Scripts

_EPOCH: Final = "orchard:epoch"
_RECONCILER: Final = "orchard:reconciler"
_CHANGES: Final = "orchard:changes"
_LEASES: Final = "orchard:leases"
_TIMEOUT_SECONDS: Final = 5.0
_AWAY: Final = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OutOfMemoryError, OSError, TimeoutError)
_AWAY_WORDS: Final = ("BUSY", "MISCONF", "MASTERDOWN", "NOREPLICAS")

Name = tuple[str, str]
"""Tenant and sandbox id."""


class OverQuotaError(Exception):
    """A create that its tenant's quota never lets start: `what` is "sandboxes", "cpu" or "memory"."""

    def __init__(self, what: str, bound: int) -> None:
        super().__init__(what)
        self.what = what
        self.bound = bound


@asynccontextmanager
async def _translated() -> AsyncIterator[asyncio.Timeout]:
    """Redis away becomes UNAVAILABLE; no driver text reaches a client. Each use ends in time.

    The limit is set here and not as the driver's `socket_timeout`: that one goes through asyncio.wait_for, which on
    Python 3.11 can swallow a cancellation, and a background task that lost its own never ends.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS) as limit:
            yield limit
    except _AWAY as error:
        raise _unavailable() from error
    except ResponseError as error:
        # Answers of a server that cannot work just now. Any other is a fault of ours, which a retry would only hide.
        if not str(error).startswith(_AWAY_WORDS):
            raise
        raise _unavailable() from error


def _unavailable() -> UnavailableError:
    return UnavailableError(
        "the lease store does not answer; running sandboxes go on, retry", reason="LEASE_STORE_UNAVAILABLE"
    )


class _TlsConnection(redis.SSLConnection):
    """The driver's, which would keep what its files held at its first connection."""

    def __init__(self, *, context: ClientContext, **rest: Any) -> None:
        super().__init__(**rest)
        self.ssl_context = context  # type: ignore[assignment]  # the driver only calls its `get`


class LeaseStore:
    """The one writer of sandbox records.

    Args:
        url: redis://, rediss:// or unix://.
        tls: with rediss://, the authority of the server, and optionally the certificate to show.
        monotonic: seconds of a clock that is never set.

    Raises:
        TlsError: a file of `tls` cannot be used.
    """

    def __init__(
        self, url: str, tls: TlsFiles | None = None, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._reaped: tuple[int, float] | None = None
        self._redis: redis.Redis = redis.Redis.from_url(
            url, socket_timeout=None, socket_connect_timeout=_TIMEOUT_SECONDS, max_connections=256
        )
        if tls is not None:
            pool = self._redis.connection_pool
            pool.connection_class = _TlsConnection
            pool.connection_kwargs["context"] = ClientContext(tls)
        self._scripts = Scripts(self._redis, limit_seconds=_TIMEOUT_SECONDS)

    async def close(self) -> None:
        """Close every connection."""
        await self._scripts.close()
        await self._redis.aclose()

    async def _run(self, script: str, *arguments: Argument) -> Any:
        async with _translated():
            return await self._scripts.run(script, *arguments)

    async def create(
        self, record: Record, terms: Terms, *, queue_limit: int, quota: Quota = UNLIMITED
    ) -> tuple[str, str, int]:
        """Queue a create; returns the outcome (lua/create.lua), the sandbox id and the store's time.

        Raises:
            OverQuotaError: it would not fit the tenant's quota alone.
        """
        outcome, sandbox_id, now, *over = await self._run(
            "create",
            record.tenant,
            record.sandbox_id,
            record.request_id,
            record.spec_hash,
            queue_limit,
            terms.priority,
            terms.ttl_ms,
            terms.idle_timeout_ms,
            terms.heartbeat_timeout_ms,
            record.spec,
            int(record.expects_secret_env),
            terms.start_timeout_ms,
            terms.cpu_milli,
            terms.memory_bytes,
            record.lifetime_ms,
            *_bounds(quota),
        )
        if over:
            raise OverQuotaError(over[0].decode(), int(over[1]))
        return outcome.decode(), sandbox_id.decode(), int(now)

    async def take(self, claim_ms: int, count: int = 1) -> list[Record] | float:
        """Claim `count` creates to start, or fewer; with none, for how many seconds unless things change."""
        while True:
            wait_ms, *taken = await self._run("take", claim_ms, count)
            if taken:
                return [_record(flat) for flat in taken]
            if wait_ms:
                return math.inf if int(wait_ms) < 0 else int(wait_ms) / 1000

    async def note_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Keep the quotas of tenants that are newer than what is kept, and let go what fits them."""
        if quotas:
            await self._run("quota", *(part for tenant, quota in quotas.items() for part in (tenant, *_bounds(quota))))

    async def waits_for(self, tenant: str) -> str:
        """What the tenant's queued creates wait for, in a sentence; empty if for nothing but their turn."""
        async with _translated():
            text = await cast("Awaitable[bytes | None]", self._redis.hget(f"orchard:tenant:{tenant}", "waits"))
        return text.decode() if text else ""

    async def started(self, name: Name, request_id: str, uid: str, *, create_ms: int = 0) -> tuple[str, int]:
        """Note the incarnation that the runtime made; returns started, missing or unwanted, and when it expires."""
        outcome, expire_ms = await self._run("started", *name, request_id, uid, create_ms)
        return outcome.decode(), int(expire_ms)

    async def release(self, name: Name, request_id: str, delay_ms: int, message: str) -> bool:
        """Let a create whose start failed for now be taken again after a delay; True if its start timeout ended it."""
        return bool(await self._run("release", *name, request_id, delay_ms, message))

    async def finish(self, name: Name, request_id: str, state: State, reason: Reason, message: str) -> bool:
        """End a record; False if it had ended."""
        return bool(await self._run("finish", *name, request_id, int(state), int(reason), message))

    async def observe(self, seen: Observed) -> str:
        """Write what the watcher saw; returns applied, missing, ended, other or old (lua/observe.lua)."""
        outcome = await self._run(
            "observe",
            seen.tenant,
            seen.sandbox_id,
            seen.request_id,
            seen.uid,
            f"{seen.revision:020d}",
            int(seen.state),
            int(seen.reason),
            seen.message,
            seen.ready_ms,
            seen.create_ms,
        )
        return str(outcome.decode())

    async def rebuild(self, seen: Observed, terms: Terms, now_ms: int) -> bool:
        """Make the record of a sandbox that the runtime has; False if there is one (lua/rebuild.lua)."""
        fields: dict[str, str | bytes | int] = {
            "tenant": seen.tenant,
            "sandbox_id": seen.sandbox_id,
            "request_id": seen.request_id,
            "spec_hash": seen.spec_hash,
            "spec": seen.spec,
            "expects_secret_env": 0,
            # What it is beyond being there, `observe` writes afterwards.
            "state": int(State.READY if seen.state is State.READY else State.STARTING),
            "reason": 0,
            "message": "",
            "uid": seen.uid,
            "revision": "",
            "create_ms": seen.create_ms,
            "ready_ms": seen.ready_ms,
            "end_ms": 0,
            "expire_ms": seen.expire_ms or seen.create_ms + terms.ttl_ms,
            # A rebuilt lease begins anew: it is never shorter than the lost one was.
            "idle_timeout_ms": terms.idle_timeout_ms,
            "last_active_ms": now_ms,
            "heartbeat_timeout_ms": terms.heartbeat_timeout_ms,
            "last_heartbeat_ms": now_ms,
            "start_ms": 0,
            "start_timeout_ms": terms.start_timeout_ms,
            "delete_reason": "",
            "cpu_milli": terms.cpu_milli,
            "memory_bytes": terms.memory_bytes,
            "lifetime_ms": 0,
            "charged": 0,
        }
        flat = [part for pair in fields.items() for part in pair]
        name = (seen.tenant, seen.sandbox_id)
        return bool(await self._run("rebuild", *name, seen.request_id, seen.spec_hash, seen.create_ms, *flat))

    async def delete(self, name: Name, uid: str, reason: Reason) -> tuple[str, Record | None]:
        """Mark a sandbox DELETING; returns missing, ended, other_uid or deleting, and the record."""
        outcome, *flat = await self._run("delete", *name, uid, int(reason))
        return outcome.decode(), _record(flat[0]) if flat else None

    async def expire(self, limit: int) -> list[Name]:
        """Claim leases that ran out and mark their sandboxes DELETING.

        Between two passes the store's clock goes on as much as this process's monotonic one, and every lease could be
        renewed. Where that was not so, heartbeat and idle timeouts stood still (lua/expire.lua); a time to live goes
        on.
        """
        at = self._monotonic()
        then_ms, then = self._reaped or (0, at)
        self._reaped = None  # a pass that fails tells nothing: the next one is like a first one
        now_ms, *doomed = await self._run("expire", limit, then_ms, round((at - then) * 1000))
        self._reaped = (int(now_ms), at)
        return [_name(raw) for raw in doomed]

    async def renew(self, field: str, leases: Sequence[tuple[str, str, str]]) -> list[Name]:
        """Renew leases given as (tenant, id, uid or ""); returns those that are not alive."""
        flat = [part for lease in leases for part in lease]
        return [_name(raw) for raw in await self._run("renew", field, *flat)]

    async def update(self, name: Name, expire_ms: int) -> str:
        """Move the end of the time to live; returns missing, ended or updated."""
        return str((await self._run("update", *name, expire_ms)).decode())

    async def sweep(self, limit: int) -> int:
        """Forget terminal records that were kept long enough; returns how many."""
        return int(await self._run("sweep", limit))

    async def get(self, name: Name) -> Record | None:
        """One record."""
        async with _translated():
            fields = await cast("Awaitable[dict[bytes, bytes]]", self._redis.hgetall(_record_key(*name)))
        return Record.from_hash(fields) if fields else None

    async def get_many(self, names: Sequence[Name]) -> list[Record | None]:
        """Several records, in their order."""
        async with _translated(), self._redis.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.hgetall(_record_key(*name))
            return [Record.from_hash(fields) if fields else None for fields in await pipeline.execute()]

    async def page(self, tenant: str, before: tuple[int, str] | None, count: int) -> list[tuple[int, str]]:
        """Create times and ids of a tenant's records after the position `before`, newest first."""
        key = f"orchard:index:{tenant}"
        # As of one moment: what goes between two fetches would move what comes after it out of sight.
        async with _translated(), self._redis.pipeline(transaction=True) as pipeline:
            if before is None:
                pipeline.zrevrangebyscore(key, "+inf", "-inf", start=0, num=count, withscores=True)
            else:
                pipeline.zrevrangebyscore(key, before[0], before[0], withscores=True)
                pipeline.zrevrangebyscore(key, f"({before[0]}", "-inf", start=0, num=count, withscores=True)
            parts: list[list[tuple[bytes, float]]] = await pipeline.execute()
        entries = [(int(score), raw.decode()) for part in parts for raw, score in part]
        return [entry for entry in entries if before is None or entry < before][:count]

    async def living(self) -> list[Name]:
        """The names of every record that is not terminal."""
        async with _translated():
            return [_name(cast("bytes", raw)) for raw in await self._redis.zrange(_LEASES, 0, -1)]

    async def queue_lengths(self) -> dict[str, int]:
        """Queued creates by tenant."""
        async with _translated():
            tenants = await cast("Awaitable[list[bytes]]", self._redis.lrange("orchard:turns", 0, -1))
            parked = cast("list[bytes]", await self._redis.zrange("orchard:parked", 0, -1))
            names = [tenant.decode() for tenant in (*tenants, *parked)]
            return {name: int(await self._redis.zcard(f"orchard:queue:{name}")) for name in names}

    async def lost_everything(self) -> bool:
        """Whether the store was emptied since `mark_rebuilt`."""
        async with _translated():
            return not await self._redis.exists(_EPOCH)

    async def mark_rebuilt(self) -> None:
        """Note that every record has been rebuilt from the runtime."""
        async with _translated():
            await self._redis.set(_EPOCH, "1")

    async def elect(self, me: str, milliseconds: int) -> bool:
        """Whether this replica is the one that reconciles, for the next `milliseconds`."""
        async with _translated():
            if await self._redis.set(_RECONCILER, me, nx=True, px=milliseconds):
                return True
            if await self._redis.get(_RECONCILER) == me.encode():
                await self._redis.pexpire(_RECONCILER, milliseconds)
                return True
            return False

    async def changes(self, connected: Callable[[], None]) -> AsyncIterator[Name]:
        """Names of changed records, as they change; calls `connected` once none can be missed any more. A name with an
        empty id says that creates of the tenant may be taken again.

        Raises:
            UnavailableError: the connection broke. Changes since are lost, so re-read what matters.
        """
        async with _translated() as limit, self._redis.pubsub(ignore_subscribe_messages=False) as subscription:
            await subscription.subscribe(_CHANGES)
            limit.reschedule(None)  # changes are waited for without end
            while True:
                message = await subscription.get_message(timeout=_TIMEOUT_SECONDS)
                if message is None:
                    # Nothing changed; asking makes a dead connection known.
                    async with asyncio.timeout(_TIMEOUT_SECONDS):
                        await subscription.ping()
                elif message["type"] == "subscribe":
                    connected()
                elif message["type"] == "message":
                    yield _name(message["data"])


def _bounds(quota: Quota) -> tuple[str | int, ...]:
    """A quota as the scripts take it; an empty bound bounds nothing."""

    def text(bound: float | None, factor: float = 1) -> str | int:
        return "" if bound is None else math.floor(bound * factor)

    rate = quota.creates_per_second
    return (
        quota.revision,
        text(quota.sandboxes),
        text(quota.cpu, 1000),
        text(quota.memory_bytes),
        "" if rate is None else f"{1000 / rate:.6f}",
    )


def _record(flat: Sequence[bytes]) -> Record:
    return Record.from_hash(dict(zip(flat[::2], flat[1::2], strict=True)))


def _record_key(tenant: str, sandbox_id: str) -> str:
    return f"orchard:sandbox:{tenant}:{sandbox_id}"


def _name(raw: bytes) -> Name:
    tenant, _, sandbox_id = raw.decode().partition("/")
    return tenant, sandbox_id
