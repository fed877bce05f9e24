"""The Lua scripts of creates and of the queue against a real Valkey."""

import asyncio
from dataclasses import replace

import redis.asyncio as redis

from services.common.states import Reason, State
from services.scheduler.store import LeaseStore
from tests.integration.scheduler.records import (
    DAY,
    FAR_MS,
    create,
    delete,
    long_ago,
    state_of,
    take,
    wanted,
)


class TestCreate:
    async def test_a_create_is_queued_whole(self, store: LeaseStore) -> None:
        record = wanted("a", spec=b"\x00\xff")
        assert await create(store, record) == ("created", "a")
        found = await store.get(("t", "a"))
        assert found is not None
        assert (found.state, found.spec, found.request_id, found.uid) == (State.QUEUED, b"\x00\xff", "r-a", "")
        assert found.expire_ms - found.create_ms == DAY.ttl_ms

    async def test_a_repeat_gives_the_first_answer_also_under_another_generated_id(self, store: LeaseStore) -> None:
        await create(store, wanted("a", request_id="r"))
        assert await create(store, wanted("b", request_id="r")) == ("repeat", "a")
        assert await store.get(("t", "b")) is None

    async def test_a_request_id_with_another_spec(self, store: LeaseStore) -> None:
        await create(store, wanted("a", request_id="r"))
        assert await create(store, wanted("a", request_id="r", spec_hash="other")) == ("request_conflict", "a")

    async def test_an_id_that_lives_is_taken_in_its_tenant_alone(self, store: LeaseStore) -> None:
        await create(store, wanted("a"))
        assert await create(store, wanted("a", request_id="other")) == ("taken", "a")
        assert await create(store, wanted("a", tenant="t2", request_id="other")) == ("created", "a")

    async def test_an_id_is_free_again_after_its_end(self, store: LeaseStore) -> None:
        await create(store, wanted("a"))
        assert await delete(store, ("t", "a"), "", Reason.REQUESTED) == "ended"
        assert await create(store, wanted("a", request_id="second")) == ("created", "a")
        assert (await state_of(store, wanted("a")))[0] is State.QUEUED

    async def test_a_request_id_is_known_while_its_sandbox_lives(self, store: LeaseStore, valkey: redis.Redis) -> None:
        await create(store, wanted("a", request_id="r"))
        await valkey.delete("orchard:request:t:r")  # as after 24 h
        assert await create(store, wanted("a", request_id="r")) == ("repeat", "a")
        assert await create(store, wanted("a", request_id="r", spec_hash="other")) == ("request_conflict", "a")
        assert await create(store, wanted("a", request_id="other")) == ("taken", "a")

    async def test_a_late_repeat_is_not_given_somebody_elses_sandbox(self, store: LeaseStore) -> None:
        await create(store, wanted("a", request_id="r1"))
        await delete(store, ("t", "a"), "", Reason.REQUESTED)
        assert await create(store, wanted("a", request_id="r1")) == ("repeat", "a")  # its own end
        await create(store, wanted("a", request_id="r2"))
        assert await create(store, wanted("a", request_id="r1")) == ("request_ended", "a")
        assert await create(store, wanted("a", request_id="r2")) == ("repeat", "a")

    async def test_the_queue_has_a_bound(self, store: LeaseStore) -> None:
        await create(store, wanted("a"), queue_limit=1)
        assert (await create(store, wanted("b"), queue_limit=1))[0] == "queue_full"
        assert await store.get(("t", "b")) is None

    async def test_concurrent_repeats_make_one(self, store: LeaseStore) -> None:
        outcomes = await asyncio.gather(*(create(store, wanted(f"a{n}", request_id="r")) for n in range(50)))
        assert sorted(outcome for outcome, _ in outcomes) == ["created"] + ["repeat"] * 49
        assert len({found for _, found in outcomes}) == 1


