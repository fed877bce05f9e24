"""What sandboxes used: each once, from its beginning to its end, whatever a gateway saw of it."""

import asyncio
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from orchard.admin.v1 import usage_service_pb2

from services.common.errors import (
    InvalidArgumentError,
)
from services.common.observed import Observed
from services.common.states import State
from services.common.tasks import TaskGroup
from services.common.times import now_ms
from services.gateway.couriers import UsageRecorder
from services.gateway.servicer import UsageServicer
from services.gateway.store import GatewayStore, SandboxUse, utc_now
from tests.integration.gateway.callers import calling
from tests.integration.gateway.locks import held_up, waiting_for_locks

BACKSTOP = 110
HOUR_MS = 3_600_000
START = datetime(2026, 1, 1, tzinfo=UTC)


class TestUsage:
    async def test_overlaps_are_added_up_by_label(self, store: GatewayStore) -> None:
        def use(uid: str, label: str, begin: int, end: int | None, cpu: float = 2.0) -> SandboxUse:
            finish = None if end is None else START + timedelta(hours=end)
            return SandboxUse(uid, "acme", uid, {"run": label}, cpu, 2**30, START + timedelta(hours=begin), finish)

        await store.record_uses([use("a", "x", 0, 2), use("b", "x", 1, None), use("c", "y", 5, 6)])
        sums = await store.sum_usage("acme", START + timedelta(hours=1), START + timedelta(hours=4), "run")
        assert [
            (one.label_value, one.sandboxes, one.sandbox_seconds, one.cpu_hours, one.memory_gib_hours) for one in sums
        ] == [("x", 2, 4 * 3600.0, 8.0, 4.0)]
        (total,) = await store.sum_usage("acme", None, START + timedelta(hours=10), "")
        assert total.sandbox_seconds == (2 + 9 + 1) * 3600
        assert await store.sum_usage("other", None, START + timedelta(hours=10), "") == []

    async def test_an_end_is_written_once(self, store: GatewayStore) -> None:
        use = SandboxUse("a", "acme", "a", {}, 0, 0, START, None)
        ended = SandboxUse("a", "acme", "a", {}, 0, 0, START, START + timedelta(hours=1))
        await store.record_uses([use])
        await store.record_uses([ended])
        await store.record_uses([use])
        assert await store.end_uses_except([], START + timedelta(hours=9)) == 0
        (total,) = await store.sum_usage("acme", None, START + timedelta(hours=10), "")
        assert total.sandbox_seconds == 3600

    async def test_those_that_nobody_saw_end_are_ended(self, store: GatewayStore) -> None:
        await store.record_uses([SandboxUse(uid, "acme", uid, {}, 0, 0, START, None) for uid in ("a", "b")])
        assert await store.end_uses_except(["b"], START + timedelta(hours=1)) == 1

    async def test_any_number_may_live(self, store: GatewayStore) -> None:
        await store.record_uses([SandboxUse(uid, "acme", uid, {}, 0, 0, START, None) for uid in ("u-7", "gone")])
        living = [f"u-{number}" for number in range(70_000)]  # a statement takes 65,535 parameters
        assert await store.end_uses_except(living, START + timedelta(hours=1)) == 1

    async def test_what_another_gateway_wrote_since_is_not_ended(self, store: GatewayStore) -> None:
        await store.record_uses([SandboxUse("a", "acme", "a", {}, 0, 0, START + timedelta(hours=2), None)])
        assert await store.end_uses_except([], START + timedelta(hours=1)) == 0

    async def test_nothing_is_used_in_the_future(self, store: GatewayStore) -> None:
        now = utc_now()
        await store.record_uses([SandboxUse("a", "acme", "a", {}, 0, 0, now - timedelta(hours=1), None)])
        (total,) = await store.sum_usage("acme", None, now + timedelta(days=9), "")
        assert 3600 <= total.sandbox_seconds < 3600 + BACKSTOP

    async def test_no_use_is_a_sum_of_zero(self, store: GatewayStore) -> None:
        with calling("acme", "user"):
            usages = UsageServicer(store)
            (total,) = (await usages.GetUsage(usage_service_pb2.GetUsageRequest(), None)).usages
            assert (total.tenant, total.sandboxes, total.sandbox_seconds) == ("acme", 0, 0)
            grouped = await usages.GetUsage(usage_service_pb2.GetUsageRequest(group_by_label="run"), None)
            assert list(grouped.usages) == []

    @pytest.mark.parametrize("field", ["start_time", "end_time"])
    @pytest.mark.parametrize("bad", [Timestamp(seconds=1 << 60), Timestamp(nanos=-1), Timestamp(seconds=-(1 << 60))])
    async def test_an_impossible_time_is_named(self, store: GatewayStore, field: str, bad: Timestamp) -> None:
        request = usage_service_pb2.GetUsageRequest()
        getattr(request, field).CopyFrom(bad)
        with calling("acme", "user"), pytest.raises(InvalidArgumentError, match=field):
            await UsageServicer(store).GetUsage(request, None)

    @pytest.mark.parametrize("known", [True, False])
    async def test_use_ends_with_the_sandbox_also_where_its_beginning_is_forgotten(
        self, store: GatewayStore, known: bool
    ) -> None:
        recorder = UsageRecorder(store, lambda _spec: ({}, 1.0, 1))
        ready = now_ms() - HOUR_MS
        async with TaskGroup() as tasks:
            tasks.start("write usage", recorder.run())
            recorder.saw(Observed("acme", "x", "u", 1, State.READY, ready_ms=ready))
            await until_usage(store, lambda total: total is not None)
            recorder.saw(Observed("acme", "x", "u", 2, State.FAILED, ready_ms=ready if known else 0))
            recorder.saw(Observed("acme", "x", "u", 3, State.DELETED, ready_ms=ready if known else 0))
            ended = await until_usage_stands_still(store)
        assert ended.sandboxes == 1
        assert 3600 <= ended.sandbox_seconds < 3600 + BACKSTOP

    async def test_use_that_began_and_ended_just_before_the_gateway_stops_counts(self, store: GatewayStore) -> None:
        recorder = UsageRecorder(store, lambda _spec: ({}, 1.0, 1))
        ready = now_ms() - HOUR_MS
        async with TaskGroup() as tasks:
            tasks.start("write usage", recorder.run())
            recorder.saw(Observed("acme", "x", "u", 1, State.READY, ready_ms=ready))
            await asyncio.sleep(0)
            # Of another watcher, which does not know when it was READY.
            recorder.saw(Observed("acme", "x", "u", 2, State.DELETED))
            await tasks.close()
        await recorder.close()
        ended = await until_usage_stands_still(store)
        assert ended is not None
        assert 3600 <= ended.sandbox_seconds < 3600 + BACKSTOP

    @pytest.mark.parametrize("fails", [False, True])
    async def test_a_snapshot_that_comes_while_one_is_written_is_written_too(
        self, store: GatewayStore, database: str, fails: bool
    ) -> None:
        recorder = UsageRecorder(store, lambda _spec: ({}, 1.0, 1))
        now = utc_now() - timedelta(hours=1)
        await store.record_uses([SandboxUse(uid, "acme", uid, {}, 0, 0, now, None) for uid in ("a", "b")])
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as watching, TaskGroup() as tasks:
            async with held_up(database, "gateway.sandbox_usage"):
                recorder.synced(["a", "b"])
                tasks.start("write usage", recorder.run())
                (writer,) = await waiting_for_locks(watching)
                recorder.synced(["b"])
                if fails:
                    await watching.execute("SELECT pg_terminate_backend(%s)", [writer])
                    while await waiting_for_locks(watching) == [writer]:
                        pass
            async with asyncio.timeout(BACKSTOP):
                while await unended(watching) != ["b"]:
                    await asyncio.sleep(0.02)

    async def test_a_snapshot_that_could_not_be_written_is_written_later(
        self, store: GatewayStore, database: str
    ) -> None:
        recorder = UsageRecorder(store, lambda _spec: ({}, 1.0, 1))
        now = utc_now() - timedelta(hours=1)
        await store.record_uses([SandboxUse(uid, "acme", uid, {}, 0, 0, now, None) for uid in ("a", "b")])
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as watching, TaskGroup() as tasks:
            async with held_up(database, "gateway.sandbox_usage"):
                recorder.synced(["b"])
                tasks.start("write usage", recorder.run())
                (writer,) = await waiting_for_locks(watching)
                await watching.execute("SELECT pg_terminate_backend(%s)", [writer])
            async with asyncio.timeout(BACKSTOP):
                while await unended(watching) != ["b"]:
                    await asyncio.sleep(0.02)


async def unended(connection: psycopg.AsyncConnection) -> list[str]:
    rows = await connection.execute("SELECT uid FROM gateway.sandbox_usage WHERE end_time IS NULL ORDER BY uid")
    return [uid for (uid,) in await rows.fetchall()]


async def until_usage(store: GatewayStore, enough):
    async with asyncio.timeout(BACKSTOP):
        while True:
            sums = await store.sum_usage("acme", None, utc_now(), "")
            if enough(total := sums[0] if sums else None):
                return total
            await asyncio.sleep(0.02)


async def until_usage_stands_still(store: GatewayStore):
    last = None

    def same(total) -> bool:
        nonlocal last
        before, last = last, total
        return before == total

    return await until_usage(store, same)
