"""Keys and usage against a real PostgreSQL, migrations up and down."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from services.common.db import connect, migrate
from services.common.errors import NotFoundError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from services.common.health import Health
from services.gateway.keys import Keys
from services.gateway.store import SCHEMA, GatewayStore, SandboxUse

MIGRATIONS = Path("services/gateway/migrations")
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


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


class TestKeys:
    async def test_a_key_opens_its_tenant_and_is_stored_hashed(self, store: GatewayStore, database: str) -> None:
        _key, secret = await Keys(store, Health()).create("acme", "mine", frozenset({"user"}), None)
        principal = await Keys(store, Health()).authenticate(USER_METHOD, bearer(secret))
        assert (principal.tenant, principal.roles) == ("acme", frozenset({"user"}))
        with psycopg.connect(database) as connection:
            stored = repr(connection.execute("SELECT * FROM gateway.api_keys").fetchall())
        assert secret.rpartition("_")[2] not in stored

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


async def test_a_database_that_is_away_is_unavailable_and_names_no_driver() -> None:
    store = GatewayStore(connect("postgresql://nobody@/none?host=/nonexistent"))
    with pytest.raises(UnavailableError) as caught:
        await store.find_key("x")
    assert caught.value.reason == "DATABASE_UNAVAILABLE"
    assert "psycopg" not in caught.value.message
    await store.close()


def test_migrations_go_up_and_down_on_data(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS gateway CASCADE")
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS, revision="0001")
        connection.execute("INSERT INTO gateway.api_keys VALUES ('k', 't', 'n', '\\x00', '{user}', now())")
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
        assert connection.execute("SELECT count(*) FROM gateway.sandbox_usage").fetchone() == (0,)
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS, revision="-1")
        assert connection.execute("SELECT to_regclass('gateway.sandbox_usage')").fetchone() == (None,)
        assert connection.execute("SELECT key_id FROM gateway.api_keys").fetchall() == [("k",)]
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
