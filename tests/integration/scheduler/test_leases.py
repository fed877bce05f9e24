"""When a sandbox's time is over: leases, renewals and clocks that jump, by the Lua scripts against a real Valkey."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import redis.asyncio as redis

from services.common.errors import UnavailableError
from services.common.states import Reason, State
from services.scheduler.records import Terms
from services.scheduler.store import LeaseStore
from tests.integration.scheduler.records import (
    DAY,
    create,
    delete,
    long_ago,
    milliseconds,
    seen,
    started,
    state_of,
    take,
    wanted,
)


class Skewed:
    """A monotonic clock that falls behind the store's."""

    def __init__(self) -> None:
        self.behind = 0.0

    def __call__(self) -> float:
        return time.monotonic() - self.behind


@asynccontextmanager
async def closing(store: LeaseStore) -> AsyncIterator[LeaseStore]:
    yield store
    await store.close()


async def ready_with_timeouts(store: LeaseStore, timeout_ms: int) -> None:
    await create(store, wanted("a"), replace(DAY, heartbeat_timeout_ms=timeout_ms, idle_timeout_ms=timeout_ms))
    await take(store)
    await store.observe(seen(wanted("a"), State.READY, 5, ready_ms=77))


class TestLeases:
    async def test_a_lease_that_ran_out_is_claimed_once_and_says_expired(self, store: LeaseStore) -> None:
        record = wanted("a")
        await create(store, record, Terms(ttl_ms=1))
        await take(store, 30_000)
        await store.started(("t", "a"), record.request_id, "u1")
        await asyncio.sleep(0.01)
        assert await store.expire(100) == [("t", "a")]
        assert await store.expire(100) == []
        assert await state_of(store, record) == (State.DELETING, Reason.EXPIRED)
        await store.observe(seen(record, State.DELETED, 9))
        assert await state_of(store, record) == (State.DELETED, Reason.EXPIRED)

    async def test_a_heartbeat_moves_the_deadline(self, store: LeaseStore, valkey: redis.Redis) -> None:
        await create(store, wanted("a"), replace(DAY, heartbeat_timeout_ms=600_000))
        await take(store, 30_000)
        for _ in range(4):
            await long_ago(valkey, "last_heartbeat_ms", 600_001)
            assert await store.renew("last_heartbeat_ms", [("t", "a", "")]) == []
            assert await store.expire(100) == []
        await long_ago(valkey, "last_heartbeat_ms", 600_001)
        assert await store.expire(100) == [("t", "a")]

    async def test_idle_counts_only_when_ready(self, store: LeaseStore, valkey: redis.Redis) -> None:
        record = wanted("a")
        await create(store, record, replace(DAY, idle_timeout_ms=1000))
        await long_ago(valkey, "last_active_ms", 3_600_000)
        assert await store.expire(100) == []
        assert (await state_of(store, record))[0] is State.QUEUED
        await take(store)
        await long_ago(valkey, "last_active_ms", 3_600_000)
        assert await store.expire(100) == []
        await store.observe(seen(record, State.READY, 5, ready_ms=77))
        assert await store.expire(100) == []
        await long_ago(valkey, "last_active_ms", 3_600_000)
        assert await store.expire(100) == [("t", "a")]

    async def test_a_report_of_activity_may_be_late_or_lost(self, store: LeaseStore, valkey: redis.Redis) -> None:
        """Reports come every 5 s, so an idle timeout of 1 s must not end what is in use in between."""
        record = wanted("a")
        await create(store, record, replace(DAY, idle_timeout_ms=1000))
        await take(store)
        await store.observe(seen(record, State.READY, 5, ready_ms=77))
        await long_ago(valkey, "last_active_ms", 10_000)
        assert await store.expire(100) == []
        assert await store.renew("last_active_ms", [("t", "a", "u1")]) == []
        await long_ago(valkey, "last_active_ms", 11_001)
        assert await store.expire(100) == [("t", "a")]

    async def test_renewing_while_the_reaper_looks_never_loses(self, store: LeaseStore) -> None:
        """Either the renewal comes first and the sandbox lives, or it is told that the sandbox is not alive."""
        for number in range(40):
            name = f"a{number}"
            await create(store, wanted(name), Terms(ttl_ms=86_400_000, heartbeat_timeout_ms=2))
            await take(store, 30_000)
            doomed, missing = await asyncio.gather(
                store.expire(100), store.renew("last_heartbeat_ms", [("t", name, "")])
            )
            claimed = ("t", name) in doomed
            assert claimed == ((await state_of(store, wanted(name)))[0] is State.DELETING)
            if missing:
                assert claimed
            await store.finish(("t", name), f"r-{name}", State.DELETED, Reason.REQUESTED, "")

    @pytest.mark.parametrize("field", ["last_heartbeat_ms", "last_active_ms"])
    async def test_a_clock_that_jumps_ends_nothing_that_could_not_renew(
        self, valkey: redis.Redis, valkey_url: str, field: str
    ) -> None:
        """The monotonic clock stands still for 100 s of the store's, as on a machine that is suspended or set."""
        monotonic = Skewed()
        async with closing(LeaseStore(valkey_url, monotonic=monotonic)) as store:
            await ready_with_timeouts(store, 60_000)
            assert await store.expire(100) == []
            for slept in (100.0, 100.0):
                await long_ago(valkey, field, 110_000)
                monotonic.behind += slept
                assert await store.expire(100) == []
                # It stood still, and was not set back to its beginning: 10 s had passed, and have.
                stands = int(await valkey.hget("orchard:sandbox:t:a", field))
                assert 0 <= await milliseconds(valkey) - stands - 10_000 < 60_000
            # Without a jump it ends.
            await long_ago(valkey, field, 110_000)
            assert await store.expire(100) == [("t", "a")]

    async def test_a_jump_moves_no_lease_beyond_its_timeout(self, valkey: redis.Redis, valkey_url: str) -> None:
        """What was renewed after the jump, or is moved by each of several schedulers, has its timeout and no more."""
        monotonic = Skewed()
        async with closing(LeaseStore(valkey_url, monotonic=monotonic)) as store:
            await ready_with_timeouts(store, 60_000)
            await store.expire(100)
            monotonic.behind += 1e6
            await store.renew("last_heartbeat_ms", [("t", "a", "")])
            assert await store.expire(100) == []
            assert int(await valkey.hget("orchard:sandbox:t:a", "last_heartbeat_ms")) <= await milliseconds(valkey)

    async def test_a_clock_that_is_set_back_keeps_nothing_for_longer(
        self, valkey: redis.Redis, valkey_url: str
    ) -> None:
        monotonic = Skewed()
        async with closing(LeaseStore(valkey_url, monotonic=monotonic)) as store:
            await ready_with_timeouts(store, 60_000)
            await store.expire(100)
            for field in ("last_heartbeat_ms", "last_active_ms"):
                await long_ago(valkey, field, -3_600_000)  # as an hour's step back leaves it
            monotonic.behind -= 3600
            assert await store.expire(100) == []
            for field in ("last_heartbeat_ms", "last_active_ms"):
                assert int(await valkey.hget("orchard:sandbox:t:a", field)) <= await milliseconds(valkey)

    async def test_a_time_to_live_goes_on(self, valkey: redis.Redis, valkey_url: str) -> None:
        monotonic = Skewed()
        async with closing(LeaseStore(valkey_url, monotonic=monotonic)) as store:
            await ready_with_timeouts(store, 60_000)
            await store.expire(100)
            await long_ago(valkey, "expire_ms", 1)
            monotonic.behind += 100
            assert await store.expire(100) == [("t", "a")]

    @pytest.mark.parametrize("how", ["restarted", "store away"])
    async def test_while_no_scheduler_could_take_a_heartbeat_nothing_expires(
        self, valkey: redis.Redis, valkey_url: str, how: str
    ) -> None:
        async with closing(LeaseStore(valkey_url)) as store, closing(LeaseStore(valkey_url)) as other:
            await ready_with_timeouts(store, 60_000)
            await store.expire(100)
            await long_ago(valkey, "last_heartbeat_ms", 110_000)
            await valkey.set("orchard:reaped", await milliseconds(valkey) - 100_000)
            if how == "store away":
                await valkey.execute_command("REPLICAOF", "127.0.0.1", "1")
                with pytest.raises(UnavailableError):
                    await store.expire(100)
                await valkey.execute_command("REPLICAOF", "NO", "ONE")
            returned = other if how == "restarted" else store
            assert await returned.expire(100) == []
            # One that is started beside others has lost nothing.
            await long_ago(valkey, "last_heartbeat_ms", 110_000)
            async with closing(LeaseStore(valkey_url)) as third:
                assert await third.expire(100) == [("t", "a")]

    async def test_activity_of_another_incarnation_does_not_count(self, store: LeaseStore) -> None:
        await started(store, wanted("a"))
        assert await store.renew("last_active_ms", [("t", "a", "u2"), ("t", "none", "")]) == [("t", "a"), ("t", "none")]

    async def test_a_longer_life(self, store: LeaseStore) -> None:
        await create(store, wanted("a"), Terms(ttl_ms=1))
        await take(store, 30_000)
        assert await store.update(("t", "a"), 4_000_000_000_000) == "updated"
        await asyncio.sleep(0.01)
        assert await store.expire(100) == []
        assert await store.update(("t", "none"), 1) == "missing"
        await delete(store, ("t", "a"), "", Reason.REQUESTED)
        assert await store.update(("t", "a"), 4_000_000_000_000) == "ended"
