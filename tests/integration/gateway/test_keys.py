"""Scopes, expiry and revocation of API keys against a real PostgreSQL, on several gateways."""

import asyncio
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from orchard.admin.v1 import admin_pb2, key_service_pb2

from services.common.db import migrate
from services.common.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError, UnauthenticatedError
from services.common.health import Health
from services.common.tasks import TaskGroup
from services.gateway.__main__ import MIGRATIONS
from services.gateway.keys import Keys
from services.gateway.servicer import KeyServicer
from services.gateway.store import SCHEMA, GatewayStore
from tests.integration.gateway.callers import bearer, calling

BACKSTOP = 110
GET = "/orchard.sandbox.v1.SandboxService/GetSandbox"
START = "/orchard.exec.v1.ExecService/StartExec"
USER = frozenset({"user"})


def request(tenant: str, *scopes: str, roles: tuple[int, ...] = ()) -> key_service_pb2.CreateKeyRequest:
    return key_service_pb2.CreateKeyRequest(tenant=tenant, roles=roles, scopes=scopes)


async def test_a_key_of_one_scope_opens_that_alone_on_every_gateway(store: GatewayStore) -> None:
    _key, secret = await Keys(store, Health()).create("acme", "", frozenset(), None, scopes=frozenset({"exec"}))
    other = Keys(store, Health())
    principal = await other.authenticate(START, bearer(secret))
    assert (principal.roles, principal.scopes) == (frozenset(), {"exec"})
    with pytest.raises(PermissionDeniedError) as caught:
        await other.authenticate(GET, bearer(secret))
    assert (caught.value.reason, caught.value.metadata["scope"]) == ("SCOPE_MISSING", "sandboxes:read")


async def test_a_key_stops_at_its_expiry_on_every_gateway_without_reading_it_again(store: GatewayStore) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)

    def clock() -> datetime:
        return now

    first, second = (Keys(store, Health(), now=clock) for _ in range(2))
    _key, secret = await first.create("acme", "", USER, timedelta(seconds=10))
    now += timedelta(seconds=9.999)
    for gateway in (first, second):
        await gateway.authenticate(GET, bearer(secret))
    now += timedelta(seconds=0.001)
    for gateway in (first, second):
        with pytest.raises(UnauthenticatedError):
            await gateway.authenticate(GET, bearer(secret))


async def test_a_revoked_key_stops_on_other_gateways_with_their_next_look(store: GatewayStore) -> None:
    first, second = Keys(store, Health()), Keys(store, Health())
    key, secret = await first.create("acme", "", USER, None)
    await second.authenticate(GET, bearer(secret))
    async with TaskGroup() as tasks, asyncio.timeout(BACKSTOP):
        tasks.start("read the keys", second.run_refresh(0.01))
        await first.revoke(key.key_id)
        while True:
            try:
                await second.authenticate(GET, bearer(secret))
            except UnauthenticatedError:
                break
            await asyncio.sleep(0.005)


async def test_what_a_call_shows_is_noted_but_never_a_secret(store: GatewayStore) -> None:
    keys = Keys(store, Health())
    key, secret = await keys.create("acme", "", frozenset(), None, scopes=frozenset({"exec"}))
    with calling("") as call:
        call.principal = None
        with pytest.raises(PermissionDeniedError):
            await keys.authenticate(GET, bearer(secret))
        assert (call.key_id, call.principal.tenant) == (key.key_id, "acme")
    _prefix, _, hidden = secret.split("_", 2)
    for mixed_up in (f"ork_{hidden}", f"ork_{hidden}_{key.key_id}", hidden):
        with calling("") as call:
            with pytest.raises(UnauthenticatedError):
                await keys.authenticate(GET, bearer(mixed_up))
            assert call.key_id == ""


