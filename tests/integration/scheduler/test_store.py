"""The Lua scripts of records against a real Valkey: what is seen of a sandbox, rebuilt, listed and forgotten."""

import asyncio

import pytest
import redis.asyncio as redis

from services.common.errors import UnavailableError
from services.common.states import Reason, State
from services.scheduler.store import LeaseStore
from tests.integration.scheduler.records import (
    DAY,
    FAR_MS,
    create,
    delete,
    seen,
    started,
    state_of,
    wanted,
)


class TestObserve:
    async def test_ready_then_gone_after_a_delete(self, store: LeaseStore) -> None:
        record = wanted("a")
        await started(store, record)
        assert await store.observe(seen(record, State.READY, 5, ready_ms=77)) == "applied"
        found = await store.get(("t", "a"))
        assert found is not None
        assert (found.state, found.ready_ms, found.uid) == (State.READY, 77, "u1")
        assert await delete(store, ("t", "a"), "u1", Reason.REQUESTED) == "deleting"
        assert await store.observe(seen(record, State.DELETED, 6)) == "applied"
        assert await state_of(store, record) == (State.DELETED, Reason.REQUESTED)

    async def test_a_stale_event_changes_nothing(self, store: LeaseStore) -> None:
        record = wanted("a")
        await started(store, record)
        big = 7_000_000_000_000_000_001  # above 2^53: a float could not tell these apart
        assert await store.observe(seen(record, State.READY, big)) == "applied"
        assert await store.observe(seen(record, State.STARTING, big - 1)) == "old"
        assert await store.observe(seen(record, State.STARTING, big)) == "old"
        assert (await state_of(store, record))[0] is State.READY

    async def test_gone_without_a_delete_was_somebody_else(self, store: LeaseStore) -> None:
        record = wanted("a")
        await started(store, record)
        await store.observe(seen(record, State.DELETED, 9))
        assert await state_of(store, record) == (State.FAILED, Reason.DELETED_EXTERNALLY)

    async def test_ready_does_not_revive_what_is_being_deleted(self, store: LeaseStore) -> None:
        record = wanted("a")
        await started(store, record)
        await delete(store, ("t", "a"), "", Reason.REQUESTED)
        await store.observe(seen(record, State.READY, 5))
        assert (await state_of(store, record))[0] is State.DELETING

    async def test_an_event_of_another_create_is_ignored(self, store: LeaseStore) -> None:
        await started(store, wanted("a"))
        later = FAR_MS
        assert await store.observe(seen(wanted("a", request_id="other"), State.FAILED, 99, create_ms=later)) == "other"
        assert await store.observe(seen(wanted("a"), State.FAILED, 99, uid="u2")) == "other"
        assert (await state_of(store, wanted("a")))[0] is State.STARTING

    async def test_a_leftover_of_an_earlier_create_is_over(self, store: LeaseStore) -> None:
        await started(store, wanted("a"))
        assert await store.observe(seen(wanted("a", request_id="other"), State.READY, 99, create_ms=1)) == "ended"
        assert (await state_of(store, wanted("a")))[0] is State.STARTING

    async def test_an_unknown_sandbox_is_missing(self, store: LeaseStore) -> None:
        assert await store.observe(seen(wanted("a"), State.READY, 1)) == "missing"

    async def test_what_holds_a_start_up_is_shown_until_it_is_ready(self, store: LeaseStore) -> None:
        record = wanted("a")
        await started(store, record)
        told = []

        async def shown(revision: int, state: State, **more) -> None:
            await store.observe(seen(record, state, revision, **more))
            found = await store.get(("t", "a"))
            assert found is not None
            told.append((found.state, found.reason, found.message))

        await shown(5, State.STARTING, reason=Reason.UNSCHEDULABLE, message="no node")
        await shown(6, State.STARTING, message="being made")
        await shown(7, State.READY)
        await shown(8, State.STARTING, message="being made")
        assert told == [
            (State.STARTING, Reason.UNSCHEDULABLE, "no node"),
            (State.STARTING, Reason.UNSPECIFIED, "being made"),
            (State.READY, Reason.UNSPECIFIED, ""),
            (State.READY, Reason.UNSPECIFIED, ""),
        ]

    async def test_what_was_to_go_did_not_fail_on_its_way(self, store: LeaseStore) -> None:
        record = wanted("a")
        await started(store, record)
        await delete(store, ("t", "a"), "u1", Reason.REQUESTED)
        await store.observe(seen(record, State.STARTING, 5, reason=Reason.IMAGE_PULL, message="no image"))
        assert await state_of(store, record) == (State.DELETING, Reason.REQUESTED)
        await store.observe(seen(record, State.FAILED, 6, reason=Reason.NODE_LOST))
        assert await state_of(store, record) == (State.DELETED, Reason.REQUESTED)

    async def test_an_end_of_which_only_the_last_word_came_keeps_its_reason(self, store: LeaseStore) -> None:
        record = wanted("a")
        await started(store, record)
        await store.observe(seen(record, State.DELETED, 6, reason=Reason.NODE_LOST, message="node-7 is gone"))
        assert await state_of(store, record) == (State.FAILED, Reason.NODE_LOST)

    @pytest.mark.parametrize("state", [State.FAILED, State.DELETED])
    async def test_the_runtimes_own_end_of_a_life_is_an_expiry(self, store: LeaseStore, state: State) -> None:
        record = wanted("a")
        await started(store, record)
        await store.observe(seen(record, state, 6, reason=Reason.EXPIRED, message="DeadlineExceeded"))
        assert await state_of(store, record) == (State.DELETED, Reason.EXPIRED)

    async def test_the_end_is_final(self, store: LeaseStore) -> None:
        record = wanted("a")
        await started(store, record)
        await store.observe(seen(record, State.FAILED, 5, reason=Reason.OOM, message="out of memory"))
        assert await store.observe(seen(record, State.READY, 6)) == "ended"
        assert await state_of(store, record) == (State.FAILED, Reason.OOM)


