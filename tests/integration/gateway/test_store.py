"""Keys and usage against a real PostgreSQL, migrations up and down."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from google.protobuf.timestamp_pb2 import Timestamp
from orchard.admin.v1 import key_service_pb2, usage_service_pb2

from services.common.db import connect, migrate
from services.common.errors import (
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from services.common.health import Health
from services.common.interceptor import Call, current_call
from services.common.observed import Observed
from services.common.pages import encode_token
from services.common.states import State
from services.common.tasks import TaskGroup
from services.common.tokens import Principal
from services.gateway.couriers import UsageRecorder
from services.gateway.keys import Keys
from services.gateway.servicer import KeyServicer, UsageServicer
from services.gateway.store import SCHEMA, GatewayStore, SandboxUse, utc_now

MIGRATIONS = Path("services/gateway/migrations")
BACKSTOP = 110
START = datetime(2026, 1, 1, tzinfo=UTC)
USER_METHOD = "/orchard.sandbox.v1.SandboxService/GetSandbox"
ADMIN_METHOD = "/orchard.admin.v1.KeyService/CreateKey"


@pytest.fixture(scope="module")
def database(postgres_url: str) -> str:
    migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
    return postgres_url


@pytest.fixture
async def store(database: str) -> AsyncIterator[GatewayStore]:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("TRUNCATE gateway.api_keys, gateway.sandbox_usage")
    store = GatewayStore(connect(database))
    yield store
    await store.close()


class SlowStore(GatewayStore):
    """A store whose answer to a read can be held up."""

    def __init__(self, engine) -> None:
        super().__init__(engine)
        self.hold = False
        self.was_read = asyncio.Event()
        self.go_on = asyncio.Event()
        self.loses_answers = False

    async def working_keys(self, now):
        keys = await super().working_keys(now)
        if self.hold:
            self.was_read.set()
            await self.go_on.wait()
        return keys

    async def revoke_key(self, key_id, now, tenant=""):
        key = await super().revoke_key(key_id, now, tenant)
        if self.loses_answers:
            raise UnavailableError("the connection broke as it was committed")
        return key


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


class TestKeys:
    async def test_a_key_opens_its_tenant_and_is_stored_hashed(self, store: GatewayStore, database: str) -> None:
        _key, secret = await Keys(store, Health()).create("acme", "mine", frozenset({"user"}), None)
        principal = await Keys(store, Health()).authenticate(USER_METHOD, bearer(secret))
        assert (principal.tenant, principal.roles) == ("acme", frozenset({"user"}))
        with psycopg.connect(database) as connection:
            stored = repr(connection.execute("SELECT * FROM gateway.api_keys").fetchall())
        assert secret.split("_", 2)[2] not in stored

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda s: s[:-1],
            lambda s: s + "x",
            lambda s: "ork_" + s[4:].swapcase(),
            lambda s: s.replace("ork_", "orx_"),
            lambda s: "",
            lambda s: "ork__",
            lambda s: "é",
        ],
    )
    async def test_what_is_not_the_key_is_refused(self, store: GatewayStore, spoil) -> None:
        keys = Keys(store, Health())
        _key, secret = await keys.create("acme", "", frozenset({"user"}), None)
        with pytest.raises(UnauthenticatedError):
            await keys.authenticate(USER_METHOD, bearer(spoil(secret)))

    @pytest.mark.parametrize(
        "metadata", [{}, {"authorization": ""}, {"authorization": "Basic abc"}, {"authorization": "Bearer"}]
    )
    async def test_no_key_says_how_to_send_one(self, store: GatewayStore, metadata: dict[str, str]) -> None:
        with pytest.raises(UnauthenticatedError, match="authorization: Bearer"):
            await Keys(store, Health()).authenticate(USER_METHOD, metadata)

    async def test_a_revoked_key_stops_at_once_here(self, store: GatewayStore) -> None:
        keys = Keys(store, Health())
        key, secret = await keys.create("acme", "", frozenset({"user"}), None)
        first = await keys.revoke(key.key_id)
        assert (await keys.revoke(key.key_id)).revoke_time == first.revoke_time
        with pytest.raises(UnauthenticatedError):
            await keys.authenticate(USER_METHOD, bearer(secret))
        with pytest.raises(NotFoundError):
            await keys.revoke("none")

    async def test_keys_that_were_read_before_a_revoke_do_not_bring_the_key_back(self, database: str) -> None:
        slow = SlowStore(connect(database))
        keys = Keys(slow, Health())
        key, secret = await keys.create("acme", "", frozenset({"user"}), None)
        slow.hold = True
        refresh = asyncio.ensure_future(keys.refresh())
        await asyncio.wait_for(slow.was_read.wait(), BACKSTOP)
        await keys.revoke(key.key_id)
        slow.hold = False
        slow.go_on.set()
        await asyncio.wait_for(refresh, BACKSTOP)
        with pytest.raises(UnauthenticatedError):
            await keys.authenticate(USER_METHOD, bearer(secret))
        await slow.close()

    async def test_keys_that_were_read_before_a_key_was_made_do_not_take_it_away(self, database: str) -> None:
        slow = SlowStore(connect(database))
        keys = Keys(slow, Health())
        slow.hold = True
        refresh = asyncio.ensure_future(keys.refresh())
        await asyncio.wait_for(slow.was_read.wait(), BACKSTOP)
        _key, secret = await keys.create("acme", "", frozenset({"user"}), None)
        slow.hold = False
        slow.go_on.set()
        await asyncio.wait_for(refresh, BACKSTOP)
        async with held_up(database, "gateway.api_keys"):
            # Known keys go on working whatever becomes of the database.
            assert await asyncio.wait_for(keys.authenticate(USER_METHOD, bearer(secret)), BACKSTOP)
        await slow.close()

    @pytest.mark.parametrize(("whose", "stops"), [("", True), ("acme", True), ("other", False)])
    async def test_a_revoke_whose_answer_was_lost_stops_the_key_at_once_too(
        self, database: str, whose: str, stops: bool
    ) -> None:
        losing = SlowStore(connect(database))
        keys = Keys(losing, Health())
        key, secret = await keys.create("acme", "", frozenset({"user"}), None)
        losing.loses_answers = True
        with pytest.raises(UnavailableError):
            await keys.revoke(key.key_id, whose)
        if stops:
            with pytest.raises(UnauthenticatedError):
                await keys.authenticate(USER_METHOD, bearer(secret))
        else:
            async with held_up(database, "gateway.api_keys"):
                assert await asyncio.wait_for(keys.authenticate(USER_METHOD, bearer(secret)), BACKSTOP)
        await losing.close()

    async def test_a_token_with_an_impossible_time_is_named(self, store: GatewayStore) -> None:
        request = key_service_pb2.ListKeysRequest(page_token=encode_token((10**30, "x")))
        with pytest.raises(InvalidArgumentError, match="page_token"):
            await KeyServicer(Keys(store, Health())).ListKeys(request, None)

    async def test_an_expired_key_is_refused(self, store: GatewayStore) -> None:
        keys = Keys(store, Health())
        _key, secret = await keys.create("acme", "", frozenset({"user"}), timedelta(microseconds=1))
        with pytest.raises(UnauthenticatedError):
            await keys.authenticate(USER_METHOD, bearer(secret))

    async def test_roles_are_checked_before_anything_is_looked_for(self, store: GatewayStore) -> None:
        keys = Keys(store, Health())
        _key, user = await keys.create("acme", "", frozenset({"user"}), None)
        _key, admin = await keys.create("acme", "", frozenset({"admin"}), None)
        with pytest.raises(PermissionDeniedError):
            await keys.authenticate(ADMIN_METHOD, bearer(user))
        assert await keys.authenticate(ADMIN_METHOD, bearer(admin))

    async def test_pages(self, store: GatewayStore) -> None:
        keys = Keys(store, Health())
        made = [(await keys.create("acme", str(n), frozenset({"user"}), None))[0].key_id for n in range(5)]
        await keys.create("other", "", frozenset({"user"}), None)
        found, before = [], None
        while page := await keys.list_page("acme", before, 2):
            found += [key.key_id for key in page]
            before = (page[-1].create_time, page[-1].key_id)
        assert found == made[::-1]


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
        with calling("acme"):
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
        with calling("acme"), pytest.raises(InvalidArgumentError, match=field):
            await UsageServicer(store).GetUsage(request, None)

    @pytest.mark.parametrize("known", [True, False])
    async def test_use_ends_with_the_sandbox_also_where_its_beginning_is_forgotten(
        self, store: GatewayStore, known: bool
    ) -> None:
        recorder = UsageRecorder(store, lambda _spec: ({}, 1.0, 1))
        ready = round((utc_now() - timedelta(hours=1)).timestamp() * 1000)
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
        ready = round((utc_now() - timedelta(hours=1)).timestamp() * 1000)
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


async def test_made_up_keys_hold_up_nobody(store: GatewayStore, database: str) -> None:
    keys = Keys(store, Health(), look_ups=2)
    _key, known = await keys.create("acme", "", frozenset({"user"}), None)
    _other, elsewhere = await Keys(store, Health()).create("acme", "", frozenset({"user"}), None)
    made_up = [f"ork_{number:012x}_x" for number in range(150)]
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as watching:
        async with held_up(database, "gateway.api_keys"):
            calls = [asyncio.ensure_future(keys.authenticate(USER_METHOD, bearer(key))) for key in made_up]
            while len(waiting := await waiting_for_locks(watching)) < 2:
                pass
            # The others of the pool's connections are free, and so is who has a key.
            assert len(waiting) == 2
            await asyncio.gather(*(store.sum_usage("acme", None, utc_now(), "") for _ in range(20)))
            assert len(await waiting_for_locks(watching)) == 2
            await keys.authenticate(USER_METHOD, bearer(known))
            refused = [call.exception() for call in calls if call.done()]
            assert {type(error) for error in refused} == {UnavailableError}
            assert len(refused) == 50
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(end, UnauthenticatedError) for end in ends) == 100
    # A key that was made on another gateway is found once there is room.
    await keys.authenticate(USER_METHOD, bearer(elsewhere))


async def test_an_unknown_key_is_looked_up_once_however_often_it_is_shown(store: GatewayStore) -> None:
    class Counting(GatewayStore):
        asked = 0

        async def find_key(self, key_id):
            self.asked += 1
            return await super().find_key(key_id)

    counting = Counting(store._engine)
    keys = Keys(counting, Health())
    calls = [keys.authenticate(USER_METHOD, bearer("ork_0123456789ab_x")) for _ in range(50)]
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(end) for end in ends} == {UnauthenticatedError}
    assert counting.asked <= 2
    for other in ("ork_0123456789AB_x", "ork_0123_x", f"ork_{'0' * 64}_x"):  # no key's id looks like this
        with pytest.raises(UnauthenticatedError):
            await keys.authenticate(USER_METHOD, bearer(other))
    assert counting.asked <= 2


@asynccontextmanager
async def held_up(database: str, table: str) -> AsyncIterator[None]:
    """Nobody else gets at a table."""
    async with await psycopg.AsyncConnection.connect(database) as connection:
        await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield


async def waiting_for_locks(connection: psycopg.AsyncConnection) -> list[int]:
    """Who waits for a lock; at least one does."""
    query = "SELECT DISTINCT pid FROM pg_locks WHERE NOT granted AND locktype = 'relation'"
    async with asyncio.timeout(BACKSTOP):
        while not (rows := await (await connection.execute(query)).fetchall()):
            await asyncio.sleep(0.02)
    return [pid for (pid,) in rows]


async def unended(connection: psycopg.AsyncConnection) -> list[str]:
    rows = await connection.execute("SELECT uid FROM gateway.sandbox_usage WHERE end_time IS NULL ORDER BY uid")
    return [uid for (uid,) in await rows.fetchall()]


@contextmanager
def calling(tenant: str) -> Iterator[None]:
    token = current_call.set(Call("/x/y", "r", Principal(tenant, "k", frozenset({"user"}))))
    yield
    current_call.reset(token)


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


async def test_a_database_that_is_away_is_unavailable_and_names_no_driver() -> None:
    store = GatewayStore(connect("postgresql://nobody@/none?host=/nonexistent"))
    with pytest.raises(UnavailableError) as caught:
        await store.find_key("x")
    assert caught.value.reason == "DATABASE_UNAVAILABLE"
    assert "psycopg" not in caught.value.message
    await store.close()


async def test_a_mistake_of_ours_is_not_called_the_database_being_away(store: GatewayStore) -> None:
    with pytest.raises(sa.exc.ProgrammingError):
        async with store.transaction() as connection:
            await connection.execute(sa.text("SELECT nothing_of_that_name"))


async def test_a_database_that_stands_still_is_noticed_and_found_again(database: str) -> None:
    health = Health(["database"])
    store = GatewayStore(connect(database), timeout_seconds=0.5)
    with stoppable(database) as (stop, go_on):
        async with TaskGroup() as tasks:
            tasks.start("read the keys", Keys(store, health).run_refresh(0.01))
            await until_wrong(health, False)
            stop()
            await until_wrong(health, True)
            go_on()
            await until_wrong(health, False)
            assert not tasks.failed.done()
    await store.close()


async def until_wrong(health: Health, wrong: bool) -> None:
    async with asyncio.timeout(BACKSTOP):
        while bool(health.wrong) is not wrong:
            await asyncio.sleep(0.01)


@contextmanager
def stoppable(database: str):
    """Stops the server and everything below it."""
    stopped: list[int] = []

    def stop() -> None:
        with psycopg.connect(database) as connection:
            pids = [row[0] for row in connection.execute("SELECT pid FROM pg_stat_activity").fetchall()]
            own = connection.info.backend_pid
            server = int(Path(f"/proc/{own}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in [server, *(pid for pid in pids if pid != own)]:
            with suppress(ProcessLookupError):  # one that has ended by itself
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)

    def go_on() -> None:
        while stopped:
            os.kill(stopped.pop(), signal.SIGCONT)

    try:
        yield stop, go_on
    finally:
        go_on()


def test_migrations_go_up_and_down_on_data(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS gateway CASCADE")
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS, revision="0001")
        connection.execute("INSERT INTO gateway.api_keys VALUES ('k', 't', 'n', '\\x00', '{user}', now())")
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
        assert connection.execute("SELECT count(*) FROM gateway.sandbox_usage").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM gateway.tenants").fetchone() == (0,)
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS, revision="-4")
        for table in ("sandbox_usage", "tenants"):
            assert connection.execute(f"SELECT to_regclass('gateway.{table}')").fetchone() == (None,)
        assert connection.execute("SELECT key_id FROM gateway.api_keys").fetchall() == [("k",)]
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
