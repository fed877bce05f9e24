"""TLS of our servers and channels over real gRPC: who is refused, and what happens when files are replaced."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.channel import connect
from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.server import Server
from services.common.tls import ClientTls, TlsError, TlsFiles, server_credentials
from tests.support.certificates import Authority, MountedSecret, Pair

HOST = "127.0.0.1"
BACKSTOP = 110


class Echo(grpc.GenericRpcHandler):
    """Answers with what it gets; a stream gives a message whenever the test says so."""

    def __init__(self) -> None:
        self.more: asyncio.Queue[bytes] = asyncio.Queue()

    def service(self, details: grpc.HandlerCallDetails):
        if details.method == "/x/stream":
            return grpc.unary_stream_rpc_method_handler(self._stream)
        return grpc.unary_unary_rpc_method_handler(self._echo)

    async def _echo(self, request: bytes, context) -> bytes:
        return request

    async def _stream(self, request: bytes, context) -> AsyncIterator[bytes]:
        yield b"begun"
        while True:
            yield await self.more.get()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


@asynccontextmanager
async def serving(files: TlsFiles | None, health_address: str = "") -> AsyncIterator[tuple[Echo, str]]:
    echo = Echo()
    server = Server(interceptor=CallInterceptor(authenticator=None), health=Health(), service_names=["x"])
    server.grpc_server.add_generic_rpc_handlers((echo,))
    port = await server.start(f"{HOST}:0", tls=files, health_address=health_address)
    try:
        yield echo, f"{HOST}:{port}"
    finally:
        await server.stop()


def client_tls(secret: MountedSecret, *, shows: bool = False, **more) -> ClientTls:
    own = (secret.cert, secret.key) if shows else (None, None)
    return ClientTls(TlsFiles(*own, secret.ca), **more)


async def ask(address: str, tls: ClientTls | None) -> bytes:
    async with connect(address, tls) as channel:
        return await channel.unary_unary("/x/echo")(b"hello", timeout=BACKSTOP)


async def refused(address: str, tls: ClientTls | None) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(address, tls)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    return caught.value.details() or ""


async def shown_serial(address: str) -> int:
    """The serial number of the certificate that a new connection sees."""
    host, port = address.split(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return x509.load_der_x509_certificate(certificate).serial_number


def server_files(folder: Path, pair: Pair, client_ca: bytes = b"") -> tuple[MountedSecret, TlsFiles]:
    secret = MountedSecret(folder, pair, client_ca)
    return secret, TlsFiles(secret.cert, secret.key, secret.ca if client_ca else None)


async def test_a_server_is_believed_only_with_a_certificate_of_the_right_authority_and_name(tmp_path: Path) -> None:
    authority = Authority()
    _secret, files = server_files(tmp_path / "server", authority.issue(HOST))
    ours = MountedSecret(tmp_path / "ours", ca=authority.pem)
    others = MountedSecret(tmp_path / "others", ca=Authority().pem)
    async with serving(files) as (_echo, address):
        assert await ask(address, client_tls(ours)) == b"hello"
        assert "CERTIFICATE_VERIFY_FAILED" in await refused(address, client_tls(others))
        assert "Hostname Verification" in await refused(address, client_tls(ours, server_name="orchard-agent"))
        await refused(address, None)


async def test_with_an_authority_of_callers_nobody_else_gets_in(tmp_path: Path) -> None:
    authority, foreign = Authority(), Authority()
    _secret, files = server_files(tmp_path / "server", authority.issue(HOST), authority.pem)
    caller = MountedSecret(tmp_path / "caller", authority.issue("gateway"), authority.pem)
    stranger = MountedSecret(tmp_path / "stranger", foreign.issue("gateway"), authority.pem)
    late = MountedSecret(tmp_path / "late", authority.issue("gateway"), authority.pem)
    async with serving(files) as (_echo, address):
        assert await ask(address, client_tls(caller, shows=True)) == b"hello"
        await refused(address, client_tls(caller))
        await refused(address, client_tls(stranger, shows=True))
        assert await ask(address, client_tls(late, shows=True)) == b"hello"


async def test_new_connections_see_a_new_certificate_and_running_streams_go_on(tmp_path: Path) -> None:
    authority, next_authority = Authority("first"), Authority("second")
    first, second = authority.issue(HOST), next_authority.issue(HOST)
    secret, files = server_files(tmp_path / "server", first)
    trusted = MountedSecret(tmp_path / "client", ca=authority.pem)
    async with serving(files) as (echo, address), connect(address, client_tls(trusted, clock=Clock())) as channel:
        echo_call = channel.unary_unary("/x/echo")
        stream = channel.unary_stream("/x/stream")(b"")
        assert await stream.read() == b"begun"
        assert await shown_serial(address) == first.serial
        secret.replace(second)
        assert await shown_serial(address) == second.serial
        # On the connection that it has.
        assert await echo_call(b"same", timeout=BACKSTOP) == b"same"
        trusted.replace(ca=next_authority.pem)
        # A method that was looked up before uses the new files too.
        assert await echo_call(b"new", timeout=BACKSTOP) == b"new"
        echo.more.put_nowait(b"still here")
        assert await stream.read() == b"still here"
        assert "CERTIFICATE_VERIFY_FAILED" in await refused(
            address, client_tls(MountedSecret(tmp_path / "old", ca=authority.pem))
        )
    assert stream.done()


async def test_an_old_connection_is_closed_with_its_last_call(tmp_path: Path) -> None:
    authority = Authority()
    _secret, files = server_files(tmp_path / "server", authority.issue(HOST))
    trusted = MountedSecret(tmp_path / "client", ca=authority.pem)
    async with serving(files) as (_echo, address), connect(address, client_tls(trusted, clock=Clock())) as channel:
        stream = channel.unary_stream("/x/stream")(b"")
        await stream.read()
        (first,) = [channel.current()]
        trusted.replace(ca=authority.pem + Authority().pem)
        await channel.unary_unary("/x/echo")(b"", timeout=BACKSTOP)
        assert channel.current() is not first
        assert first.channel.get_state() is grpc.ChannelConnectivity.READY
        stream.cancel()
        async with asyncio.timeout(BACKSTOP):
            while first.channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
                await asyncio.sleep(0.005)


async def test_a_new_authority_of_callers_holds_from_the_next_connection_on(tmp_path: Path) -> None:
    old, new = Authority(), Authority()
    pair = old.issue(HOST)
    secret, files = server_files(tmp_path / "server", pair, old.pem)
    before = MountedSecret(tmp_path / "before", old.issue("gateway"), old.pem)
    after = MountedSecret(tmp_path / "after", new.issue("gateway"), old.pem)
    async with serving(files) as (_echo, address):
        assert await ask(address, client_tls(before, shows=True)) == b"hello"
        await refused(address, client_tls(after, shows=True))
        secret.replace(pair, new.pem)
        assert await ask(address, client_tls(after, shows=True)) == b"hello"
        await refused(address, client_tls(before, shows=True))


async def test_a_broken_new_pair_is_logged_once_and_the_old_one_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority()
    first, other, second = (authority.issue(HOST) for _ in range(3))
    secret, files = server_files(tmp_path / "server", first)
    caplog.set_level(logging.INFO, "services.common.tls")
    async with serving(files) as (_echo, address):
        for broken in (
            Pair(other.cert, first.key),
            Pair(b"nothing", other.key),
            Pair(other.cert, b""),
            authority.issue(HOST, expired=True),
        ):
            caplog.clear()
            secret.replace(broken)
            for _ in range(3):
                assert await shown_serial(address) == first.serial
            assert [record.levelname for record in caplog.records] == ["ERROR"]
        secret.cert.unlink()
        caplog.clear()
        for _ in range(2):
            assert await shown_serial(address) == first.serial
        assert len(caplog.records) == 1
        secret.cert.symlink_to("..data/tls.crt")
        secret.replace(second)
        assert await shown_serial(address) == second.serial
        assert caplog.records[-1].levelname == "INFO"


def test_files_that_cannot_be_used_are_named_at_the_start(tmp_path: Path) -> None:
    authority = Authority()
    good, other = authority.issue(HOST), authority.issue(HOST)

    def problem(name: str, pair: Pair, ca: bytes = b"") -> str:
        _secret, files = server_files(tmp_path / name, pair, ca)
        with pytest.raises(TlsError) as caught:
            server_credentials(files)
        return str(caught.value).replace(str(tmp_path / name) + "/", "")

    assert problem("a", Pair(good.cert, other.key)) == "the key tls.key is not that of the certificate tls.crt"
    assert problem("b", Pair(b"x", good.key)) == "tls.crt does not hold certificates in PEM"
    assert problem("c", Pair(good.cert, b"x")) == "tls.key does not hold an unencrypted private key in PEM"
    locked = authority.issue(HOST, password=b"locked")
    assert problem("d", locked) == "tls.key does not hold an unencrypted private key in PEM"
    assert "the certificate tls.crt has expired on" in problem("e", authority.issue(HOST, expired=True))
    assert problem("f", good, b"x") == "ca.crt does not hold certificates in PEM"
    with pytest.raises(TlsError, match=r"cannot read .*missing: No such file"):
        ClientTls(TlsFiles(ca=tmp_path / "missing"))
    with pytest.raises(TlsError, match="needs a certificate and its key"):
        server_credentials(TlsFiles())


async def test_health_can_be_asked_in_the_clear_beside_tls(tmp_path: Path) -> None:
    _secret, files = server_files(tmp_path / "server", Authority().issue(HOST))
    async with serving(files, f"unix:{tmp_path}/health"), connect(f"unix:{tmp_path}/health") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="x"), timeout=BACKSTOP)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/x/echo")(b"hello", timeout=BACKSTOP)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_unix_socket_is_in_the_clear_whatever_is_set(tmp_path: Path) -> None:
    authority = Authority()
    secret, files = server_files(tmp_path / "server", authority.issue(HOST), authority.pem)
    server = Server(interceptor=CallInterceptor(authenticator=None), health=Health(), service_names=["x"])
    server.grpc_server.add_generic_rpc_handlers((Echo(),))
    await server.start(f"unix:{tmp_path}/s", tls=files)
    try:
        assert await ask(f"unix:{tmp_path}/s", client_tls(secret)) == b"hello"
    finally:
        await server.stop()
