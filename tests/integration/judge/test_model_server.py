"""The way to a model server: proxies, other addresses, answers without an end; the key goes where it should."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from services.judge.backends.base import CallError
from services.judge.backends.model_server import ModelServer
from services.judge.model import Reason
from tests.support.certificates import Authority
from tests.support.judge_server import JudgeServer, running_judge

BODY = {"messages": [{"role": "system", "content": '"ticket": the string "0"'}], "system": "", "max_tokens": 16}
HEADERS = {"authorization": "Bearer ours", "x-left-out": None}


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


async def test_an_address_without_proxy_is_asked_itself(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.behave("no completion")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
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


async def test_an_answer_without_an_end_is_left(server: JudgeServer) -> None:
    server.behave("endless")
    async with model_server(server.url) as there:
        with pytest.raises(ValueError, match="more than 67,108,864 bytes"):
            await there.post(BODY, "k")


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
