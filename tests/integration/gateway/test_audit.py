"""The audit log against a real PostgreSQL, and what calls notice of it: nothing."""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import grpc
import grpc.aio
import psycopg
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from orchard.admin.v1 import audit_service_pb2

from services.common.db import connect, migrate
from services.common.errors import InvalidArgumentError, PermissionDeniedError, UnavailableError
from services.common.health import Health
from services.common.interceptor import Call, CallInterceptor, note_target
from services.common.pages import encode_token
from services.common.server import Server
from services.common.tasks import TaskGroup
from services.common.tokens import Principal
from services.gateway.__main__ import MIGRATIONS
from services.gateway.audit import CHANGES, AuditLog, Entry, Wanted, address_of
from services.gateway.keys import Keys
from services.gateway.scopes import scope_of
from services.gateway.servicer_audit import AuditServicer
from services.gateway.store import SCHEMA, GatewayStore, utc_now
from services.gateway.store_audit import AuditTable
from tests.integration.gateway.callers import calling
from tests.support.stores import stoppable

BACKSTOP = 110
TIMEOUT = 5
"""Of a statement, in seconds: a busy database keeps to it, and a test waits for one that stands still."""
START = datetime(2026, 1, 1, tzinfo=UTC)
DELETE = "/orchard.sandbox.v1.SandboxService/DeleteSandbox"
GET = "/orchard.sandbox.v1.SandboxService/GetSandbox"
EXEC = "/orchard.exec.v1.ExecService/StartExec"
ANYBODY = Principal("acme", "0123456789ab", frozenset())


@pytest.fixture
async def table(database: str) -> AsyncIterator[AuditTable]:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("TRUNCATE gateway.audit, gateway.api_keys")
    table = AuditTable(connect(database), timeout_seconds=TIMEOUT)
    yield table
    await table.close()


def entry(hour: int = 0, **values: str) -> Entry:
    texts = dict.fromkeys(("tenant", "key_id", "method", "target", "request_id", "status", "client_address"), "")
    return Entry(uuid.uuid4(), START + timedelta(hours=hour), **{**texts, **values})


def ended_call(method: str, *, who: Principal | None = ANYBODY, **values: str) -> Call:
    return Call(method, "r", who, authenticated=who is not None, **values)


def peer() -> str:
    return "ipv4:10.0.0.7:4711"


async def everything(table: AuditTable) -> list[Entry]:
    return await table.page(Wanted(), None, 1000)


# Calls through a real server.


class Handlers(grpc.GenericRpcHandler):
    """Deletes what is there, and is an agent that refuses a file."""

    def service(self, details: grpc.HandlerCallDetails):
        return grpc.unary_unary_rpc_method_handler(self._refuse if "ExecService" in details.method else self._delete)

    async def _delete(self, request: bytes, context) -> bytes:
        note_target(request.decode())
        return b""

    async def _refuse(self, request: bytes, context) -> bytes:
        raise PermissionDeniedError("no such right on the file")


@asynccontextmanager
async def serving(
    database: str, table: AuditTable, **options
) -> AsyncIterator[tuple[Keys, AuditLog, grpc.aio.Channel]]:
    store = GatewayStore(connect(database), timeout_seconds=TIMEOUT)
    keys = Keys(store, Health())
    audit = AuditLog(table, **{"commands": False, "flush_seconds": 0.01, **options})
    server = Server(interceptor=CallInterceptor(authenticator=keys, observer=audit), health=Health(), service_names=[])
    server.grpc_server.add_generic_rpc_handlers((Handlers(),))
    port = await server.start("127.0.0.1:0")
    async with TaskGroup() as tasks, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        tasks.start("write the audit log", audit.run())
        yield keys, audit, channel
        assert not tasks.failed.done()
    await server.stop()
    await audit.flush()  # a refused call has its answer a moment before it has its entry
    await store.close()


async def call(channel: grpc.aio.Channel, method: str, request: bytes = b"", *, key: str = "") -> str:
    metadata = (("authorization", f"Bearer {key}"), ("orchard-request-id", "mine"))
    try:
        await channel.unary_unary(method)(request, metadata=metadata, timeout=BACKSTOP)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def until_written(audit: AuditLog) -> None:
    async with asyncio.timeout(BACKSTOP):
        while audit.waiting()["waiting"]:
            await asyncio.sleep(0.005)


