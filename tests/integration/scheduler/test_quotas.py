"""Quotas of tenants in the queue, against a real Valkey."""

import asyncio
from dataclasses import replace

import pytest
import redis.asyncio as redis

from services.common.errors import InvalidArgumentError, ResourceExhaustedError
from services.common.quota import Quota
from services.common.states import Reason, State
from services.scheduler.records import Record, Terms
from services.scheduler.store import LeaseStore, OverQuotaError
from tests.integration.scheduler.pieces import Pieces, assemble
from tests.integration.scheduler.records import DAY, FAR_MS, milliseconds, seen, state_of, take, wanted

GIB = 1 << 30


async def queue(store: LeaseStore, *names: str, quota: Quota, tenant: str = "t", terms: Terms = DAY) -> None:
    for name in names:
        await store.create(wanted(name, tenant=tenant), terms, queue_limit=1000, quota=quota)


async def end(store: LeaseStore, name: str, tenant: str = "t") -> None:
    assert await store.finish((tenant, name), f"r-{name}", State.DELETED, Reason.REQUESTED, "")


async def taken(store: LeaseStore, count: int) -> list[str]:
    return [f"{name[0]}/{name[1]}" if (name := await take(store)) else "" for _ in range(count)]


class TestSandboxes:
    async def test_what_is_over_waits_and_says_why(self, store: LeaseStore) -> None:
        await queue(store, "a", "b", "c", quota=Quota(1, sandboxes=2))
        assert await taken(store, 3) == ["t/a", "t/b", ""]
        assert (await state_of(store, wanted("c")))[0] is State.QUEUED
        assert await store.waits_for("t") == "it waits for the tenant's quota of 2 sandboxes, of which 2 are taken"
        assert await store.queue_lengths() == {"t": 1}
        await end(store, "a")
        assert await taken(store, 2) == ["t/c", ""]
        assert await store.waits_for("t") == ""

    async def test_one_tenants_quota_holds_up_no_other(self, store: LeaseStore) -> None:
        await queue(store, *(f"a{n}" for n in range(5)), quota=Quota(1, sandboxes=1), tenant="small")
        await queue(store, *(f"b{n}" for n in range(5)), quota=Quota(), tenant="big")
        found = await taken(store, 7)
        assert sorted(found) == ["", *(f"big/b{n}" for n in range(5)), "small/a0"]

    async def test_a_sandbox_counts_from_its_start_to_its_end(self, store: LeaseStore) -> None:
        await queue(store, "a", "b", quota=Quota(1, sandboxes=1))
        assert await taken(store, 2) == ["t/a", ""]
        await store.started(("t", "a"), "r-a", "u1")
        await store.observe(seen(wanted("a"), State.READY, 5))
        await store.delete(("t", "a"), "", Reason.REQUESTED)
        assert await taken(store, 1) == [""]  # it is still there
        await store.observe(seen(wanted("a"), State.DELETED, 6))
        assert await taken(store, 1) == ["t/b"]

    @pytest.mark.parametrize("again", ["retaken", "released"])
    async def test_a_start_that_is_tried_again_counts_once(self, store: LeaseStore, again: str) -> None:
        await queue(store, "a", "b", "c", quota=Quota(1, sandboxes=2))
        assert await take(store, 1) == ("t", "a")
        if again == "released":
            await store.release(("t", "a"), "r-a", 0, "not now")
        await asyncio.sleep(0.01)  # the store's own clock passes the claim
        assert set(await taken(store, 3)) == {"t/a", "t/b", ""}

    async def test_what_leaves_the_head_of_the_queue_lets_the_next_go(self, store: LeaseStore) -> None:
        quota = Quota(1, memory_bytes=2 * GIB)
        await queue(store, "a", quota=quota, terms=replace(DAY, memory_bytes=GIB))
        await queue(store, "large", quota=quota, terms=replace(DAY, memory_bytes=2 * GIB))
        await queue(store, "c", quota=quota, terms=replace(DAY, memory_bytes=GIB))
        # Order holds: what is small does not keep what is large waiting for ever.
        assert await taken(store, 2) == ["t/a", ""]
        await store.delete(("t", "large"), "", Reason.REQUESTED)
        assert await taken(store, 2) == ["t/c", ""]

    async def test_a_higher_priority_may_fit_where_the_first_did_not(self, store: LeaseStore) -> None:
        quota = Quota(1, memory_bytes=2 * GIB)
        await queue(store, "a", quota=quota, terms=replace(DAY, memory_bytes=GIB))
        await queue(store, "large", quota=quota, terms=replace(DAY, memory_bytes=2 * GIB))
        assert await taken(store, 2) == ["t/a", ""]
        await queue(store, "urgent", quota=quota, terms=replace(DAY, memory_bytes=GIB, priority=5))
        assert await taken(store, 2) == ["t/urgent", ""]

    async def test_room_wakes_whoever_takes_creates(self, store: LeaseStore) -> None:
        connected = asyncio.Event()

        async def woken() -> None:
            async for name in store.changes(connected.set):
                if name == ("t", ""):
                    return

        await queue(store, "a", "b", quota=Quota(1, sandboxes=1))
        assert await taken(store, 2) == ["t/a", ""]
        listening = asyncio.ensure_future(woken())
        await asyncio.wait_for(connected.wait(), 110)
        await end(store, "a")
        await asyncio.wait_for(listening, 110)