class TestRebuild:
    async def test_a_lost_record_comes_back_with_its_request_id(self, store: LeaseStore) -> None:
        lost = seen(
            wanted("a"),
            State.READY,
            5,
            create_ms=1000,
            ready_ms=1500,
            expire_ms=4_000_000_000_000,
            spec=b"s",
            spec_hash="h",
        )
        assert await store.rebuild(lost, DAY, 2000)
        assert not await store.rebuild(lost, DAY, 2000)
        found = await store.get(("t", "a"))
        assert found is not None
        assert (found.state, found.uid, found.create_ms, found.ready_ms, found.expire_ms) == (
            State.READY,
            "u1",
            1000,
            1500,
            4_000_000_000_000,
        )
        assert await create(store, wanted("b", request_id="r-a")) == ("repeat", "a")
        assert await store.living() == [("t", "a")]
        assert await store.page("t", None, 10) == [(1000, "a")]

    async def test_an_emptied_store_is_noticed(self, store: LeaseStore, valkey_url: str) -> None:
        assert not await store.lost_everything()
        async with redis.Redis.from_url(valkey_url) as client:
            await client.flushall()
        assert await store.lost_everything()
        await store.mark_rebuilt()
        assert not await store.lost_everything()


class TestRest:
    async def test_pages_go_through_everything_once_newest_first(self, store: LeaseStore) -> None:
        for number in range(25):
            await create(store, wanted(f"a{number:02}"))
        found, before = [], None
        while page := await store.page("t", before, 4):
            found += [sandbox_id for _, sandbox_id in page]
            before = page[-1]
        assert sorted(found) == [f"a{number:02}" for number in range(25)]
        assert len(found) == 25

    async def test_a_page_leaves_out_nothing_because_something_goes_while_it_is_read(
        self, store: LeaseStore, valkey: redis.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        index = "orchard:index:t"
        await valkey.zadd(index, {"n2": 2000, "n1": 2000, **{f"o{number}": 1000 for number in range(9)}})
        own = store._redis
        real = own.zrevrangebyscore

        async def and_then_one_goes(*arguments, **options):
            rows = await real(*arguments, **options)
            await valkey.zrem(index, "n2")
            return rows

        monkeypatch.setattr(own, "zrevrangebyscore", and_then_one_goes)
        assert await store.page("t", (2000, "n1"), 3) == [(1000, "o8"), (1000, "o7"), (1000, "o6")]
        assert await store.page("t", (1000, "o6"), 9) == [(1000, f"o{number}") for number in range(5, -1, -1)]

    async def test_one_reconciler_at_a_time(self, store: LeaseStore) -> None:
        assert await store.elect("me", 600_000)
        assert not await store.elect("you", 600_000)
        assert await store.elect("me", 1)
        await asyncio.sleep(0.01)  # the store's own clock passes the term
        assert await store.elect("you", 600_000)

    async def test_changes_are_told(self, store: LeaseStore) -> None:
        connected = asyncio.Event()
        told: list[tuple[str, str]] = []

        async def listen() -> None:
            async for name in store.changes(connected.set):
                told.append(name)
                return

        listening = asyncio.ensure_future(listen())
        await asyncio.wait_for(connected.wait(), 110)
        await create(store, wanted("a"))
        await asyncio.wait_for(listening, 110)
        assert told == [("t", "a")]

    async def test_a_store_that_is_away_is_unavailable_and_names_no_driver(self) -> None:
        store = LeaseStore("unix:///nonexistent/socket")
        with pytest.raises(UnavailableError) as caught:
            await store.get(("t", "a"))
        assert caught.value.reason == "LEASE_STORE_UNAVAILABLE"
        assert "Error" not in caught.value.message
        await store.close()

    async def test_a_fault_of_a_script_does_not_read_as_a_store_that_is_away(self, store: LeaseStore) -> None:
        with pytest.raises(redis.ResponseError):
            await store.renew("last_heartbeat_ms", [("t",)])  # type: ignore[list-item]

    async def test_a_store_that_cannot_write_is_unavailable(self, store: LeaseStore, valkey: redis.Redis) -> None:
        await valkey.replicaof("127.0.0.1", 1)
        try:
            with pytest.raises(UnavailableError):
                await create(store, wanted("a"))
        finally:
            await valkey.replicaof("NO", "ONE")

    async def test_old_ends_are_forgotten(self, store: LeaseStore, valkey_url: str) -> None:
        await create(store, wanted("a"))
        await delete(store, ("t", "a"), "", Reason.REQUESTED)
        assert await store.sweep(100) == 0
        async with redis.Redis.from_url(valkey_url) as client:
            await client.zadd("orchard:ended", {"t/a": 1})
        assert await store.sweep(100) == 1
        assert await store.get(("t", "a")) is None
        assert await store.page("t", None, 10) == []
