"""Ports of a sandbox on this machine: `sandbox.forward` and `orchard forward`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import signal
import socket
import struct
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import orchard
import pytest
from orchard import ForwardEvent, ForwardState
from orchard.exec.v1 import port_service_pb2

from tests.support.platform import PlatformProcess, running_platform
from tests.support.streams import Connect, connections
from tests.support.wire import Wire, reason_of, wire_to

BACKSTOP = 110.0
SERVER = Path(__file__).parents[1] / "support" / "port_server.py"
BLOCK = secrets.token_bytes(1 << 20)


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("ports")) as platform:
        yield platform


@pytest.fixture
async def client(platform: PlatformProcess) -> AsyncIterator[orchard.AsyncSandboxClient]:
    async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client:
        yield client


@pytest.fixture
async def wire(platform: PlatformProcess) -> AsyncIterator[Wire]:
    async with wire_to(platform.endpoint, platform.api_key) as wire:
        yield wire


@pytest.fixture
async def sandbox(client: orchard.AsyncSandboxClient) -> AsyncIterator[orchard.AsyncSandbox]:
    """Without a network."""
    async with await client.create(network="none") as sandbox:
        await sandbox.write_file("/srv/port_server.py", SERVER.read_bytes())
        yield sandbox


async def start_server(sandbox: orchard.AsyncSandbox, kind: str, port: int) -> orchard.AsyncProcess:
    """A server of this kind that listens."""
    process = await sandbox.start(["python3", "/srv/port_server.py", kind, str(port)])
    async with asyncio.timeout(BACKSTOP):
        async for chunk in process.output():
            assert chunk.text == "listening\n", chunk.text
            break
    return process


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    async with connections() as connect:
        yield connect


async def asked(connect: Connect, address: orchard.Address, *, size: int = 1 << 16) -> None:
    """Send so many bytes to a server that answers with their hash, and check that."""
    reader, writer = await connect(address.host, address.port)
    found, left = hashlib.sha256(), size
    while left:
        data = BLOCK[:left]
        found.update(data)
        writer.write(data)
        await writer.drain()
        left -= len(data)
    writer.write_eof()
    async with asyncio.timeout(BACKSTOP):
        assert await reader.read() == f"{size} {found.hexdigest()}\n".encode()


async def test_http_over_connections_that_are_kept(sandbox: orchard.AsyncSandbox) -> None:
    await start_server(sandbox, "http", 8080)
    async with sandbox.forward(8080) as address, aiohttp.ClientSession(address.url) as session:
        assert address.host == "127.0.0.1" and address.url == f"http://127.0.0.1:{address.port}"
        for path in ("/first", "/second"):
            async with session.get(path) as response:
                assert (response.status, await response.text()) == (200, path)


async def test_websockets(sandbox: orchard.AsyncSandbox) -> None:
    await start_server(sandbox, "websocket", 8081)
    async with (
        sandbox.forward(8081) as address,
        aiohttp.ClientSession() as session,
        session.ws_connect(f"ws://{address}/") as websocket,
    ):
        for text in ("hello", "x" * 10_000):
            await websocket.send_str(text)
            assert await websocket.receive_str(timeout=BACKSTOP) == text


async def test_a_hundred_connections_at_once_and_each_half_closes(
    sandbox: orchard.AsyncSandbox, connect: Connect
) -> None:
    await start_server(sandbox, "digest", 8082)
    async with sandbox.forward(8082) as address:
        await asyncio.gather(*(asked(connect, address, size=100_000 + number) for number in range(100)))


async def test_a_hundred_megabytes_come_back_as_they_went(sandbox: orchard.AsyncSandbox, connect: Connect) -> None:
    await start_server(sandbox, "echo", 8083)
    async with sandbox.forward(8083) as address:
        reader, writer = await connect(address.host, address.port)
        sent, received = hashlib.sha256(), hashlib.sha256()

        async def send() -> None:
            for index in range(100):
                data = BLOCK[index:] + BLOCK[:index]
                sent.update(data)
                writer.write(data)
                await writer.drain()
            writer.write_eof()

        sending = asyncio.ensure_future(send())
        size = 0
        async with asyncio.timeout(BACKSTOP):
            while data := await reader.read(1 << 18):
                received.update(data)
                size += len(data)
        await sending
        assert (size, received.digest()) == (100 << 20, sent.digest())


async def test_a_port_without_a_server_is_refused_until_there_is_one(
    sandbox: orchard.AsyncSandbox, connect: Connect
) -> None:
    events: asyncio.Queue[ForwardEvent] = asyncio.Queue()
    async with sandbox.forward(8084, on_event=events.put_nowait) as address:
        reader, _writer = await connect(address.host, address.port)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), BACKSTOP)
        event = await asyncio.wait_for(events.get(), BACKSTOP)
        assert (event.number, event.port, event.state) == (1, 8084, ForwardState.BROKEN)
        assert isinstance(event.error, orchard.PortRefused) and isinstance(event.error, ConnectionRefusedError)
        await start_server(sandbox, "digest", 8084)
        await asked(connect, address, size=70_000)
        opened, ended = [await asyncio.wait_for(events.get(), BACKSTOP) for _ in range(2)]
        assert (opened.state, ended.state, ended.sent) == (ForwardState.OPENED, ForwardState.ENDED, 70_000)
        assert ended.received > 64


async def test_a_connection_may_wait_for_its_server(sandbox: orchard.AsyncSandbox, connect: Connect) -> None:
    async with sandbox.forward(8085, wait=BACKSTOP) as address:
        asking = asyncio.ensure_future(asked(connect, address))
        await start_server(sandbox, "digest", 8085)
        await asking


async def test_a_reset_is_a_reset_on_both_sides(sandbox: orchard.AsyncSandbox, connect: Connect) -> None:
    await start_server(sandbox, "reset", 8086)
    events: asyncio.Queue[ForwardEvent] = asyncio.Queue()
    async with sandbox.forward(8086, on_event=events.put_nowait) as address:
        reader, writer = await connect(address.host, address.port)
        writer.write(b"x")
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), BACKSTOP)
        assert (await asyncio.wait_for(events.get(), BACKSTOP)).state is ForwardState.OPENED
        broken = await asyncio.wait_for(events.get(), BACKSTOP)
        assert broken.state is ForwardState.BROKEN and broken.error is not None
        assert broken.error.reason == "CONNECTION_RESET"
    await start_server(sandbox, "digest", 8087)
    async with sandbox.forward(8087, on_event=events.put_nowait) as address:
        _reader, writer = await connect(address.host, address.port)
        assert (await asyncio.wait_for(events.get(), BACKSTOP)).state is ForwardState.OPENED
        local = writer.get_extra_info("socket")
        local.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        broken = await asyncio.wait_for(events.get(), BACKSTOP)
        assert (broken.state, broken.error) == (ForwardState.BROKEN, None)


async def test_a_slow_reader_holds_little(sandbox: orchard.AsyncSandbox) -> None:
    await start_server(sandbox, "flood", 8088)
    async with sandbox.forward(8088) as address:
        with socket.socket() as slow:
            slow.connect((address.host, address.port))
            before = 0
            async with asyncio.timeout(BACKSTOP):
                while (now := await _flooded(sandbox)) != before or not now:
                    before = now
                    await sandbox.exec("sleep 1")
        # Two kernels' buffers, and what gRPC queues for one stream on two hops.
        assert now < 100 << 20


async def _flooded(sandbox: orchard.AsyncSandbox) -> int:
    with contextlib.suppress(orchard.FileNotFound, ValueError):
        return int(await sandbox.read_text("/tmp/flooded"))
    return 0


async def test_a_killed_gateway_breaks_what_was_open_and_nothing_else(
    platform: PlatformProcess, sandbox: orchard.AsyncSandbox, connect: Connect
) -> None:
    await start_server(sandbox, "echo", 8089)
    async with sandbox.forward(8089) as address:
        reader, writer = await connect(address.host, address.port)
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        killed = platform.kill_service("gateway")
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), BACKSTOP)
        # One that comes meanwhile waits for the next gateway.
        reader, writer = await connect(address.host, address.port)
        writer.write(b"after")
        assert await asyncio.wait_for(reader.readexactly(5), BACKSTOP) == b"after"
        await asyncio.to_thread(platform.wait_ready, "gateway", not_pid=killed)


async def test_a_stopping_gateway_says_so(platform: PlatformProcess, sandbox: orchard.AsyncSandbox, wire: Wire) -> None:
    await start_server(sandbox, "echo", 8091)
    call = wire.ports.ForwardPort(metadata=wire.metadata, timeout=BACKSTOP)
    start = port_service_pb2.ForwardPortStart(port=8091)
    await call.write(port_service_pb2.ForwardPortRequest(sandbox_id=sandbox.sandbox_id, start=start))
    assert (await call.read()).WhichOneof("event") == "opened"
    stopped = platform.kill_service("gateway", signal.SIGTERM)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "SERVER_STOPPING")
    await asyncio.to_thread(platform.wait_ready, "gateway", not_pid=stopped)


async def test_leaving_ends_what_is_open_and_frees_the_port(sandbox: orchard.AsyncSandbox, connect: Connect) -> None:
    await start_server(sandbox, "echo", 8090)
    async with sandbox.forward(8090) as address:
        reader, writer = await connect(address.host, address.port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        with pytest.raises(orchard.PortInUse) as caught:
            async with sandbox.forward(8090, local_port=address.port):
                pass
        assert caught.value.reason == "LOCAL_PORT_IN_USE" and str(address.port) in caught.value.message
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), BACKSTOP)
    async with sandbox.forward(8090, local_port=address.port) as again:
        assert again == address


@pytest.mark.parametrize(("port", "options"), [(0, {}), (65_536, {}), (80, {"local_port": -1}), (True, {})])
async def test_what_is_no_port_is_refused(sandbox: orchard.AsyncSandbox, port: int, options: dict[str, int]) -> None:
    with pytest.raises(orchard.InvalidArgument, match="no port"):
        sandbox.forward(port, **options)


async def test_only_addresses_of_the_sandbox_are_forwarded(sandbox: orchard.AsyncSandbox, connect: Connect) -> None:
    events: asyncio.Queue[ForwardEvent] = asyncio.Queue()
    async with sandbox.forward(80, host="169.254.169.254", on_event=events.put_nowait) as address:
        await connect(address.host, address.port)
        error = (await asyncio.wait_for(events.get(), BACKSTOP)).error
        assert isinstance(error, orchard.InvalidArgument)
        assert [violation.field for violation in error.violations] == ["start.host"]


async def test_a_lost_sandbox_is_told(client: orchard.AsyncSandboxClient, connect: Connect) -> None:
    events: asyncio.Queue[ForwardEvent] = asyncio.Queue()
    sandbox = await client.create()
    await sandbox.delete()
    await sandbox.wait_ended(BACKSTOP)  # until then it is only that nothing listens there
    async with sandbox.forward(80, on_event=events.put_nowait) as address:
        await connect(address.host, address.port)
        assert isinstance((await asyncio.wait_for(events.get(), BACKSTOP)).error, orchard.SandboxLost)


def test_the_synchronous_client(platform: PlatformProcess) -> None:
    with (
        orchard.SandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client,
        client.create(network="none") as sandbox,
    ):
        sandbox.write_file("/srv/port_server.py", SERVER.read_bytes())
        sandbox.start(["python3", "/srv/port_server.py", "http", "80"])
        with (
            sandbox.forward(80, wait=BACKSTOP) as address,
            urllib.request.urlopen(f"{address.url}/path", timeout=BACKSTOP) as response,
        ):
            assert response.read() == b"/path"