class TestSums:
    async def test_cpus_and_memory_are_added_up(self, store: LeaseStore) -> None:
        terms = replace(DAY, cpu_milli=1500, memory_bytes=GIB)
        await queue(store, *"abcd", quota=Quota(1, cpu=4, memory_bytes=100 * GIB), terms=terms)
        assert await taken(store, 3) == ["t/a", "t/b", ""]
        assert await store.waits_for("t") == "it waits for the tenant's quota of 4 CPUs, of which 3 are taken"
        await store.note_quotas({"t": Quota(2, memory_bytes=int(2.5 * GIB))})
        assert await taken(store, 1) == [""]
        assert "2.5 GiB of memory, of which 2 are taken" in await store.waits_for("t")
        await store.note_quotas({"t": Quota(3)})
        assert await taken(store, 3) == ["t/c", "t/d", ""]

    async def test_what_is_not_limited_counts_nothing(self, store: LeaseStore) -> None:
        await queue(store, *"ab", quota=Quota(1, cpu=1, memory_bytes=GIB))
        assert await taken(store, 2) == ["t/a", "t/b"]

    @pytest.mark.parametrize(
        ("quota", "what", "bound"),
        [
            (Quota(1, sandboxes=0), "sandboxes", 0),
            (Quota(1, cpu=1.9), "cpu", 1900),
            (Quota(1, memory_bytes=GIB - 1), "memory", GIB - 1),
            (Quota(1, sandboxes=1, cpu=1), "cpu", 1000),
        ],
    )
    async def test_what_alone_is_over_is_refused(self, store: LeaseStore, quota: Quota, what: str, bound: int) -> None:
        await queue(store, "small", quota=Quota())
        assert await taken(store, 1) == ["t/small"]
        with pytest.raises(OverQuotaError) as caught:
            await queue(store, "a", quota=quota, terms=replace(DAY, cpu_milli=2000, memory_bytes=GIB))
        assert (caught.value.what, caught.value.bound) == (what, bound)
        assert await store.get(("t", "a")) is None

    async def test_a_repeat_gets_its_first_answer_whatever_the_quota_is_now(self, store: LeaseStore) -> None:
        await queue(store, "a", quota=Quota(1, sandboxes=1))
        outcome, _id, _now = await store.create(wanted("a"), DAY, queue_limit=9, quota=Quota(2, sandboxes=0))
        assert outcome == "repeat"

    async def test_a_quota_lowered_below_a_queued_create_ends_it(self, store: LeaseStore) -> None:
        await queue(store, "a", quota=Quota(1), terms=replace(DAY, cpu_milli=2000))
        await queue(store, "b", quota=Quota(2, cpu=1), terms=replace(DAY, cpu_milli=1000))
        assert await taken(store, 2) == ["t/b", ""]
        assert await state_of(store, wanted("a")) == (State.FAILED, Reason.QUOTA)
        found = await store.get(("t", "a"))
        assert found is not None
        assert found.message == "it alone is over the tenant's quota of 1 CPUs"