async def test_changes_and_refusals_have_an_entry_and_nothing_else_has(database: str, table: AuditTable) -> None:
    async with serving(database, table) as (keys, audit, channel):
        user, secret = await keys.create("acme", "", frozenset({"user"}), None)
        reader, read_only = await keys.create("acme", "", frozenset(), None, scopes=frozenset({"sandboxes:read"}))
        assert await call(channel, DELETE, b"sb-1", key=secret) == "OK"
        assert await call(channel, GET, b"sb-1", key=secret) == "OK"
        assert await call(channel, EXEC, b"sb-1", key=secret) == "PERMISSION_DENIED"  # the agent's own word
        assert await call(channel, DELETE, b"sb-1", key=read_only) == "PERMISSION_DENIED"
        assert await call(channel, EXEC, b"sb-1", key=read_only) == "PERMISSION_DENIED"
        assert await call(channel, GET, b"sb-1", key=f"ork_{user.key_id}_wrong") == "UNAUTHENTICATED"
        assert await call(channel, GET, b"sb-1", key=secret.split("_", 2)[2]) == "UNAUTHENTICATED"
        await until_written(audit)
    # In any order: the entry of a refused call may come after that of the next one.
    assert Counter((e.tenant, e.key_id, e.method, e.target, e.status) for e in await everything(table)) == Counter(
        [
            ("acme", user.key_id, DELETE[1:], "sb-1", "OK"),
            ("acme", reader.key_id, DELETE[1:], "", "PERMISSION_DENIED"),
            ("acme", reader.key_id, EXEC[1:], "", "PERMISSION_DENIED"),
            ("", user.key_id, GET[1:], "", "UNAUTHENTICATED"),
            ("", "", GET[1:], "", "UNAUTHENTICATED"),
        ]
    )
    assert {(e.request_id, e.client_address) for e in await everything(table)} == {("mine", "127.0.0.1")}
    with psycopg.connect(database) as connection:
        stored = repr(connection.execute("SELECT * FROM gateway.audit").fetchall())
    for made in (secret, read_only):
        assert made.split("_", 2)[2] not in stored


async def test_commands_have_entries_where_the_setting_says_so(database: str, table: AuditTable) -> None:
    async with serving(database, table, commands=True) as (keys, audit, channel):
        _key, secret = await keys.create("acme", "", frozenset({"user"}), None)
        await call(channel, EXEC, key=secret)
        await call(channel, GET, key=secret)
        await until_written(audit)
    assert [e.method for e in await everything(table)] == [EXEC[1:]]


async def test_calls_go_on_while_the_database_stands_still_and_what_waits_is_written_later(
    database: str, table: AuditTable
) -> None:
    async with serving(database, table) as (keys, audit, channel):
        _key, secret = await keys.create("acme", "", frozenset({"user"}), None)
        with stoppable(database) as (stop, go_on):
            stop()
            for number in range(20):
                assert await call(channel, DELETE, b"sb-%d" % number, key=secret) == "OK"
            with pytest.raises(UnavailableError):
                await table.page(Wanted(), None, 1)
            assert audit.waiting() == {"waiting": 20}
            go_on()
            await until_written(audit)
    assert [e.target for e in reversed(await everything(table))] == [f"sb-{number}" for number in range(20)]


async def test_what_does_not_fit_is_dropped_counted_and_reported(
    table: AuditTable, caplog: pytest.LogCaptureFixture
) -> None:
    audit = AuditLog(table, commands=False, flush_seconds=1, capacity=20)
    for _ in range(5):
        audit.ended(ended_call(GET, who=None), "UNAUTHENTICATED", peer)
    # Callers without a key fill a tenth, and take nothing of the others' part.
    assert (audit.counts()["dropped"], audit.waiting()["waiting"]) == (3, 2)
    for number in range(30):
        audit.ended(ended_call(DELETE, target=str(number)), "OK", peer)
    assert (audit.counts()["dropped"], audit.waiting()["waiting"]) == (3 + 12, 20)
    with caplog.at_level(logging.WARNING):
        await audit.flush()
        await audit.flush()
    assert [record.orchard_fields["count"] for record in caplog.records] == [15]
    assert audit.counts() == {"written": 20, "dropped": 15}
    targets = [e.target for e in await everything(table) if e.tenant]
    assert sorted(map(int, targets)) == list(range(18))


async def test_a_gateway_that_stops_in_order_loses_nothing(table: AuditTable) -> None:
    audit = AuditLog(table, commands=False, flush_seconds=3600)
    async with TaskGroup() as tasks:
        tasks.start("write", audit.run())
        audit.ended(ended_call(DELETE, target="last"), "OK", peer)
    await audit.close()
    assert [e.target for e in await everything(table)] == ["last"]


async def test_a_batch_whose_answer_was_lost_is_not_there_twice(table: AuditTable) -> None:
    batch = [entry(target="a"), entry(target="b")]
    await table.add(batch)
    await table.add([*batch, entry(target="c")])
    assert sorted(e.target for e in await everything(table)) == ["a", "b", "c"]


async def test_any_text_can_be_stored(table: AuditTable) -> None:
    audit = AuditLog(table, commands=False, flush_seconds=1)
    for target in ("x" * 10_000, "a\0b", "'; DROP TABLE gateway.audit; --", "\N{SNOWMAN}"):
        audit.ended(ended_call(DELETE, target=target), "OK", peer)
    await audit.flush()
    assert [e.target for e in reversed(await everything(table))] == [
        "x" * 256,
        "a\N{REPLACEMENT CHARACTER}b",
        "'; DROP TABLE gateway.audit; --",
        "\N{SNOWMAN}",
    ]


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:%5B2001:db8::1%5D:4711", "2001:db8::1"),
        ("ipv6:[::1]:1", "::1"),
        ("unix:/run/x.sock", "unix"),
        ("unix:", "unix"),
    ],
)
def test_addresses(name: str, address: str) -> None:
    assert address_of(name) == address


