"""Starts, deletes and reconciling, with a real Valkey."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio as redis

from services.common.errors import AlreadyExistsError, UnavailableError
from services.common.quota import Quota
from services.common.states import Reason, State
from services.common.watch_cache import clock_ms
from services.scheduler.records import Incarnation, Record
from services.scheduler.store import LeaseStore
from tests.integration.scheduler.pieces import Pieces, assemble
from tests.integration.scheduler.records import DAY, FAR_MS, create, seen, started, state_of, take, wanted

GRACE_MS = 20_000


@pytest.fixture
async def pieces(store: LeaseStore) -> Pieces:
    return assemble(store)


async def until(pieces: Pieces, record: Record, state: State) -> Record:
    """Wait for a state; its changes are told by the store."""
    connected = asyncio.Event()

    async def follow() -> None:
        async for name in pieces.store.changes(connected.set):
            pieces.scheduler.notify(name)

    following = asyncio.ensure_future(follow())
    try:
        async with asyncio.timeout(110):
            await connected.wait()
            async for now in pieces.scheduler.wait(
                record.tenant, record.sandbox_id, until_terminal=True, stopping=asyncio.Event()
            ):
                if now.state is state:
                    return now
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    raise AssertionError(now)


class TestStarts:
    async def test_a_store_emptied_during_a_start_costs_nothing(self, pieces: Pieces, valkey: redis.Redis) -> None:
        """What was accepted goes on: the watcher's word brings its record back."""

        async def emptied(_record: Record) -> None:
            await valkey.flushall()

        noted, note = asyncio.Event(), pieces.store.started

        async def started_then_told(*what: Any, **more: Any) -> tuple[str, int]:
            outcome = await note(*what, **more)
            noted.set()
            return outcome

        pieces.runtime.creating = emptied
        pieces.store.started = started_then_told  # type: ignore[method-assign]
        async with pieces.dispatching():
            record = await pieces.create("a")
            await asyncio.wait_for(noted.wait(), 110)
            # One worker deletes in order: were "u-a" deleted, it would come first.
            pieces.dispatcher.delete_soon(Incarnation("t", "b", "u-b"))
            assert await asyncio.wait_for(pieces.runtime.deleted.get(), 110) == "u-b"
        assert pieces.runtime.deleted.empty()
        await pieces.scheduler.rebuild(
            seen(record, State.READY, 5, uid="u-a", create_ms=record.create_ms, expire_ms=FAR_MS)
        )
        assert await state_of(pieces.store, record) == (State.READY, Reason.UNSPECIFIED)

    async def test_nothing_is_started_before_it_is_known_what_counts(
        self, pieces: Pieces, valkey: redis.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those that run when the store is emptied count too, and are known to with the next snapshot."""
        monkeypatch.setattr("services.scheduler.reconcile._RECONCILE_SECONDS", 3600)
        pieces.cache.tell(seen(wanted("runs"), State.READY, 5, create_ms=1, expire_ms=FAR_MS))
        await valkey.flushall()
        quota = Quota(1, sandboxes=2)
        for name in ("a", "b"):
            await pieces.scheduler.create("t", name, f"r-{name}", b"", "h", expects_secret_env=False, quota=quota)
        assert await pieces.store.take(1) == math.inf
        pieces.cache.live = False
        rounds = asyncio.ensure_future(pieces.reconciler.run_rounds())
        try:
            async with pieces.dispatching():
                await asyncio.sleep(0)
                pieces.cache.live = True
                pieces.reconciler.synced()
                assert await asyncio.wait_for(pieces.runtime.created.get(), 110) == "a"
                assert await pieces.store.waits_for("t") or await pieces.store.take(1) == math.inf
        finally:
            rounds.cancel()
            await asyncio.gather(rounds, return_exceptions=True)
        assert (await state_of(pieces.store, wanted("b")))[0] is State.QUEUED

    async def test_a_store_that_loses_its_last_moments_during_a_start_costs_nothing(
        self, pieces: Pieces, valkey: redis.Redis
    ) -> None:
        """It is left with the ended sandbox that had the id before."""
        await pieces.create("a", "before")
        await pieces.scheduler.delete("t", "a", "")
        await valkey.hset("orchard:sandbox:t:a", "create_ms", "1")
        kept = {key: await valkey.dump(key) for key in await valkey.keys()}

        async def loses(_record: Record) -> None:
            await valkey.flushall()
            for key, value in kept.items():
                await valkey.restore(key, 0, value)

        pieces.runtime.creating = loses
        async with pieces.dispatching():
            record = await pieces.create("a", "lost")
            async with asyncio.timeout(110):
                while (found := await pieces.store.get(("t", "a"))) is None or found.uid != "u-a":
                    await asyncio.sleep(0.005)
        assert (found.request_id, found.state, found.create_ms) == ("lost", State.STARTING, record.create_ms)
        assert pieces.runtime.deleted.empty()

    async def test_what_was_deleted_while_it_was_made_is_removed(self, pieces: Pieces) -> None:
        async def deleted(record: Record) -> None:
            await pieces.store.delete((record.tenant, record.sandbox_id), "", Reason.REQUESTED)

        pieces.runtime.creating = deleted
        async with pieces.dispatching():
            await pieces.create("a")
            assert await asyncio.wait_for(pieces.runtime.deleted.get(), 110) == "u-a"

    async def test_a_runtime_that_refuses_for_ever_ends_the_create(self, store: LeaseStore) -> None:
        pieces = assemble(store, replace(DAY, start_timeout_ms=1))

        async def full(_record: Record) -> None:
            raise UnavailableError("the node daemon cannot do it now: no space")

        pieces.runtime.creating = full
        async with pieces.dispatching():
            ended = await until(pieces, await pieces.create("a"), State.FAILED)
        assert ended.reason is Reason.UNSCHEDULABLE
        assert "no space" in ended.message


class TestDeletes:
    async def test_what_was_put_off_is_removed_also_where_the_store_was_emptied_meanwhile(
        self, pieces: Pieces, valkey: redis.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("services.scheduler.dispatch._PUT_OFF_SECONDS", 0.0)
        await started(pieces.store, wanted("a"))

        async def away(_uid: str) -> None:
            pieces.runtime.deleting = None
            await valkey.flushall()
            raise UnavailableError("the node daemon does not answer")

        pieces.runtime.deleting = away
        async with pieces.dispatching():
            await pieces.scheduler.delete("t", "a", "")
            for _ in range(2):
                assert await asyncio.wait_for(pieces.runtime.deleted.get(), 110) == "u1"


class TestWrites:
    async def test_a_slow_delete_holds_nobody_up(self, pieces: Pieces) -> None:
        for name in ("a", "b"):
            await started(pieces.store, wanted(name))
        stuck = asyncio.Event()

        async def slow(_uid: str) -> None:
            await stuck.wait()

        pieces.runtime.deleting = slow
        writing = asyncio.ensure_future(pieces.reconciler.run_writes())
        try:
            async with pieces.dispatching():
                pieces.cache.tell(seen(wanted("a"), State.FAILED, 5, reason=Reason.OOM))
                assert await asyncio.wait_for(pieces.runtime.deleted.get(), 110) == "u1"
                pieces.cache.tell(seen(wanted("b"), State.READY, 6))
                await until(pieces, wanted("b"), State.READY)
                assert await state_of(pieces.store, wanted("a")) == (State.FAILED, Reason.OOM)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def test_a_store_that_lost_its_last_moments_is_told_again(self, pieces: Pieces, valkey: redis.Redis) -> None:
        """As after a failover: the record is what it was before the watcher's word, which does not come again."""
        record = wanted("a")
        await started(pieces.store, record)
        before = await valkey.dump("orchard:sandbox:t:a")
        async with pieces.reconciling():
            pieces.cache.tell(seen(record, State.READY, 5))
            await until(pieces, record, State.READY)
            await valkey.restore("orchard:sandbox:t:a", 0, before, replace=True)
            assert (await state_of(pieces.store, record))[0] is State.STARTING
            await valkey.client_kill_filter(_type="pubsub")
            await until(pieces, record, State.READY)


class TestRounds:
    async def test_only_a_watcher_that_talks_can_miss_a_sandbox(
        self, pieces: Pieces, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [clock_ms()]
        monkeypatch.setattr("services.scheduler.reconcile.clock_ms", lambda: now[0])
        await started(pieces.store, wanted("a"))
        pieces.cache.heard_ms = now[0]
        await pieces.reconciler._round(pieces.cache)
        now[0] += GRACE_MS + 1  # silent all the while
        await pieces.reconciler._round(pieces.cache)
        assert await state_of(pieces.store, wanted("a")) == (State.STARTING, Reason.UNSPECIFIED)
        pieces.cache.heard_ms = now[0]
        await pieces.reconciler._round(pieces.cache)
        assert await state_of(pieces.store, wanted("a")) == (State.FAILED, Reason.DELETED_EXTERNALLY)

    async def test_a_lost_stream_begins_the_grace_anew(self, pieces: Pieces, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [clock_ms()]
        monkeypatch.setattr("services.scheduler.reconcile.clock_ms", lambda: now[0])
        monkeypatch.setattr("services.scheduler.reconcile._RECONCILE_SECONDS", 0.01)
        await started(pieces.store, wanted("a"))
        await pieces.reconciler._round(pieces.cache)
        pieces.cache.live = False
        await self._rounds(pieces, 2)
        now[0] += GRACE_MS + 1
        pieces.cache.live, pieces.cache.heard_ms = True, now[0]
        await self._rounds(pieces, 2)
        assert await state_of(pieces.store, wanted("a")) == (State.STARTING, Reason.UNSPECIFIED)

    async def _rounds(self, pieces: Pieces, count: int) -> None:
        """Let the loop go round; each turn ends by reading the lengths of the queues."""
        turns: asyncio.Queue[None] = asyncio.Queue()
        read = pieces.store.queue_lengths

        async def counted() -> dict[str, int]:
            turns.put_nowait(None)
            return await read()

        pieces.store.queue_lengths = counted  # type: ignore[method-assign]
        running = asyncio.ensure_future(pieces.reconciler.run_rounds())
        try:
            for _ in range(count):
                await asyncio.wait_for(turns.get(), 110)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            pieces.store.queue_lengths = read  # type: ignore[method-assign]

    async def test_each_tenants_request_is_missed_by_itself(
        self, pieces: Pieces, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that has just started is not taken for one of another tenant that has been missing for long."""
        now = [clock_ms()]
        monkeypatch.setattr("services.scheduler.reconcile.clock_ms", lambda: now[0])
        missing, fresh = wanted("a", request_id="same"), wanted("b", tenant="another", request_id="same")
        await started(pieces.store, missing)
        await pieces.reconciler._round(pieces.cache)
        now[0] += GRACE_MS + 1
        pieces.cache.heard_ms = now[0]
        await started(pieces.store, fresh)
        await pieces.reconciler._round(pieces.cache)
        assert await state_of(pieces.store, missing) == (State.FAILED, Reason.DELETED_EXTERNALLY)
        assert await state_of(pieces.store, fresh) == (State.STARTING, Reason.UNSPECIFIED)

    @pytest.mark.parametrize("queued", [True, False])
    async def test_the_grace_is_of_one_create_and_begins_with_its_start(
        self, pieces: Pieces, monkeypatch: pytest.MonkeyPatch, queued: bool
    ) -> None:
        """Another create has had its id before, and was missing for nearly as long; or it was in the queue itself."""
        now = [clock_ms()]
        monkeypatch.setattr("services.scheduler.reconcile.clock_ms", lambda: now[0])

        async def round_after(milliseconds: int) -> tuple[State, Reason]:
            now[0] += milliseconds
            pieces.cache.heard_ms = now[0]
            await pieces.reconciler._round(pieces.cache)
            return await state_of(pieces.store, mine)

        mine, before = wanted("a", request_id="mine"), wanted("a", request_id="before")
        await (create(pieces.store, mine) if queued else started(pieces.store, before))
        await round_after(0)
        await round_after(GRACE_MS - 1)
        if queued:
            assert await take(pieces.store) == ("t", "a")
            await pieces.store.started(("t", "a"), "mine", "u1")
        else:
            await pieces.store.finish(("t", "a"), "before", State.DELETED, Reason.REQUESTED, "")
            await started(pieces.store, mine)
        assert await round_after(1) == (State.STARTING, Reason.UNSPECIFIED)
        assert await round_after(GRACE_MS - 1) == (State.STARTING, Reason.UNSPECIFIED)
        assert await round_after(1) == (State.FAILED, Reason.DELETED_EXTERNALLY)

    async def test_a_round_reads_no_record_again_whose_grace_goes_on(
        self, pieces: Pieces, monkeypatch: pytest.MonkeyPatch, valkey: redis.Redis
    ) -> None:
        """Those in the queue and those that start can be thousands, and a round comes every two seconds."""
        now = [clock_ms()]
        monkeypatch.setattr("services.scheduler.reconcile.clock_ms", lambda: now[0])
        pieces.cache.heard_ms = now[0]
        for number in range(20):
            await started(pieces.store, wanted(f"s{number}"))
        for number in range(20):
            await create(pieces.store, wanted(f"q{number}"))

        async def reads() -> int:
            before = (await valkey.info("commandstats")).get("cmdstat_hgetall", {"calls": 0})["calls"]
            await pieces.reconciler._round(pieces.cache)
            return (await valkey.info("commandstats"))["cmdstat_hgetall"]["calls"] - before

        assert await reads() == 40
        for _ in range(3):
            assert await reads() == 0
        now[0] += GRACE_MS
        pieces.cache.heard_ms = now[0]
        assert await reads() >= 40

    @pytest.mark.parametrize("state", [State.STARTING, State.DELETING])
    async def test_what_the_runtime_still_has_is_not_ended(
        self, pieces: Pieces, monkeypatch: pytest.MonkeyPatch, state: State
    ) -> None:
        """A watcher that talks may still be without one: the runtime itself is asked before a record is ended."""
        now = [clock_ms()]
        monkeypatch.setattr("services.scheduler.reconcile.clock_ms", lambda: now[0])
        await started(pieces.store, wanted("a"))
        if state is State.DELETING:
            await pieces.store.delete(("t", "a"), "", Reason.REQUESTED)
        pieces.runtime.there.add("u1")
        await pieces.reconciler._round(pieces.cache)
        now[0] += GRACE_MS + 1
        pieces.cache.heard_ms = now[0]
        await pieces.reconciler._round(pieces.cache)
        assert (await state_of(pieces.store, wanted("a")))[0] is state
        pieces.runtime.there.clear()
        await pieces.reconciler._round(pieces.cache)
        assert (await state_of(pieces.store, wanted("a")))[0].terminal

    @pytest.mark.parametrize("ended", [True, False])
    async def test_a_create_that_was_lost_with_the_last_moments_gets_its_id_back(
        self, pieces: Pieces, monkeypatch: pytest.MonkeyPatch, ended: bool
    ) -> None:
        """The store still has the one before, as ended or even as it lived; what the runtime has came after its end."""
        now = [clock_ms()]
        monkeypatch.setattr("services.scheduler.reconcile.clock_ms", lambda: now[0])
        before, lost = wanted("a", request_id="before"), wanted("a", request_id="lost")
        await started(pieces.store, before)
        if ended:
            await pieces.store.finish(("t", "a"), "before", State.DELETED, Reason.REQUESTED, "")
        late = seen(lost, State.READY, 9, uid="u2", create_ms=FAR_MS, ready_ms=FAR_MS, expire_ms=2 * FAR_MS)
        pieces.cache.tell(late)
        await pieces.reconciler._write(late)
        for _ in range(3):
            await pieces.reconciler._round(pieces.cache)
            now[0] += GRACE_MS + 1
            pieces.cache.heard_ms = now[0]
        found = await pieces.scheduler.get("t", "a")
        assert (found.request_id, found.uid, found.state) == ("lost", "u2", State.READY)
        assert await pieces.store.living() == [("t", "a")]
        assert await pieces.store.page("t", None, 9) == [(FAR_MS, "a")]
        # It has its id, and goes like any other.
        with pytest.raises(AlreadyExistsError):
            await pieces.create("a", "next")
        pieces.cache.tell(replace(late, state=State.DELETED, revision=10))
        await pieces.reconciler._write(replace(late, state=State.DELETED, revision=10))
        assert await pieces.store.sweep(9) == 0
        assert (await pieces.create("a", "next")).request_id == "next"

    async def test_what_has_been_going_for_too_long_is_forced(
        self, store: LeaseStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [clock_ms()]
        monkeypatch.setattr("services.scheduler.reconcile.clock_ms", lambda: now[0])
        pieces = assemble(store, stuck_seconds=60)
        for name in ("a", "b"):
            await started(pieces.store, wanted(name))
        pieces.cache.tell(seen(wanted("a"), State.DELETING, 5))
        async with pieces.dispatching():
            await pieces.reconciler._round(pieces.cache)
            now[0] += 59_000
            pieces.cache.tell(seen(wanted("b"), State.DELETING, 6, uid="u-b"))
            await pieces.reconciler._round(pieces.cache)
            now[0] += 1_000
            await pieces.reconciler._round(pieces.cache)
            assert await asyncio.wait_for(pieces.runtime.forced.get(), 110) == "u1"
            pieces.cache.tell(seen(wanted("a"), State.DELETED, 7))
            now[0] += 59_000
            await pieces.reconciler._round(pieces.cache)
            assert await asyncio.wait_for(pieces.runtime.forced.get(), 110) == "u-b"
        assert pieces.runtime.forced.empty()

    @pytest.mark.parametrize("state", [State.STARTING, State.READY, State.FAILED])
    async def test_a_sandbox_whose_record_has_ended_is_removed(self, pieces: Pieces, state: State) -> None:
        await started(pieces.store, wanted("a"))
        await pieces.store.finish(("t", "a"), "r-a", State.FAILED, Reason.DELETED_EXTERNALLY, "")
        pieces.cache.tell(seen(wanted("a"), state, 5))
        async with pieces.dispatching():
            await pieces.reconciler._round(pieces.cache)
            assert await asyncio.wait_for(pieces.runtime.deleted.get(), 110) == "u1"
