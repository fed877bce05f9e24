"""Forwards against a server that does what the test says: what the client sends while nothing else is said."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc.aio
import orchard
import pytest
from orchard import AsyncSandboxClient, ForwardEvent, ForwardState
from orchard._client.ports import connection, forward
from orchard.exec.v1 import port_service_pb2, port_service_pb2_grpc
from orchard.sandbox.v1 import sandbox_service_pb2, sandbox_service_pb2_grpc

from services.common.errors import UnavailableError
from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.server import Server
from tests.support.streams import Connect, connections

BACKSTOP = 110.0
IDLE_SECONDS = 6.0  # a busy machine may stand still for a while


class Platform(port_service_pb2_grpc.PortServiceServicer, sandbox_service_pb2_grpc.SandboxServiceServicer):
    """Echoes data, and keeps count of the rest."""

    def __init__(self) -> None:
        self.keepalives: asyncio.Queue[None] = asyncio.Queue()
        self.heartbeats: asyncio.Queue[list[str]] = asyncio.Queue()
        self.refuse = 0

    async def ForwardPort(self, request_iterator, context):
        assert (await anext(request_iterator)).sandbox_id == "box"
        if self.refuse:
            self.refuse -= 1
            raise UnavailableError("not now", retry_seconds=0.01)
        yield port_service_pb2.ForwardPortResponse(opened=port_service_pb2.ForwardPortOpened(host="127.0.0.1"))
        async for request in request_iterator:
            kind = request.WhichOneof("event")
            if kind == "keepalive":
                self.keepalives.put_nowait(None)
            elif kind == "data":
                yield port_service_pb2.ForwardPortResponse(data=request.data)
            else:
                yield port_service_pb2.ForwardPortResponse(eof=True)
                return

    async def Heartbeat(self, request, context):
        self.heartbeats.put_nowait(list(request.sandbox_ids))
        return sandbox_service_pb2.HeartbeatResponse()


@asynccontextmanager
async def running(platform: Platform) -> AsyncIterator[AsyncSandboxClient]:
    """A client of a platform that soon ends dialogues that are silent."""
    interceptor = CallInterceptor(authenticator=None, idle_seconds=IDLE_SECONDS)
    server = Server(interceptor=interceptor, health=Health(), service_names=[], reflection=False)
    port_service_pb2_grpc.add_PortServiceServicer_to_server(platform, server.grpc_server)
    sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(platform, server.grpc_server)
    port = await server.start("127.0.0.1:0")
    try:
        async with AsyncSandboxClient(f"127.0.0.1:{port}", api_key="k") as client:
            yield client
    finally:
        await server.stop()


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    async with connections() as connect:
        yield connect


@pytest.mark.parametrize("half_closed", [False, True])
async def test_a_silent_connection_stays(monkeypatch: pytest.MonkeyPatch, connect: Connect, half_closed: bool) -> None:
    monkeypatch.setattr(connection, "KEEPALIVE_SECONDS", IDLE_SECONDS / 24)
    platform = Platform()
    if half_closed:
        platform.ForwardPort = waiting_for_keepalives(platform)
    async with running(platform) as client, client.attach("box").forward(80) as address:
        reader, writer = await connect(address.host, address.port)
        if half_closed:
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), BACKSTOP) == b"at last"
        else:
            for _ in range(30):  # longer than silence may last
                await asyncio.wait_for(platform.keepalives.get(), BACKSTOP)
            writer.write(b"still there")
            assert await asyncio.wait_for(reader.readexactly(11), BACKSTOP) == b"still there"


def waiting_for_keepalives(platform: Platform):
    """A server that answers long after it was sent everything."""

    async def serve(request_iterator, context):
        await anext(request_iterator)
        yield port_service_pb2.ForwardPortResponse(opened=port_service_pb2.ForwardPortOpened(host="127.0.0.1"))
        assert (await anext(request_iterator)).eof
        for _ in range(30):
            assert (await anext(request_iterator)).keepalive
        yield port_service_pb2.ForwardPortResponse(data=b"at last")
        yield port_service_pb2.ForwardPortResponse(eof=True)

    return serve


async def test_traffic_renews_the_sandbox_and_listening_does_not(
    monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    monkeypatch.setattr(forward, "HEARTBEAT_SECONDS", 0.0)
    monkeypatch.setattr(connection, "KEEPALIVE_SECONDS", 0.05)
    platform = Platform()
    async with running(platform) as client, client.attach("box").forward(80) as address:
        reader, writer = await connect(address.host, address.port)
        for _ in range(5):
            await asyncio.wait_for(platform.keepalives.get(), BACKSTOP)
        assert platform.heartbeats.empty()
        for _ in range(2):
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            assert await asyncio.wait_for(platform.heartbeats.get(), BACKSTOP) == ["box"]


async def test_a_connection_that_was_not_opened_is_tried_again(connect: Connect) -> None:
    platform = Platform()
    platform.refuse = 3
    events: asyncio.Queue[ForwardEvent] = asyncio.Queue()
    async with (
        running(platform) as client,
        client.attach("box").forward(80, on_event=events.put_nowait) as address,
    ):
        reader, writer = await connect(address.host, address.port)
        writer.write(b"once")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), BACKSTOP) == b"once"
        states = [(await asyncio.wait_for(events.get(), BACKSTOP)).state for _ in range(2)]
        assert states == [ForwardState.OPENED, ForwardState.ENDED]


async def test_a_program_whose_machine_is_gone_has_broken_its_connection() -> None:
    """Its socket says ETIMEDOUT, which Python takes for the same as a wait that was too long."""
    ours, theirs = socket.socketpair()
    with theirs:
        _, writer = await asyncio.open_connection(sock=ours)
        reader = asyncio.StreamReader()
        reader.set_exception(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
        async with running(Platform()) as client:
            broken = connection.ForwardedConnection(client._session.transport, "box", reader, writer)
            start = port_service_pb2.ForwardPortStart(port=80)
            carried = broken.run(start, wait_seconds=0.0, opened=lambda: None, moved=lambda: None)
            with pytest.raises(connection.LocalBreak, match="timed out"):
                await asyncio.wait_for(carried, BACKSTOP)


async def test_connections_have_a_bound(monkeypatch: pytest.MonkeyPatch, connect: Connect) -> None:
    monkeypatch.setattr(forward, "MAXIMUM_CONNECTIONS", 1)
    async with running(Platform()) as client, client.attach("box").forward(80) as address:
        reader, writer = await connect(address.host, address.port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        other, _ = await connect(address.host, address.port)
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(other.read(), BACKSTOP) == b""
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y"


async def test_a_platform_without_it_says_so(connect: Connect) -> None:
    events: asyncio.Queue[ForwardEvent] = asyncio.Queue()
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with (
        AsyncSandboxClient(f"127.0.0.1:{port}", api_key="k") as client,
        client.attach("box").forward(80, on_event=events.put_nowait) as address,
    ):
        await connect(address.host, address.port)
        assert isinstance((await asyncio.wait_for(events.get(), BACKSTOP)).error, orchard.Unimplemented)
    await server.stop(None)


async def test_what_is_accepted_as_it_is_closed_is_reset(monkeypatch: pytest.MonkeyPatch, connect: Connect) -> None:
    accepted = asyncio.get_running_loop().create_future()
    accept = forward.AsyncPortForward._accept

    def tell(self, reader, writer):
        # Whoever waits for it goes on before what is started now.
        accepted.set_result(None)
        accept(self, reader, writer)

    monkeypatch.setattr(forward.AsyncPortForward, "_accept", tell)
    async with running(Platform()) as client:
        forwarded = client.attach("box").forward(80)

        async def close_in_time() -> None:
            await accepted
            await forwarded.close()

        address = await forwarded.__aenter__()
        closing = asyncio.create_task(close_in_time())
        reader, _writer = await connect(address.host, address.port)
        await asyncio.wait_for(closing, BACKSTOP)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), BACKSTOP)
