"""The SDK and the command line over TLS: against the whole platform, and what they say when something does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import orchard
import pytest
from orchard import AsyncSandboxClient, SandboxClient

from tests.support.certificates import Authority, MountedSecret, Pair
from tests.support.platform import PlatformProcess, running_platform

COMMAND_LINE = [sys.executable, "-m", "orchard._cli.main"]
HOST = "127.0.0.1"
BACKSTOP = 110


class Secured:
    """A platform that serves TLS and asks for client certificates."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority("first")
        self.server = MountedSecret(folder / "server", self.authority.issue(HOST), self.authority.pem)
        self.client = MountedSecret(folder / "client", self.authority.issue("researcher"), self.authority.pem)
        self.environment = {
            "ORCHARD_TLS_CERT_FILE": str(self.server.cert),
            "ORCHARD_TLS_KEY_FILE": str(self.server.key),
            "ORCHARD_TLS_CLIENT_CA_FILE": str(self.server.ca),
            "ORCHARD_CA_FILE": str(self.client.ca),
            "ORCHARD_CERT_FILE": str(self.client.cert),
            "ORCHARD_KEY_FILE": str(self.client.key),
        }


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Secured:
    return Secured(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_platform(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("tls"), environment=secured.environment) as platform:
        yield platform


@pytest.fixture
def profile(tls_platform: PlatformProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the profile that the platform wrote says how to reach it."""
    monkeypatch.setenv("ORCHARD_CONFIG_DIR", tls_platform.environment["ORCHARD_CONFIG_DIR"])


@pytest.mark.usefixtures("profile")
def test_the_profile_of_a_platform_with_tls_is_all_that_is_needed(
    tls_platform: PlatformProcess, secured: Secured, tmp_path: Path
) -> None:
    assert tls_platform.profile["ca_file"] == str(secured.client.ca)
    (tmp_path / "f").write_bytes(b"x" * 3_000_000)
    with SandboxClient() as client, client.create() as sandbox:
        assert client.endpoint.startswith("https://")
        sandbox.upload(tmp_path / "f", "/tmp/f")
        assert sandbox.exec("wc -c < /tmp/f").stdout.strip() == "3000000"
    environment = {k: v for k, v in tls_platform.client_environment().items() if not k.endswith("_FILE")}
    run = subprocess.run([*COMMAND_LINE, "version", "--json"], env=environment, capture_output=True, timeout=BACKSTOP)
    assert json.loads(run.stdout)["endpoint"] == tls_platform.endpoint


@pytest.mark.usefixtures("profile")
async def test_everything_is_replaced_while_a_command_streams(secured: Secured) -> None:
    async with AsyncSandboxClient() as client, client.create() as sandbox:
        stream = sandbox.exec_stream("mkfifo /tmp/pipe; echo begun; cat /tmp/pipe")
        parts = aiter(stream)
        assert (await anext(parts)).text == "begun\n"
        second = Authority("second")
        secured.server.replace(second.issue(HOST), second.pem)
        secured.client.replace(second.issue("researcher"), second.pem)
        async with AsyncSandboxClient() as late:
            assert (await late.version()).tenant == "default"
            assert (await late.attach(sandbox.sandbox_id).exec("echo more > /tmp/pipe", concurrent=True)).ok
        assert (await anext(parts)).text == "more\n"
        async for _ in parts:
            pytest.fail("there is no more")
        # The same client, on a connection with the new files.
        assert (await sandbox.exec("true")).ok


@asynccontextmanager
async def bare_server(pair: Pair, client_ca: bytes | None = None) -> AsyncIterator[str]:
    """A TLS server that checks nothing of its own files, unlike ours."""
    server = grpc.aio.server()
    credentials = grpc.ssl_server_credentials([(pair.key, pair.cert)], client_ca, client_ca is not None)
    port = server.add_secure_port(f"{HOST}:0", credentials)
    await server.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        await server.stop(None)


async def refusal(endpoint: str) -> tuple[str, str]:
    """Reason and message of the error that a first call raises, and it does so without any retry."""
    async with AsyncSandboxClient(endpoint, api_key="ork_x_y") as client:
        with pytest.raises(orchard.Unavailable) as caught:
            await client.version()
    return caught.value.reason, caught.value.message


async def test_a_certificate_that_cannot_be_trusted_says_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    ca = MountedSecret(tmp_path / "ca", ca=authority.pem).ca
    async with bare_server(authority.issue(HOST)) as address:
        reason, message = await refusal(f"https://{address}")
        assert reason == "CERTIFICATE_AUTHORITY"
        assert "authorities of this machine; set ORCHARD_CA_FILE" in message
        monkeypatch.setenv("ORCHARD_CA_FILE", str(MountedSecret(tmp_path / "other", ca=Authority().pem).ca))
        reason, message = await refusal(f"grpcs://{address}")
        assert reason == "CERTIFICATE_AUTHORITY"
        assert f"authorities in {tmp_path}/other/ca.crt" in message
        monkeypatch.setenv("ORCHARD_CA_FILE", str(ca))
        reason, message = await refusal(f"https://localhost:{address.rpartition(':')[2]}")
        assert reason == "CERTIFICATE_NAME"
        assert "not for 'localhost'" in message
    async with bare_server(authority.issue(HOST, expired=True)) as address:
        reason, message = await refusal(f"https://{address}")
        assert reason == "CERTIFICATE_EXPIRED"
        assert f"at https://{address}: its certificate has expired" in message


async def test_a_missing_or_foreign_client_certificate_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority()
    monkeypatch.setenv("ORCHARD_CA_FILE", str(MountedSecret(tmp_path / "ca", ca=authority.pem).ca))
    async with bare_server(authority.issue(HOST), authority.pem) as address:
        reason, message = await refusal(f"https://{address}")
        assert reason == "CLIENT_CERTIFICATE_REQUIRED"
        assert "set ORCHARD_CERT_FILE and ORCHARD_KEY_FILE" in message
        foreign = MountedSecret(tmp_path / "foreign", Authority().issue("researcher"))
        monkeypatch.setenv("ORCHARD_CERT_FILE", str(foreign.cert))
        monkeypatch.setenv("ORCHARD_KEY_FILE", str(foreign.key))
        reason, message = await refusal(f"https://{address}")
        assert reason == "CLIENT_CERTIFICATE_REFUSED"
        assert str(foreign.cert) in message


async def test_tls_on_one_side_only_is_named() -> None:
    server = grpc.aio.server()
    address = f"{HOST}:{server.add_insecure_port(f'{HOST}:0')}"
    await server.start()
    reason, message = await refusal(f"https://{address}")
    await server.stop(None)
    assert reason == "TLS_NOT_SPOKEN"
    assert f"use http://{address}" in message
    async with bare_server(Authority().issue(HOST)) as address:
        reason, message = await refusal(address)
        assert reason == "TLS_REQUIRED"
        assert f"use https://{address}" in message


async def test_nobody_there_is_still_just_that() -> None:
    reason, message = await refusal(f"https://{HOST}:1")
    assert reason == "UNREACHABLE"
    assert "Connection refused" in message


async def test_a_key_is_not_sent_in_the_clear_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORCHARD_INSECURE", raising=False)
    for endpoint in ("192.0.2.1:7411", "http://orchard.example:80", "grpc://[2001:db8::1]:1"):
        with pytest.raises(orchard.ConfigurationError, match="ORCHARD_INSECURE=1") as caught:
            SandboxClient(endpoint, api_key="k")
        assert caught.value.reason == "ENDPOINT_INSECURE"
    for endpoint in ("127.0.0.1:1", "localhost:1", "http://127.8.9.1:1", "[::1]:1", "unix:/tmp/s", "https://far:1"):
        async with AsyncSandboxClient(endpoint, api_key="k"):
            pass
    monkeypatch.setenv("ORCHARD_INSECURE", "1")
    async with AsyncSandboxClient("192.0.2.1:7411", api_key="k"):
        pass


def test_the_command_line_has_the_same_switch(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "ORCHARD_API_KEY": "k"}
    environment["ORCHARD_ENDPOINT"] = "192.0.2.1:7411"
    run = subprocess.run([*COMMAND_LINE, "list"], env=environment, capture_output=True, text=True, timeout=BACKSTOP)
    assert run.returncode == 1
    assert "`orchard --insecure`" in run.stderr
    environment["ORCHARD_ENDPOINT"] = "127.0.0.1.example.invalid:1"
    run = subprocess.run(
        [*COMMAND_LINE, "--insecure", "list"], env=environment, capture_output=True, text=True, timeout=BACKSTOP
    )
    assert "UNREACHABLE" in run.stderr


@pytest.mark.parametrize("endpoint", ["ftp://x:1", "https://", "https://x:1/path", "x/y"])
def test_an_endpoint_that_is_none_is_named(endpoint: str) -> None:
    with pytest.raises(orchard.ConfigurationError, match="none of https://host:port") as caught:
        SandboxClient(endpoint, api_key="k")
    assert caught.value.reason == "ENDPOINT_INVALID"


def test_files_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem() -> str:
        with pytest.raises(orchard.ConfigurationError) as caught:
            SandboxClient("https://x:1", api_key="k")
        assert caught.value.reason == "TLS_FILES"
        return str(caught.value)

    monkeypatch.setenv("ORCHARD_CA_FILE", str(tmp_path / "none"))
    assert problem() == f"cannot read {tmp_path}/none (ORCHARD_CA_FILE): No such file or directory"
    (tmp_path / "text").write_text("hello")
    monkeypatch.setenv("ORCHARD_CA_FILE", str(tmp_path / "text"))
    assert problem() == f"{tmp_path}/text (ORCHARD_CA_FILE) is not a PEM file"
    monkeypatch.delenv("ORCHARD_CA_FILE")
    monkeypatch.setenv("ORCHARD_CERT_FILE", str(tmp_path / "text"))
    assert "set both ORCHARD_CERT_FILE and ORCHARD_KEY_FILE" in problem()
