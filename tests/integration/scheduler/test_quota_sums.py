"""Whatever happens in whatever order, what counts against a quota is what the records say. Against a real Valkey."""

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import Any, TypeVar

import pytest
import redis.asyncio as redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from services.common.observed import Observed
from services.common.quota import Quota
from services.common.states import Reason, State
from services.scheduler.records import Record, Terms
from services.scheduler.store import LeaseStore, OverQuotaError
from tests.integration.scheduler.records import FAR_MS, wanted

T = TypeVar("T")
COUNTED = {State.STARTING, State.READY, State.DELETING}

tenants = st.sampled_from(["s", "t"])
ids = st.sampled_from(["a", "b", "c", "d"])
amounts = st.integers(0, 3)
bounds = st.none() | st.integers(0, 6)


class Queue(RuleBasedStateMachine):
    """Two tenants, a few ids, and a runtime that keeps what was taken until it is told to be gone."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store, self.valkey = self.run(self._open())
        self.quotas: dict[str, Quota] = {}
        self.revision = 0
        self.requests: dict[tuple[str, str], int] = {}
        self.terms: dict[str, Terms] = {}
        self.there: dict[tuple[str, str], Record] = {}

    def run(self, work: Awaitable[T]) -> T:
        async def within() -> T:
            return await work

        return self.runner.run(within())

    async def _open(self) -> tuple[LeaseStore, redis.Redis]:
        valkey = redis.Redis.from_url(self.url)
        await valkey.flushall()
        return LeaseStore(self.url), valkey

    def teardown(self) -> None:
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

    @rule(tenant=tenants, name=ids, cpu=amounts, memory=amounts, priority=st.integers(-1, 1), again=st.booleans())
    def create(self, *, tenant: str, name: str, cpu: int, memory: int, priority: int, again: bool) -> None:
        key = (tenant, name)
        self.requests[key] = number = self.requests.get(key, 0) + (0 if again else 1)
        record = wanted(name, tenant=tenant, request_id=f"{tenant}-{name}-{number}")
        terms = self.terms.setdefault(
            record.request_id, Terms(86_400_000, priority=priority, cpu_milli=cpu * 1000, memory_bytes=memory)
        )
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

    @rule(count=st.integers(1, 4), claim_ms=st.sampled_from([0, 30_000]))
    def take(self, count: int, claim_ms: int) -> None:
        for _ in range(count):
            taken = self.run(self.store.take(claim_ms))
            if not isinstance(taken, Record):
                self._nothing_fits()
                return
            key = (taken.tenant, taken.sandbox_id)
            if key not in self.there or self.there[key].request_id != taken.request_id:
                assert self._over(taken.tenant, self._terms(taken), more=False) is None, "taken beyond the quota"
            self.there[key] = taken

    def _nothing_fits(self) -> None:
        for tenant in ("s", "t"):
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

    @rule(tenant=tenants, name=ids, state=st.sampled_from([State.STARTING, State.READY, State.FAILED]))
    def observe(self, tenant: str, name: str, state: State) -> None:
        record = self.there.get((tenant, name))
        if record is not None:
            self.run(self.store.observe(self._seen(record, state)))

    @rule(tenant=tenants, name=ids)
    def gone(self, tenant: str, name: str) -> None:
        record = self.there.pop((tenant, name), None)
        if record is not None:
            self.run(self.store.observe(self._seen(record, State.DELETED)))

    @rule(tenant=tenants, name=ids, what=st.sampled_from(["delete", "finish", "release", "started", "expire"]))
    def change(self, tenant: str, name: str, what: str) -> None:
        key = (tenant, name)
        request = f"{tenant}-{name}-{self.requests.get(key, 0)}"
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

    @rule(tenant=tenants, sandboxes=bounds, cpu=bounds, memory=bounds, told=st.booleans())
    def set_quota(self, tenant: str, sandboxes: int | None, cpu: int | None, memory: int | None, told: bool) -> None:
        self.revision += 1
        self.quotas[tenant] = Quota(self.revision, sandboxes, cpu, memory)
        self.run(self.store.note_quotas({tenant: self.quotas[tenant]}))
        if told:
            # One that is behind changes nothing.
            self.run(self.store.note_quotas({tenant: Quota(self.revision - 1)}))

    @rule(order=st.permutations(["a", "b", "c", "d"]))
    def lose_everything(self, order: list[str]) -> None:
        self.run(self.valkey.flushall())
        for tenant in ("s", "t"):
            # Known again with the next create.
            self.quotas.pop(tenant, None)
            for name in order:
                record = self.there.get((tenant, name))
                if record is not None:
                    seen = self._seen(record, State.READY)
                    self.run(self.store.rebuild(seen, self._terms(record), 1))
                    self.run(self.store.rebuild(seen, self._terms(record), 1))
                    self.run(self.store.observe(seen))

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

    @invariant()
    def the_sums_are_what_the_records_say(self) -> None:
        for record in self._records():
            assert (record["charged"] == "1") == (State(int(record["state"])) in COUNTED), record
        for tenant, sums in self._counted().items():
            kept: Any = self.run(self.valkey.hgetall(f"orchard:tenant:{tenant}"))
            for field in ("sandboxes", "cpu_milli", "memory_bytes"):
                assert int(kept.get(f"used_{field}".encode(), 0)) == sums[field], (tenant, field)

    @invariant()
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
def test_sums_never_drift(valkey_url: str) -> None:
    Queue.url = valkey_url
    run_state_machine_as_test(
        Queue,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