class TestRevisions:
    async def test_the_newest_holds(self, store: LeaseStore) -> None:
        await queue(store, "a", quota=Quota(5, sandboxes=1))
        # A gateway that is behind, and one that never read the table.
        await queue(store, "b", quota=Quota(4, sandboxes=9))
        await queue(store, "c", quota=Quota())
        await store.note_quotas({"t": Quota(5, sandboxes=9), "other": Quota(1)})
        assert await taken(store, 2) == ["t/a", ""]
        await store.note_quotas({"t": Quota(6, sandboxes=2)})
        assert await taken(store, 2) == ["t/b", ""]


class TestRate:
    async def test_creates_leave_the_queue_at_the_rate(self, store: LeaseStore, valkey: redis.Redis) -> None:
        await queue(store, *(f"a{n}" for n in range(25)), quota=Quota(1, creates_per_second=10))
        began = await milliseconds(valkey)
        # All in one script, and so in one moment.
        first = await store.take(30_000, 25)
        assert isinstance(first, list)
        assert [one.sandbox_id for one in first] == [f"a{n}" for n in range(10)]
        assert await store.waits_for("t") == "it waits for the tenant's quota of 10 creates a second"
        await self._pass(valkey, -3_600_000)  # so that no time of a test comes near it
        pause = await store.take(1000)
        assert isinstance(pause, float)
        assert 1800 < pause <= 3600.1
        await self._pass(valkey, 3_600_300)
        second = await store.take(30_000, 25)
        assert isinstance(second, list)
        assert 3 <= len(second) <= 3 + (await milliseconds(valkey) - began) // 100

    async def _pass(self, valkey: redis.Redis, passed_ms: int) -> None:
        """As if so many milliseconds had passed."""
        await valkey.zincrby("orchard:parked", -passed_ms, "t")
        await valkey.hincrbyfloat("orchard:tenant:t", "next_ms", -passed_ms)

    async def test_a_slow_rate_lets_one_go_at_once(self, store: LeaseStore) -> None:
        await queue(store, "a", "b", quota=Quota(1, creates_per_second=0.001))
        assert await taken(store, 2) == ["t/a", ""]
        pause = await store.take(1000)
        assert isinstance(pause, float)
        assert 900 < pause <= 1000

    async def test_room_does_not_hurry_a_rate(self, store: LeaseStore) -> None:
        await queue(store, "a", "b", quota=Quota(1, sandboxes=9, creates_per_second=0.001))
        assert await taken(store, 2) == ["t/a", ""]
        await end(store, "a")
        assert await taken(store, 1) == [""]
        await store.note_quotas({"t": Quota(2, sandboxes=9)})
        assert await taken(store, 1) == ["t/b"]

    async def test_another_schedulers_starts_go_on_meanwhile(self, store: LeaseStore) -> None:
        """A claim that ran out is taken although no tenant's turn comes."""
        await queue(store, "a", "b", quota=Quota(1, sandboxes=1))
        assert await take(store, 1) == ("t", "a")
        await asyncio.sleep(0.01)  # the store's own clock passes the claim
        assert await taken(store, 2) == ["t/a", ""]