class TestServicer:
    async def test_scopes_are_stored_and_shown(self, store: GatewayStore) -> None:
        servicer = KeyServicer(Keys(store, Health()))
        with calling("ops", "admin") as call:
            made = await servicer.CreateKey(request("acme", "files", "exec"), None)
            assert call.target == made.key.key_id
            (listed,) = (await servicer.ListKeys(key_service_pb2.ListKeysRequest(), None)).keys
        assert list(made.key.scopes) == list(listed.scopes) == ["exec", "files"]
        assert list(made.key.roles) == []

    @pytest.mark.parametrize(
        ("bad", "fault"),
        [
            (request("acme"), "roles: or scopes must name at least one"),
            (request("acme", "exec", "all"), r"scopes\[1\]: must be one of sandboxes:read, "),
        ],
    )
    async def test_bad_scopes_are_named(self, store: GatewayStore, bad, fault: str) -> None:
        with calling("ops", "admin"), pytest.raises(InvalidArgumentError, match=fault):
            await KeyServicer(Keys(store, Health())).CreateKey(bad, None)

    async def test_a_key_gives_no_more_than_it_has(self, store: GatewayStore) -> None:
        servicer = KeyServicer(Keys(store, Health()))
        with calling("acme", "user", scopes={"keys"}):
            await servicer.CreateKey(request("acme", "keys", roles=(admin_pb2.ROLE_USER,)), None)
            for beyond in (
                request("acme", "audit"),
                request("acme", roles=(admin_pb2.ROLE_ADMIN,)),
                request("other", "exec"),
            ):
                with pytest.raises(PermissionDeniedError):
                    await servicer.CreateKey(beyond, None)
        every_scope = frozenset({"keys", "tenants", "images", "audit", "debug"})
        with calling("acme", "user", scopes=every_scope), pytest.raises(PermissionDeniedError, match="ROLE_ADMIN"):
            await servicer.CreateKey(request("acme", roles=(admin_pb2.ROLE_ADMIN,)), None)

    async def test_without_the_role_admin_other_tenants_keys_are_not_there(self, store: GatewayStore) -> None:
        keys = Keys(store, Health())
        servicer = KeyServicer(keys)
        own, _secret = await keys.create("acme", "", USER, None)
        foreign, _secret = await keys.create("other", "", USER, None)
        with calling("acme", scopes={"keys"}):
            listed = (await servicer.ListKeys(key_service_pb2.ListKeysRequest(), None)).keys
            assert [key.key_id for key in listed] == [own.key_id]
            with pytest.raises(PermissionDeniedError):
                await servicer.ListKeys(key_service_pb2.ListKeysRequest(tenant="other"), None)
            with pytest.raises(NotFoundError):
                await servicer.RevokeKey(key_service_pb2.RevokeKeyRequest(key_id=foreign.key_id), None)
            await servicer.RevokeKey(key_service_pb2.RevokeKeyRequest(key_id=own.key_id), None)
        assert (await store.find_key(foreign.key_id)).revoke_time is None
        with calling("ops", "admin"):
            await servicer.RevokeKey(key_service_pb2.RevokeKeyRequest(key_id=foreign.key_id), None)


def test_before_scopes_there_is_no_key_that_would_gain_by_their_loss(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS gateway CASCADE")
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS, revision="0003")
        connection.execute("INSERT INTO gateway.api_keys VALUES ('old', 't', '', '\\x00', '{user}', now())")
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS, revision="0004")
        assert connection.execute("SELECT key_id, scopes FROM gateway.api_keys").fetchall() == [("old", [])]
        insert = "INSERT INTO gateway.api_keys VALUES (%s, 't', '', '\\x00', %s, now(), NULL, NULL, %s)"
        connection.execute(insert, ("both", ["user"], ["audit"]))
        connection.execute(insert, ("scopes", [], ["exec"]))
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS, revision="-1")
        rows = connection.execute("SELECT key_id, revoke_time IS NULL FROM gateway.api_keys ORDER BY 1").fetchall()
        assert rows == [("both", True), ("old", True), ("scopes", False)]
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
        rows = connection.execute("SELECT key_id, scopes FROM gateway.api_keys ORDER BY 1").fetchall()
        assert rows == [("both", []), ("old", []), ("scopes", [])]