class TestQueue:
    async def test_priority_then_arrival(self, store: LeaseStore) -> None:
        for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1000), ("e", 1000)):
            await create(store, wanted(name), replace(DAY, priority=priority))
        taken = [await take(store, 30_000) for _ in range(6)]
        assert taken == [("t", "e"), ("t", "b"), ("t", "a"), ("t", "c"), ("t", "d"), None]

    async def test_tenants_take_turns(self, store: LeaseStore) -> None:
        for number in range(4):
            await create(store, wanted(f"a{number}", tenant="big"))
        await create(store, wanted("b0", tenant="small"))
        taken = [await take(store, 30_000) for _ in range(5)]
        assert [name and name[0] for name in taken] == ["big", "small", "big", "big", "big"]

    async def test_each_create_is_taken_once(self, store: LeaseStore) -> None:
        for number in range(30):
            await create(store, wanted(f"a{number}"))
        taken = await asyncio.gather(*(take(store, 30_000) for _ in range(60)))
        assert len([name for name in taken if name]) == 30 == len({name for name in taken if name})

    async def test_a_claim_that_ran_out_is_taken_again(self, store: LeaseStore) -> None:
        await create(store, wanted("a"))
        assert await take(store, 1) == ("t", "a")
        await asyncio.sleep(0.01)  # the store's own clock passes the claim
        assert await take(store, 30_000) == ("t", "a")
        assert await take(store, 30_000) is None

    async def test_creates_that_are_put_off_do_not_keep_others_from_starting(
        self, store: LeaseStore, valkey: redis.Redis
    ) -> None:
        for number in range(6):
            await create(store, wanted(f"stale{number}"))
            await take(store)
        await valkey.zadd("orchard:claimed", {f"t/stale{number}": 1 for number in range(6)})
        for number in range(6):
            await create(store, wanted(f"fresh{number}"))
        taken = [name[1] for name in [await take(store) for _ in range(12)] if name]
        assert len(set(taken)) == 12
        assert sum(name.startswith("fresh") for name in taken[:6]) == 3
        assert await take(store) is None

    async def test_a_start_that_is_put_off_says_why_and_ends_with_its_start_timeout(
        self, store: LeaseStore, valkey: redis.Redis
    ) -> None:
        record = wanted("a")
        await create(store, record, replace(DAY, start_timeout_ms=60_000))
        await take(store)
        assert not await store.release(("t", "a"), "another request", 0, "no space")
        assert not await store.release(("t", "a"), record.request_id, 0, "no space")
        found = await store.get(("t", "a"))
        assert found is not None
        assert (found.state, found.message) == (State.STARTING, "no space")
        await asyncio.sleep(0.01)  # the store's own clock passes the claim
        assert await take(store) == ("t", "a")
        await long_ago(valkey, "start_ms", 60_001)
        assert await store.release(("t", "a"), record.request_id, 0, "still no space")
        assert await state_of(store, record) == (State.FAILED, Reason.UNSCHEDULABLE)
        found = await store.get(("t", "a"))
        assert found is not None
        assert "still no space" in found.message
        assert await take(store) is None

    async def test_what_was_started_and_is_no_longer_wanted(self, store: LeaseStore, valkey: redis.Redis) -> None:
        record = wanted("a")
        await create(store, record)
        await take(store)
        assert (await store.started(("t", "a"), "another request", "u1"))[0] == "unwanted"
        assert await store.update(("t", "a"), FAR_MS) == "updated"
        assert await store.started(("t", "a"), record.request_id, "u1") == ("started", FAR_MS)
        await delete(store, ("t", "a"), "", Reason.REQUESTED)
        assert (await store.started(("t", "a"), record.request_id, "u1"))[0] == "unwanted"
        await valkey.flushall()
        assert await store.started(("t", "a"), record.request_id, "u1") == ("missing", 0)

    async def test_one_deleted_in_the_queue_is_never_taken(self, store: LeaseStore) -> None:
        await create(store, wanted("a"))
        assert await delete(store, ("t", "a"), "", Reason.REQUESTED) == "ended"
        assert await state_of(store, wanted("a")) == (State.DELETED, Reason.REQUESTED)
        assert await take(store, 30_000) is None
        assert await store.queue_lengths() == {}
