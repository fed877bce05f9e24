"""What each call does, with a real Valkey."""

import asyncio
from collections.abc import Mapping

import pytest
import redis.asyncio as redis

from services.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from services.common.states import Reason, State
from services.scheduler import service
from services.scheduler.records import Record
from services.scheduler.store import LeaseStore
from tests.integration.scheduler.pieces import Pieces, assemble
from tests.integration.scheduler.records import DAY, FAR_MS, seen, started, take, wanted


@pytest.fixture
async def pieces(store: LeaseStore, monkeypatch: pytest.MonkeyPatch) -> Pieces:
    # What a test takes away does not come back.
    monkeypatch.setattr(service, "_REAPPEAR_SECONDS", 0.05)
    return assemble(store)


def no_labels(_spec: bytes) -> Mapping[str, str]:
    return {}


async def page(
    pieces: Pieces, before: tuple[int, str] | None, states: frozenset[State] = frozenset()
) -> tuple[list[Record], tuple[int, str] | None]:
    return await pieces.scheduler.list_page(
        "t", states=states, labels={}, labels_of=no_labels, before=before, count=1000
    )


class TestWhatNobodyKnows:
    """An emptied store has forgotten; while the watcher is away nobody can say what there is."""

    @pytest.mark.parametrize("call", ["get", "delete", "heartbeat", "create", "update"])
    async def test_not_known_is_not_gone(self, pieces: Pieces, valkey: redis.Redis, call: str) -> None:
        await valkey.flushall()
        pieces.cache.live = False
        with pytest.raises(UnavailableError) as caught:
            await self._call(pieces, call)
        assert caught.value.reason == "LEASE_STORE_REBUILDING"
        assert await pieces.store.get(("t", "a")) is None

    @pytest.mark.parametrize("live", [True, False])
    async def test_gone_is_gone(self, pieces: Pieces, live: bool) -> None:
        pieces.cache.live = live  # if not, the store itself knows
        for call in ("get", "delete", "update"):
            with pytest.raises(NotFoundError):
                await self._call(pieces, call)
        assert await self._call(pieces, "heartbeat") == ["a"]
        await self._call(pieces, "create")

    async def _call(self, pieces: Pieces, call: str) -> object:
        match call:
            case "get":
                return await pieces.scheduler.get("t", "a")
            case "delete":
                return await pieces.scheduler.delete("t", "a", "")
            case "heartbeat":
                return await pieces.scheduler.heartbeat("t", ["a"])
            case "update":
                return await pieces.scheduler.update("t", "a", 60_000)
            case _:
                return await pieces.create("a")

    async def test_a_wait_does_not_call_a_forgotten_sandbox_lost(self, pieces: Pieces, valkey: redis.Redis) -> None:
        await pieces.create("a")
        told = pieces.scheduler.wait("t", "a", until_terminal=False, stopping=asyncio.Event())
        assert (await anext(told)).state is State.QUEUED
        await valkey.flushall()
        pieces.cache.live = False
        pieces.scheduler.notify_all()
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(anext(told), 110)

    @pytest.mark.parametrize("call", ["get", "delete", "heartbeat", "create", "update"])
    async def test_what_the_runtime_makes_meanwhile_is_not_gone(
        self, pieces: Pieces, valkey: redis.Redis, call: str
    ) -> None:
        answer, asked = asyncio.Event(), asyncio.Event()

        async def slow(_record: Record) -> None:
            asked.set()
            await answer.wait()

        pieces.runtime.creating = slow
        async with pieces.dispatching():
            created = await pieces.create("a")
            await asyncio.wait_for(asked.wait(), 110)
            await self._call(pieces, "get")
            assert await self._call(pieces, "heartbeat") == []
            await valkey.flushall()
            with pytest.raises(UnavailableError) as caught:
                await self._call(pieces, call)
            assert caught.value.reason == "LEASE_STORE_REBUILDING"
            answer.set()
            # Its record is back before the watcher has named it.
            async with asyncio.timeout(110):
                while pieces.dispatcher.starting:
                    await asyncio.sleep(0)
            found = await pieces.scheduler.get("t", "a")
        assert (found.state, found.uid, found.expire_ms) == (State.STARTING, "u-a", created.expire_ms)

    @pytest.mark.parametrize(
        ("state", "end"),
        [
            (State.QUEUED, (State.FAILED, Reason.QUEUE_LOST)),
            (State.STARTING, (State.FAILED, Reason.QUEUE_LOST)),
            (State.READY, (State.FAILED, Reason.DELETED_EXTERNALLY)),
            (State.DELETING, (State.DELETED, Reason.REQUESTED)),
        ],
    )
    async def test_a_wait_tells_what_was_lost(
        self, pieces: Pieces, valkey: redis.Redis, state: State, end: tuple[State, Reason]
    ) -> None:
        """Neither the store nor the runtime has it any more."""
        await pieces.create("a")
        if state is not State.QUEUED:
            await take(pieces.store)
        if state in (State.READY, State.DELETING):
            await pieces.store.observe(seen(wanted("a"), State.READY, 5))
        if state is State.DELETING:
            await pieces.store.delete(("t", "a"), "", Reason.REQUESTED)
        told = pieces.scheduler.wait("t", "a", until_terminal=True, stopping=asyncio.Event())
        assert (await anext(told)).state is state
        await valkey.flushall()
        pieces.scheduler.notify_all()
        last = await asyncio.wait_for(anext(told), 110)
        assert (last.state, last.reason) == end
        assert last.end_ms


