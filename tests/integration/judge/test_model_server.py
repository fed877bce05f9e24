"""The way to a model server: proxies, other addresses, answers without an end; the key goes where it should."""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from services.common.settings import SettingsError
from services.judge.backends.base import CallError
from services.judge.backends.endpoint import make_endpoint
from services.judge.backends.model_server import ModelServer
from services.judge.backends.settings import JudgeSettings
from services.judge.model import Reason
from tests.support.certificates import Authority
from tests.support.judge_server import JudgeServer, running_judge

BODY = {"messages": [{"role": "system", "content": '"ticket": the string "0"'}], "system": "", "max_tokens": 16}
HEADERS = {"authorization": "Bearer ours", "x-api-key": "ours", "accept": "application/json", "x-left-out": None}


@asynccontextmanager
async def model_server(base: str) -> AsyncIterator[ModelServer]:
    found = ModelServer(httpx2.URL(base), "/messages", HEADERS, timeout_seconds=60)
    try:
        yield found
    finally:
        await found.close()


@pytest.fixture(autouse=True)
def _no_proxy_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
async def test_the_proxy_of_the_environment_is_asked(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    server.behave("no completion")
    monkeypatch.setenv(name, server.url)
    async with model_server("http://judge.invalid/v1/") as there:
        assert await there.post(BODY, "k") == {"status": "ok"}
    assert server.targets == ["http://judge.invalid/v1/messages"]


async def test_a_proxy_is_told_its_own_password(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.behave("no completion")
    monkeypatch.setenv("HTTP_PROXY", f"me:it%20is@127.0.0.1:{server.port}")
    async with model_server("http://judge.invalid") as there:
        await there.post(BODY, "k")
    assert server.headers[0]["proxy-authorization"] == f"Basic {base64.b64encode(b'me:it is').decode()}"
    assert server.headers[0]["authorization"] == "Bearer ours"


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
async def test_a_server_is_told_the_password_of_its_address(server: JudgeServer, header: str) -> None:
    server.behave("no completion")
    there = ModelServer(httpx2.URL(f"http://me:it%20is@127.0.0.1:{server.port}"), "/messages", {header: "ours"}, 60)
    await there.post(BODY, "k")
    await there.close()
    assert server.headers[0]["authorization"] == f"Basic {base64.b64encode(b'me:it is').decode()}"
    assert server.targets == ["/messages"]
    assert "@" not in server.headers[0]["host"]


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "password"])
@pytest.mark.parametrize("status", ["400", "429", "500"])
async def test_a_key_that_a_server_repeats_is_told_to_nobody(server: JudgeServer, header: str, status: str) -> None:
    """As some do with all that they were sent, and what a server says of an error is stored with the verdict."""
    key = "sk-0123456789abcdef"
    server.behave(status)
    server.message = f"model j is not for {key}, sent as Bearer {key}"
    if header == "password":
        server.message += f" or {base64.b64encode(f'me:{key}'.encode()).decode()}"
        base, headers = f"http://me:{key}@127.0.0.1:{server.port}", dict[str, str]()
    else:
        base, headers = server.url, {header: f"Bearer {key}" if header == "Authorization" else key}
    there = ModelServer(httpx2.URL(base), "/messages", headers, 60)
    with pytest.raises(CallError) as raised:
        await there.post(BODY, "k")
    await there.close()
    told = f"status {status}: model j is not for (hidden), sent as Bearer (hidden)"
    assert told in raised.value.message
    assert raised.value.message.endswith("(hidden)")


