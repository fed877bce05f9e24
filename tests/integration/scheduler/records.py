"""What tests of the lease store do to records."""

import redis.asyncio as redis

from services.common.observed import Observed
from services.common.states import Reason, State
from services.scheduler.records import Record, Terms
from services.scheduler.store import LeaseStore

DAY = Terms(ttl_ms=86_400_000)
FAR_MS = 4_000_000_000_000


async def milliseconds(valkey: redis.Redis) -> int:
    """The store's clock."""
    seconds, micros = await valkey.time()
    return seconds * 1000 + micros // 1000


async def long_ago(valkey: redis.Redis, field: str, ago_ms: int) -> None:
    """Move a time of record t/a into the past, and have its lease looked at."""
    await valkey.hset("orchard:sandbox:t:a", field, str(await milliseconds(valkey) - ago_ms))
    await valkey.zadd("orchard:leases", {"t/a": 0})


def wanted(
    sandbox_id: str, *, tenant: str = "t", request_id: str = "", spec: bytes = b"spec", spec_hash: str = "h"
) -> Record:
    return Record(tenant, sandbox_id, request_id or f"r-{sandbox_id}", spec_hash, spec, State.QUEUED)


async def create(store: LeaseStore, record: Record, terms: Terms = DAY, queue_limit: int = 1000) -> tuple[str, str]:
    outcome, sandbox_id, _now = await store.create(record, terms, queue_limit=queue_limit)
    return outcome, sandbox_id


def seen(record: Record, state: State, revision: int, **more) -> Observed:
    return Observed(
        record.tenant, record.sandbox_id, more.pop("uid", "u1"), revision, state, request_id=record.request_id, **more
    )


async def take(store: LeaseStore, claim_ms: int = 30_000) -> tuple[str, str] | None:
    taken = await store.take(claim_ms)
    return (taken[0].tenant, taken[0].sandbox_id) if isinstance(taken, list) else None


async def delete(store: LeaseStore, name: tuple[str, str], uid: str, reason: Reason) -> str:
    return (await store.delete(name, uid, reason))[0]


async def started(store: LeaseStore, record: Record) -> None:
    await create(store, record)
    assert await take(store, 30_000) == (record.tenant, record.sandbox_id)
    outcome, _expire_ms = await store.started((record.tenant, record.sandbox_id), record.request_id, "u1")
    assert outcome == "started"


async def state_of(store: LeaseStore, record: Record) -> tuple[State, Reason]:
    found = await store.get((record.tenant, record.sandbox_id))
    assert found is not None
    return found.state, found.reason
