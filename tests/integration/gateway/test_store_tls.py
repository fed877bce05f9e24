"""The gateway's database over TLS, against a real PostgreSQL that lets callers in by certificate alone."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from services.common.db import connect, migrate
from services.common.errors import UnavailableError
from services.common.health import Health
from services.common.tasks import TaskGroup
from services.common.tls import TlsError, TlsFiles
from services.gateway.__main__ import MIGRATIONS
from services.gateway.keys import Keys
from services.gateway.store import SCHEMA, GatewayStore, utc_now
from tests.support.certificates import Authority, MountedSecret
from tests.support.tls_stores import TlsServer, connection_arguments, give_to_server, running_tls_postgres


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def server(authority: Authority) -> Iterator[TlsServer]:
    with running_tls_postgres(authority) as found:
        migrate(found.url, schema=SCHEMA, migrations=MIGRATIONS, tls=found.caller.files)
        yield found


async def attempt(url: str, tls: TlsFiles | None) -> None:
    store = GatewayStore(connect(url, tls=tls))
    try:
        await store.working_keys(utc_now())
    finally:
        await store.close()


async def test_the_database_is_used_with_certificates_of_its_authority_alone(
    server: TlsServer, authority: Authority, tmp_path: Path
) -> None:
    await attempt(server.url, server.caller.files)
    stranger = MountedSecret(tmp_path / "stranger", Authority().issue("orchard"), authority.pem)
    deceived = MountedSecret(tmp_path / "deceived", authority.issue("orchard"), Authority().pem)
    other = MountedSecret(tmp_path / "other", authority.issue("somebody"), authority.pem)
    wrong = {
        "an authority that it does not know": (server.url, stranger.files),
        "a server of another authority": (server.url, deceived.files),
        "another user": (server.url, other.files),
        "no certificate": (server.url, TlsFiles(ca=server.caller.ca)),
        "another name": (server.url.replace("127.0.0.1", "localhost"), server.caller.files),
        "in the clear": (server.url + "?sslmode=disable", None),
    }
    for what, (url, tls) in wrong.items():
        with pytest.raises(UnavailableError):
            await attempt(url, tls)
            pytest.fail(what)


async def test_new_files_are_used_at_the_next_connection(server: TlsServer) -> None:
    store = GatewayStore(connect(server.url, tls=server.caller.files))
    try:
        await store.working_keys(utc_now())
        following = Authority()
        with psycopg.connect(server.url, autocommit=True, **connection_arguments(server)) as admin:
            server.secret.replace(following.issue("127.0.0.1"), following.pem)
            give_to_server(server.secret.cert.parent.parent)
            server.caller.replace(following.issue("orchard"), following.pem)
            server.reload()
            _wait_until_reloaded(server)
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        async with asyncio.timeout(110):
            assert await _soon(store) == []
    finally:
        await store.close()


def _wait_until_reloaded(server: TlsServer) -> None:
    end = time.monotonic() + 110
    while time.monotonic() < end:
        try:
            psycopg.connect(server.url, **connection_arguments(server)).close()
        except psycopg.OperationalError:
            time.sleep(0.02)
        else:
            return
    pytest.fail("PostgreSQL did not read its new files")


async def _soon(store: GatewayStore) -> list[object]:
    while True:
        try:
            return list(await store.working_keys(utc_now()))
        except UnavailableError:
            await asyncio.sleep(0.01)


def test_a_migration_says_which_file_it_cannot_use(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match=r"cannot read .*ca\.pem"):
        migrate("postgresql://x@127.0.0.1:1/x", schema="x", migrations=MIGRATIONS, tls=TlsFiles(ca=tmp_path / "ca.pem"))


async def test_a_database_that_is_not_trusted_is_named_in_the_log_with_the_reason(
    server: TlsServer, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deceived = MountedSecret(tmp_path / "deceived", authority.issue("orchard"), Authority().pem)
    store = GatewayStore(connect(server.url, tls=deceived.files))
    health = Health()
    try:
        async with TaskGroup() as tasks, asyncio.timeout(110):
            tasks.start("read the keys", Keys(store, health).run_refresh(0.01))
            while not health.wrong:
                await asyncio.sleep(0.01)
    finally:
        await store.close()
    (said,) = [record.orchard_fields for record in caplog.records if record.getMessage() == "dependency is unwell"]
    assert said["why"] == "the database does not answer; retry"
    assert "certificate verify failed" in said["detail"]
