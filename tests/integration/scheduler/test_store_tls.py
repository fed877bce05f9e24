"""The lease store over TLS, against a real Redis that asks for a certificate."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.errors import UnavailableError
from services.common.tls import TlsFiles
from services.scheduler.store import LeaseStore
from tests.support.certificates import Authority, MountedSecret
from tests.support.tls_stores import TlsServer, drop_redis_connections, reload_redis, running_tls_redis


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def server(authority: Authority) -> Iterator[TlsServer]:
    with running_tls_redis(authority) as found:
        yield found


async def attempt(url: str, tls: TlsFiles | None) -> None:
    store = LeaseStore(url, tls)
    try:
        assert await store.living() == []
    finally:
        await store.close()


async def test_redis_is_used_with_certificates_of_its_authority_alone(
    server: TlsServer, authority: Authority, tmp_path: Path
) -> None:
    await attempt(server.url, server.caller.files)
    stranger = MountedSecret(tmp_path / "stranger", Authority().issue("scheduler"), authority.pem)
    deceived = MountedSecret(tmp_path / "deceived", authority.issue("scheduler"), Authority().pem)
    wrong = {
        "an authority that it does not know": (server.url, stranger.files),
        "a server of another authority": (server.url, deceived.files),
        "no certificate": (server.url, TlsFiles(ca=server.caller.ca)),
        "another name": (server.url.replace("127.0.0.1", "localhost"), server.caller.files),
        "in the clear": (server.url.replace("rediss", "redis"), None),
    }
    for what, (url, tls) in wrong.items():
        with pytest.raises(UnavailableError):
            await attempt(url, tls)
            pytest.fail(what)


async def test_new_files_are_used_at_the_next_connection(server: TlsServer) -> None:
    store = LeaseStore(server.url, server.caller.files)
    try:
        assert await store.living() == []
        following = Authority()
        server.secret.replace(following.issue("127.0.0.1"), following.pem)
        reload_redis(server)
        server.caller.replace(following.issue("scheduler"), following.pem)
        drop_redis_connections(server)
        async with asyncio.timeout(110):
            assert await _soon(store) == []
    finally:
        await store.close()


async def _soon(store: LeaseStore) -> list[tuple[str, str]]:
    while True:
        try:
            return await store.living()
        except UnavailableError:
            await asyncio.sleep(0.01)