async def test_a_tunnel_is_asked_for_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[str] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    proxy = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:mine@127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        async with model_server("https://judge.invalid") as there:
            with pytest.raises(CallError) as caught:
                await there.post(BODY, "k")
    assert (caught.value.reason, caught.value.again) == (Reason.UNAVAILABLE, True)
    (head,) = heads
    assert head.startswith("CONNECT judge.invalid:443 ")
    assert f"Proxy-Authorization: Basic {base64.b64encode(b'me:mine').decode()}" in head
    assert "ours" not in head


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("socks5://me:mine@127.0.0.1:1080", r"a socks5 proxy for judge\.invalid"),
        ("http://me:mine/12@127.0.0.1:1080", r"for judge\.invalid has no address"),
        ("me:mine@127.0.0.1:mine", r"for judge\.invalid has no address"),
        ("http://", r"for judge\.invalid has no address"),
    ],
)
def test_a_proxy_that_cannot_be_asked_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch, address: str, words: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", address)
    with pytest.raises(SettingsError, match=f"{words}; set HTTP_PROXY") as caught:
        ModelServer(httpx2.URL("https://judge.invalid"), "/messages", HEADERS, 60)
    assert "mine" not in str(caught.value)


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ALL_PROXY", "socks5://me:mine@127.0.0.1:1080", "a socks5 proxy"),
        ("HTTPS_PROXY", "http://me:mine/12@127.0.0.1:1080", "has no address"),
        ("HTTPS_PROXY", "ftp://127.0.0.1:1080", "a ftp proxy"),
        ("SSL_CERT_FILE", "/nowhere/authorities.pem", "SSL_CERT_FILE"),
    ],
)
async def test_no_vendors_library_looks_at_the_environment_first(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str, value: str, words: str
) -> None:
    """What it says of a proxy may be a piece of a password, and it wants one also where none is asked."""
    monkeypatch.setenv("JUDGE_KEY", "ours")
    monkeypatch.setenv(name, value)
    given = {"name": "a", "kind": kind, "model": "m", "base_url": "https://judge.invalid", "api_key_env": "JUDGE_KEY"}
    settings = JudgeSettings.model_validate(given)
    with pytest.raises(SettingsError, match=words):
        make_endpoint(settings)
    if name != "SSL_CERT_FILE":
        monkeypatch.setenv("NO_PROXY", "judge.invalid")
        await make_endpoint(settings).close()


@pytest.mark.parametrize("form", ["127.0.0.1", "127.0.0.1:{port}", "other, 127.0.0.1:{port}", "*"])
async def test_an_address_without_proxy_is_asked_itself(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    server.behave("no completion")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", form.format(port=server.port))
    async with model_server(server.url) as there:
        await there.post(BODY, "k")
    assert server.targets == ["/messages"]


async def test_a_password_of_the_user_is_not_sent(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password mine\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    server.behave("no completion")
    async with model_server(server.url) as there:
        await there.post(BODY, "k")
    assert server.headers[0]["authorization"] == "Bearer ours"
    assert server.headers[0]["idempotency-key"] == "k"
    assert "x-left-out" not in server.headers[0]


async def test_a_server_that_has_moved_is_followed(server: JudgeServer) -> None:
    server.behave("moved", "no completion")
    async with model_server(server.url) as there:
        await there.post(BODY, "k")
    assert server.targets == ["/messages", "/moved/messages"]
    assert server.requests == [BODY, BODY]


async def test_the_key_goes_to_no_other_server(server: JudgeServer) -> None:
    async def send_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        where = f"location: {server.url}/elsewhere\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        writer.write(f"HTTP/1.1 307 Temporary Redirect\r\n{where}".encode())
        await reader.read()
        writer.close()

    server.behave("no completion")
    other = await asyncio.start_server(send_on, "127.0.0.1", 0)
    async with other, model_server(f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}") as there:
        await there.post(BODY, "k")
    assert server.targets == ["/elsewhere"]
    assert server.requests == [BODY]
    assert "ours" not in str(server.headers)
    assert server.headers[0]["accept"] == "application/json"


async def test_an_answer_without_an_end_is_left(server: JudgeServer) -> None:
    server.behave("endless")
    async with model_server(server.url) as there:
        with pytest.raises(ValueError, match="more than 67,108,864 bytes"):
            await there.post(BODY, "k")


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_authorities_that_cannot_be_read_are_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    authorities = tmp_path / "authorities.pem"
    if content is not None:
        authorities.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities))
    with pytest.raises(SettingsError, match="SSL_CERT_FILE"):
        ModelServer(httpx2.URL("https://judge.invalid"), "/messages", HEADERS, 60)


@pytest.mark.parametrize("known", [False, True])
async def test_a_server_is_told_by_its_certificate(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, pair = Authority(), tmp_path / "pair.pem"
    issued = authority.issue("127.0.0.1")
    pair.write_bytes(issued.cert + issued.key)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair)
    if known:
        (tmp_path / "authorities.pem").write_bytes(authority.pem)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authorities.pem"))
    async with running_judge(tls=tls) as server, model_server(f"https://127.0.0.1:{server.port}") as there:
        server.behave("no completion")
        if known:
            assert await there.post(BODY, "k") == {"status": "ok"}
            return
        with pytest.raises(CallError) as caught:
            await there.post(BODY, "k")
        assert (caught.value.reason, caught.value.again) == (Reason.UNAVAILABLE, True)
        assert not server.requests
