"""Whatever happens in whatever order, what counts against a quota is what the records say. Against a real Valkey."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest
import redis.asyncio as redis
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.observed import Observed
from services.common.quota import Quota
from services.common.states import Reason, State
from services.scheduler.records import Record, Terms
from services.scheduler.store import LeaseStore, OverQuotaError
from tests.integration.scheduler.records import FAR_MS, wanted

T = TypeVar("T")
COUNTED = {State.STARTING, State.READY, State.DELETING}

TENANTS = ("s", "t")
_DAY_MS = 86_400_000
# Weighted so that more is asked for than there is room for.
_CHOICES = (
    *("create",) * 12,
    *("take",) * 4,
    *("gone", "ready") * 2,
    *("quota", "starting", "failed", "delete", "expire", "finish", "release", "started", "flush", "rebuild"),
)
_OF_THE_RUNTIME = ("starting", "ready", "failed", "gone", "rebuild")


class Walk:
    """Two tenants, a few ids, and a runtime that keeps what was taken until it is told to be gone."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.runner = asyncio.Runner()
        self.store, self.valkey = self.run(self._open())
        self.quotas = {"s": Quota(1, sandboxes=1), "t": Quota(2, cpu=3)}
        self.revision = 2
        self.requests: dict[tuple[str, str], int] = {}
        self.terms: dict[str, Terms] = {}
        self.there: dict[tuple[str, str], Record] = {}

    def run(self, work: Awaitable[T]) -> T:
        async def within() -> T:
            return await work

        return self.runner.run(within())

    async def _open(self) -> tuple[LeaseStore, redis.Redis]:
        valkey = redis.Redis.from_url(self._url)
        await valkey.flushall()
        store = LeaseStore(self._url)
        await store.mark_rebuilt()
        return store, valkey

    def close(self) -> None:
        self.run(self.store.close())
        self.run(self.valkey.aclose())
        self.runner.close()

    def _terms(self, record: Record) -> Terms:
        return self.terms[record.request_id]

    def _seen(self, record: Record, state: State) -> Observed:
        self.revision += 1
        return Observed(
            record.tenant,
            record.sandbox_id,
            f"u-{record.request_id}",
            self.revision,
            state,
            create_ms=record.create_ms,
            expire_ms=FAR_MS,
            request_id=record.request_id,
            spec_hash=record.spec_hash,
        )

    def step(self, chosen: random.Random) -> None:
        """Something happens, mostly to what there is."""
        what = chosen.choice(_CHOICES)
        names = sorted(self.there) if what in _OF_THE_RUNTIME else self._alive()
        key = chosen.choice(names) if names else ("t", "a")
        match what:
            case "create":
                # Small and close to each other, so that much is queued and little fits.
                asked = Terms(
                    _DAY_MS,
                    priority=chosen.randint(-1, 1),
                    cpu_milli=1000 * chosen.randint(0, 2),
                    memory_bytes=chosen.randint(0, 2),
                )
                self.create((chosen.choice(TENANTS), chosen.choice("abcdef")), asked, again=chosen.random() < 0.2)
            case "take":
                self.take(chosen.choice([1, 9]), chosen.choice([0, 30_000, 30_000]), at_once=chosen.choice([1, 3]))
            case "starting" | "ready" | "failed":
                self.observe(key, State[what.upper()])
            case "gone":
                self.gone(key)
            case "quota":
                self.set_quota(
                    chosen.choice(TENANTS),
                    chosen.choice([1, 2, None]),
                    chosen.choice([2, 3, None]),
                    chosen.choice([2, 3, None]),
                )
            case "flush":
                self.lose_everything()
            case "rebuild":
                self.rebuild(key)
            case _:
                self.change(key, what)
        self.the_sums_are_what_the_records_say()
        self.whoever_has_queued_creates_has_one_place()

    def create(self, key: tuple[str, str], asked: Terms, *, again: bool) -> None:
        tenant, name = key
        self.requests[key] = number = self.requests.get(key, 0) + (0 if again else 1)
        record = wanted(name, tenant=tenant, request_id=f"{tenant}-{name}-{number}")
        terms = self.terms.setdefault(record.request_id, asked)
        try:
            self.run(self.store.create(record, terms, queue_limit=99, quota=self.quotas.get(tenant, Quota())))
        except OverQuotaError as error:
            quota = self.quotas[tenant]
            asked, bound = {
                "sandboxes": (1, quota.sandboxes),
                "cpu": (terms.cpu_milli, (quota.cpu or 0) * 1000),
                "memory": (terms.memory_bytes, quota.memory_bytes),
            }[error.what]
            assert bound is not None
            assert asked > bound

    def take(self, count: int, claim_ms: int, *, at_once: int) -> None:
        while count > 0:
            taken = self.run(self.store.take(claim_ms, at_once))
            if not isinstance(taken, list):
                self._nothing_fits()
                return
            assert 1 <= len(taken) <= at_once
            for record in taken:
                self._note_taken(record)
            count -= len(taken)

    def _note_taken(self, record: Record) -> None:
        key = (record.tenant, record.sandbox_id)
        if key not in self.there or self.there[key].request_id != record.request_id:
            assert self._over(record.tenant, self._terms(record), more=False) is None, "taken beyond the quota"
        self.there[key] = record

    def _nothing_fits(self) -> None:
        for tenant in TENANTS:
            for raw in self.run(self.valkey.zrange(f"orchard:queue:{tenant}", 0, 0)):
                first = self.run(self.store.get((tenant, raw.decode())))
                assert first is not None
                assert self._over(tenant, self._terms(first), more=True) is not None, f"{first} could start"

    def _over(self, tenant: str, terms: Terms, *, more: bool) -> str | None:
        """What a tenant is over, of what a sandbox takes: with one `more` of it, or with it counted already."""
        quota, used = self.quotas.get(tenant, Quota()), self._counted()[tenant]
        for what, bound, asked in (
            ("sandboxes", quota.sandboxes, 1),
            ("cpu_milli", None if quota.cpu is None else quota.cpu * 1000, terms.cpu_milli),
            ("memory_bytes", quota.memory_bytes, terms.memory_bytes),
        ):
            if bound is not None and asked and used[what] + (asked if more else 0) > bound:
                return what
        return None

    def observe(self, key: tuple[str, str], state: State) -> None:
        record = self.there.get(key)
        if record is not None:
            self.run(self.store.observe(self._seen(record, state)))

    def gone(self, key: tuple[str, str]) -> None:
        record = self.there.pop(key, None)
        if record is not None:
            self.run(self.store.observe(self._seen(record, State.DELETED)))

    def change(self, key: tuple[str, str], what: str) -> None:
        request = f"{key[0]}-{key[1]}-{self.requests.get(key, 0)}"
        match what:
            case "delete":
                self.run(self.store.delete(key, "", Reason.REQUESTED))
            case "finish":
                self.run(self.store.finish(key, request, State.FAILED, Reason.UNSCHEDULABLE, ""))
            case "release":
                self.run(self.store.release(key, request, 0, "not now"))
            case "started":
                self.run(self.store.started(key, request, f"u-{request}"))
            case _:
                self.run(self._expire(key))

    async def _expire(self, key: tuple[str, str]) -> None:
        record = await self.store.get(key)
        if record is not None and not record.state.terminal:
            await self.valkey.hset(f"orchard:sandbox:{key[0]}:{key[1]}", "expire_ms", "1")
            await self.valkey.zadd("orchard:leases", {f"{key[0]}/{key[1]}": 1})
            await self.store.expire(100)

    def set_quota(self, tenant: str, sandboxes: int | None, cpu: int | None, memory: int | None) -> None:
        self.revision += 1
        self.quotas[tenant] = Quota(self.revision, sandboxes, cpu, memory)
        self.run(self.store.note_quotas({tenant: self.quotas[tenant]}))
        # One that is behind changes nothing.
        self.run(self.store.note_quotas({tenant: Quota(self.revision - 1)}))

    def lose_everything(self) -> None:
        # Quotas too: each is known again with the tenant's next create, and until then nothing of it is queued.
        self.run(self.valkey.flushall())
        assert self.run(self.store.take(1)) == math.inf
        # What is not rebuilt yet is like what the watcher was late with.
        self.run(self.store.mark_rebuilt())

    def rebuild(self, key: tuple[str, str]) -> None:
        record = self.there.get(key)
        if record is not None:
            self.run(self.store.rebuild(self._seen(record, State.READY), self._terms(record), 1))

    def _alive(self) -> list[tuple[str, str]]:
        """Of what there is a record that has not ended."""
        return sorted(
            (record["tenant"], record["sandbox_id"])
            for record in self._records()
            if not State(int(record["state"])).terminal
        )

    def _records(self) -> list[dict[str, str]]:
        keys = self.run(self.valkey.keys("orchard:sandbox:*"))
        found: list[dict[bytes, bytes]] = [self.run(self.valkey.hgetall(key)) for key in keys]
        return [{k.decode(): v.decode() for k, v in record.items()} for record in found]

    def _counted(self) -> dict[str, Counter[str]]:
        sums: dict[str, Counter[str]] = {"s": Counter(), "t": Counter()}
        for record in self._records():
            if State(int(record["state"])) in COUNTED:
                for field, amount in (("sandboxes", 1), *((f, int(record[f])) for f in ("cpu_milli", "memory_bytes"))):
                    sums[record["tenant"]][field] += amount
        return sums

    def the_sums_are_what_the_records_say(self) -> None:
        for record in self._records():
            assert (record["charged"] == "1") == (State(int(record["state"])) in COUNTED), record
        for tenant, sums in self._counted().items():
            kept: Any = self.run(self.valkey.hgetall(f"orchard:tenant:{tenant}"))
            for field in ("sandboxes", "cpu_milli", "memory_bytes"):
                assert int(kept.get(f"used_{field}".encode(), 0)) == sums[field], (tenant, field)

    def whoever_has_queued_creates_has_one_place(self) -> None:
        turns: Any = self.run(self.valkey.lrange("orchard:turns", 0, -1))
        places = Counter([*turns, *self.run(self.valkey.zrange("orchard:parked", 0, -1))])
        queued: Counter[bytes] = Counter()
        for record in self._records():
            if State(int(record["state"])) is State.QUEUED:
                queued[record["tenant"].encode()] += 1
        for tenant in (b"s", b"t"):
            assert self.run(self.valkey.zcard(b"orchard:queue:" + tenant)) == queued[tenant]
            assert places[tenant] == min(1, queued[tenant])


@pytest.mark.timeout(600)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 100))
@settings(max_examples=60)
def test_sums_never_drift(valkey_url: str, seed: int, steps: int) -> None:
    walk = Walk(valkey_url)
    try:
        chosen = random.Random(seed)
        for _ in range(steps):
            walk.step(chosen)
    finally:
        walk.close()