class TestRebuilt:
    async def test_what_the_runtime_has_counts_again(self, store: LeaseStore, valkey: redis.Redis) -> None:
        quota, terms = Quota(1, cpu=3), replace(DAY, cpu_milli=1000)
        await queue(store, *"ab", quota=quota, terms=terms)
        assert await taken(store, 2) == ["t/a", "t/b"]
        await valkey.flushall()
        await queue(store, *"cd", quota=quota, terms=terms)
        # What counts is not known yet.
        assert await taken(store, 2) == ["", ""]
        for name in "ab":
            lost = seen(wanted(name), State.READY, 5, uid=f"u-{name}", create_ms=1, expire_ms=FAR_MS)
            for _ in range(2):
                await store.rebuild(lost, terms, 2)
                await store.observe(lost)
        await store.mark_rebuilt()
        assert await taken(store, 2) == ["t/c", ""]

    async def test_one_that_runs_while_its_create_is_queued_again(self, store: LeaseStore, valkey: redis.Redis) -> None:
        await queue(store, "a", quota=Quota(1, sandboxes=1))
        await taken(store, 1)
        await valkey.flushall()
        await store.mark_rebuilt()
        await queue(store, "a", "b", quota=Quota(1, sandboxes=1))  # repeated before the watcher said anything
        await store.observe(seen(wanted("a"), State.READY, 5))
        assert await store.queue_lengths() == {"t": 1}
        assert await taken(store, 2) == ["", ""]
        await end(store, "a")
        assert await taken(store, 2) == ["t/b", ""]


@pytest.fixture
async def pieces(store: LeaseStore) -> Pieces:
    return assemble(store)


class TestCalls:
    async def _create(self, pieces: Pieces, name: str, quota: Quota) -> Record:
        return await pieces.scheduler.create(
            "t", name, f"r-{name}", b"spec", "h", expects_secret_env=False, quota=quota
        )

    async def test_a_refusal_names_field_and_bound(self, store: LeaseStore) -> None:
        pieces = assemble(store, replace(DAY, cpu_milli=4000))
        with pytest.raises(ResourceExhaustedError) as caught:
            await self._create(pieces, "a", Quota(1, cpu=2))
        assert caught.value.reason == "TENANT_QUOTA"
        assert caught.value.metadata["field"] == "spec.resources.cpu"
        assert "2 CPUs" in caught.value.message

    async def test_every_queued_sandbox_says_what_it_waits_for(self, pieces: Pieces) -> None:
        for name in "abc":
            await self._create(pieces, name, Quota(1, sandboxes=1))
        assert await taken(pieces.store, 2) == ["t/a", ""]
        for name in "bc":
            assert "1 sandboxes" in (await pieces.scheduler.get("t", name)).message
        listed, _after = await pieces.scheduler.list_page(
            "t", states=frozenset(), labels={}, labels_of=lambda _spec: {}, before=None, count=10
        )
        assert {one.sandbox_id: bool(one.message) for one in listed} == {"a": False, "b": True, "c": True}
        told = pieces.scheduler.wait("t", "c", until_terminal=False, stopping=asyncio.Event())
        assert "1 sandboxes" in (await anext(told)).message
        await told.aclose()

    async def test_the_end_cannot_be_moved_beyond_the_longest_life(self, pieces: Pieces) -> None:
        made = await self._create(pieces, "a", Quota(1, maximum_lifetime_ms=3_600_000))
        assert made.lifetime_ms == 3_600_000
        await pieces.scheduler.update("t", "a", 3_000_000)
        with pytest.raises(InvalidArgumentError) as caught:
            await pieces.scheduler.update("t", "a", 3_700_000)
        assert caught.value.violations[0].field == "ttl"

    async def test_a_dispatcher_starts_what_room_was_made_for(self, pieces: Pieces) -> None:
        changes = asyncio.ensure_future(pieces.reconciler.run_changes())
        try:
            async with pieces.dispatching():
                for name in "abc":
                    await self._create(pieces, name, Quota(1, sandboxes=1))
                for name in "abc":
                    assert await asyncio.wait_for(pieces.runtime.created.get(), 110) == name
                    await end(pieces.store, name)
        finally:
            changes.cancel()
            await asyncio.gather(changes, return_exceptions=True)