def test_what_changes_something_is_served() -> None:
    assert {method for method in CHANGES if not scope_of(method)} == set()


async def test_old_entries_are_forgotten(table: AuditTable) -> None:
    await table.add([entry(hour=hour) for hour in range(5)])
    await table.add([Entry(uuid.uuid4(), utc_now(), *[""] * 7)])
    assert await table.forget(START + timedelta(hours=3), 2) == 2
    assert await table.forget(START + timedelta(hours=3), 2) == 1
    assert await table.forget(START + timedelta(hours=3), 2) == 0
    audit = AuditLog(table, commands=False, flush_seconds=1)
    async with TaskGroup() as tasks, asyncio.timeout(BACKSTOP):
        tasks.start("forget", audit.run_forgetting(days=1))
        while len(await everything(table)) > 1:
            await asyncio.sleep(0.01)


# ListAudit.


def stamp(hour: int) -> Timestamp:
    result = Timestamp()
    result.FromDatetime(START + timedelta(hours=hour))
    return result


async def listed(table: AuditTable, **request) -> list[str]:
    """Targets, through all pages."""
    found: list[str] = []
    token = ""
    while True:
        asked = audit_service_pb2.ListAuditRequest(page_size=2, page_token=token, **request)
        answer = await AuditServicer(table).ListAudit(asked, None)
        found += [e.target for e in answer.entries]
        token = answer.next_page_token
        if not token:
            return found


async def test_pages_and_filters(table: AuditTable) -> None:
    await table.add(
        [
            entry(0, tenant="acme", key_id="k1", method="a.B/Make", target="0", status="OK"),
            entry(1, tenant="acme", key_id="k2", method="a.B/Make", target="1", status="OK"),
            entry(1, tenant="acme", key_id="k1", method="a.B/Drop", target="2", status="OK"),
            entry(2, tenant="other", key_id="k3", method="a.C/Make", target="3", status="PERMISSION_DENIED"),
        ]
    )
    with calling("ops", "admin"):
        assert sorted(await listed(table)) == ["0", "1", "2", "3"]
        assert (await listed(table))[0] == "3"
        assert await listed(table, tenant="other") == ["3"]
        assert await listed(table, key_id="k1") == ["2", "0"]
        assert await listed(table, method="Make", tenant="acme") == ["1", "0"]
        assert await listed(table, method="/a.C/Make") == ["3"]
        assert await listed(table, target="2") == ["2"]
        assert await listed(table, status="PERMISSION_DENIED") == ["3"]
        assert sorted(await listed(table, start_time=stamp(1), end_time=stamp(2))) == ["1", "2"]
    with calling("acme"):
        assert sorted(await listed(table)) == ["0", "1", "2"]
        with pytest.raises(PermissionDeniedError):
            await listed(table, tenant="other")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (audit_service_pb2.ListAuditRequest(page_size=1001), "page_size"),
        (audit_service_pb2.ListAuditRequest(target="a\0"), "target"),
        (audit_service_pb2.ListAuditRequest(method="x" * 300), "method"),
        (audit_service_pb2.ListAuditRequest(start_time=stamp(2), end_time=stamp(1)), "start_time"),
        (audit_service_pb2.ListAuditRequest(end_time=Timestamp(seconds=1 << 60)), "end_time"),
        (audit_service_pb2.ListAuditRequest(page_token="x"), "page_token"),
        (audit_service_pb2.ListAuditRequest(page_token=encode_token((1, "x"))), "page_token"),
        (audit_service_pb2.ListAuditRequest(page_token=encode_token((10**30, uuid.uuid4().hex))), "page_token"),
    ],
)
async def test_bad_input_is_named(table: AuditTable, request_, field: str) -> None:
    with calling("ops", "admin"), pytest.raises(InvalidArgumentError, match=field):
        await AuditServicer(table).ListAudit(request_, None)


def test_the_table_comes_and_goes_and_leaves_the_rest(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS gateway CASCADE")
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
        connection.execute("INSERT INTO gateway.api_keys VALUES ('k', 't', '', '\\x00', '{user}', now())")
        connection.execute(
            "INSERT INTO gateway.audit VALUES (gen_random_uuid(), now(), 't', 'k', 'm', 'x', 'r', 'OK', '')"
        )
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS, revision="-1")
        assert connection.execute("SELECT to_regclass('gateway.audit')").fetchone() == (None,)
        assert connection.execute("SELECT key_id FROM gateway.api_keys").fetchall() == [("k",)]
        migrate(postgres_url, schema=SCHEMA, migrations=MIGRATIONS)
        assert connection.execute("SELECT count(*) FROM gateway.audit").fetchone() == (0,)