class TestHeartbeat:
    async def test_what_is_being_deleted_is_not_alive(self, pieces: Pieces) -> None:
        await started(pieces.store, wanted("a"))
        pieces.cache.tell(seen(wanted("a"), State.READY, 5))
        assert await pieces.scheduler.heartbeat("t", ["a"]) == []
        await pieces.store.delete(("t", "a"), "", Reason.EXPIRED)  # the runtime has not begun yet
        assert await pieces.scheduler.heartbeat("t", ["a"]) == ["a"]

    async def test_a_forgotten_sandbox_is_alive(self, pieces: Pieces) -> None:
        pieces.cache.tell(seen(wanted("a"), State.READY, 5, create_ms=1, expire_ms=4_000_000_000_000))
        assert await pieces.scheduler.heartbeat("t", ["b", "a"]) == ["b"]
        assert (await pieces.scheduler.get("t", "a")).state is State.READY


class TestUpdate:
    async def test_an_ended_sandbox_says_so(self, pieces: Pieces) -> None:
        await started(pieces.store, wanted("a"))
        await pieces.store.observe(seen(wanted("a"), State.FAILED, 5))
        with pytest.raises(FailedPreconditionError) as caught:
            await pieces.scheduler.update("t", "a", 60_000)
        assert caught.value.reason == "SANDBOX_ENDED"
        assert pieces.runtime.deadlines.empty()

    async def test_one_that_the_runtime_has_no_longer_has_ended(self, pieces: Pieces) -> None:
        async def gone(uid: str) -> None:
            raise NotFoundError(f"no sandbox {uid}")

        pieces.runtime.updating = gone
        await started(pieces.store, wanted("a"))
        with pytest.raises(FailedPreconditionError) as caught:
            await pieces.scheduler.update("t", "a", 60_000)
        assert caught.value.reason == "SANDBOX_ENDED"

    async def test_one_that_started_just_before_gets_the_new_deadline(self, pieces: Pieces) -> None:
        record = await pieces.create("a")
        await take(pieces.store)
        update = pieces.store.update

        async def started_first(name: tuple[str, str], expire_ms: int) -> str:
            outcome, old_ms = await pieces.store.started(name, record.request_id, "u-a")
            assert (outcome, old_ms) == ("started", record.expire_ms)
            return await update(name, expire_ms)

        pieces.store.update = started_first  # type: ignore[method-assign]
        updated = await pieces.scheduler.update("t", "a", 3_600_000)
        assert pieces.runtime.deadlines.get_nowait() == ("u-a", updated.expire_ms)

    async def test_one_that_starts_meanwhile_gets_the_new_deadline(self, pieces: Pieces) -> None:
        answer, asked = asyncio.Event(), asyncio.Event()

        async def slow(_record: Record) -> None:
            asked.set()
            await answer.wait()

        pieces.runtime.creating = slow
        async with pieces.dispatching():
            await pieces.create("a")
            await asyncio.wait_for(asked.wait(), 110)
            updated = await pieces.scheduler.update("t", "a", 3_600_000)
            assert updated.expire_ms < updated.create_ms + DAY.ttl_ms
            answer.set()
            told = await asyncio.wait_for(pieces.runtime.deadlines.get(), 110)
        assert told == ("u-a", updated.expire_ms)


class TestCreate:
    async def test_a_late_repeat_is_told_that_its_sandbox_ended(self, pieces: Pieces) -> None:
        await pieces.create("a", "r1")
        await pieces.scheduler.delete("t", "a", "")
        await pieces.create("a", "r2")
        with pytest.raises(AlreadyExistsError) as caught:
            await pieces.create("a", "r1")
        assert caught.value.reason == "REQUEST_ENDED"


class TestList:
    async def test_a_store_that_was_emptied_lists_what_the_runtime_has(
        self, pieces: Pieces, valkey: redis.Redis
    ) -> None:
        for number in range(100):
            lost = seen(wanted(f"a{number}"), State.READY, 5, uid=f"u{number}", create_ms=number + 1, expire_ms=FAR_MS)
            pieces.cache.tell(lost)
        assert await page(pieces, None) == ([], None)
        await valkey.flushall()
        records, before = await page(pieces, None)
        assert ([record.sandbox_id for record in records], before) == ([f"a{n}" for n in range(99, -1, -1)], None)
        assert {record.state for record in records} == {State.READY}
        await valkey.flushall()
        pieces.cache.live = False
        with pytest.raises(UnavailableError) as caught:
            await page(pieces, None)
        assert caught.value.reason == "LEASE_STORE_REBUILDING"

    async def test_a_page_fits_a_message(self, pieces: Pieces) -> None:
        for number in range(10):
            await pieces.create(f"a{number}", spec=bytes(300_000))
        await pieces.create("big", spec=bytes(3_000_000))
        found: list[str] = []
        before: tuple[int, str] | None = None
        while True:
            records, before = await page(pieces, before)
            assert len(records) == 1 or sum(len(record.spec) for record in records) <= 1 << 20
            found += [record.sandbox_id for record in records]
            if before is None:
                break
        assert sorted(found) == sorted([*(f"a{number}" for number in range(10)), "big"])

    async def test_a_filter_that_matches_little_ends_its_page_in_time(
        self, pieces: Pieces, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(service, "_LIST_LOOKED_AT", 10)
        for number in range(25):
            await pieces.create(f"a{number:02}")
        assert (await take(pieces.store)) == ("t", "a00")  # the oldest, so the last that is looked at
        starting = frozenset({State.STARTING})
        records, before = await page(pieces, None, starting)
        assert (records, before is not None) == ([], True)
        pages = 1
        while before is not None:
            records, before = await page(pieces, before, starting)
            pages += 1
        assert (pages, [record.sandbox_id for record in records]) == (3, ["a00"])
