"""Connections out of a sandbox, as the gateway takes them from its agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from orchard.exec.v1 import tunnel_service_pb2, tunnel_service_pb2_grpc

from services.common.peer_status import peer_status
from services.common.sockets import Connection, Listening
from services.exec_agent.ports import service as ports
from tests.integration.exec_agent.conftest import BACKSTOP, SANDBOX, Client, agent_here, new_id, problem
from tests.support.streams import Connect, connections

Request = tunnel_service_pb2.AcceptConnectionRequest


@pytest.fixture
async def here(launcher: None) -> AsyncIterator[Client]:
    async with agent_here() as client:
        yield client


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    async with connections() as connect:
        yield connect


def stub_of(client: Client) -> Any:
    return tunnel_service_pb2_grpc.TunnelServiceStub(client.channel)


def serve(client: Client, port: int = 0, request_id: str = "") -> Any:
    """A call that asks for a port."""
    request = tunnel_service_pb2.ServeEndpointRequest(sandbox_id=SANDBOX, port=port, request_id=request_id or new_id())
    return stub_of(client).ServeEndpoint(request, metadata=client.metadata, timeout=BACKSTOP)


async def listening(client: Client, port: int = 0, request_id: str = "") -> tuple[Any, int]:
    call = serve(client, port, request_id)
    return call, (await call.read()).listening.port


async def accept(client: Client, connection_id: str) -> Any:
    call = stub_of(client).AcceptConnection(metadata=client.metadata, timeout=BACKSTOP)
    start = tunnel_service_pb2.EndpointConnection(connection_id=connection_id)
    with peer_status(call):
        await call.write(Request(sandbox_id=SANDBOX, start=start))
        assert (await call.read()).WhichOneof("event") == "accepted"
    return call


async def test_a_connection_is_announced_taken_and_carried(here: Client, connect: Connect) -> None:
    call, port = await listening(here)
    reader, writer = await connect("127.0.0.1", port)
    carried = await accept(here, (await call.read()).connection.connection_id)
    writer.write(b"question")
    writer.write_eof()
    assert (await carried.read()).data == b"question"
    assert (await carried.read()).eof
    await carried.write(Request(data=b"answer"))
    await carried.write(Request(eof=True))
    assert await reader.read() == b"answer"
    assert await carried.read() is grpc.aio.EOF


async def test_one_that_nobody_takes_is_reset(here: Client, monkeypatch: pytest.MonkeyPatch, connect: Connect) -> None:
    monkeypatch.setattr(ports, "TAKE_SECONDS", 0.1)
    call, port = await listening(here)
    reader, _writer = await connect("127.0.0.1", port)
    connection_id = (await call.read()).connection.connection_id
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), BACKSTOP)
    with problem() as problems:
        await accept(here, connection_id)
    assert (problems[0].code, problems[0].reason) == (grpc.StatusCode.NOT_FOUND, "CONNECTION_NOT_FOUND")


async def test_leaving_frees_the_port_and_resets_what_was_not_taken(here: Client, connect: Connect) -> None:
    call, port = await listening(here)
    reader, _writer = await connect("127.0.0.1", port)
    assert (await call.read()).connection.connection_id
    call.cancel()
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(), BACKSTOP)
    async with asyncio.timeout(BACKSTOP):
        while True:
            try:
                _, again = await listening(here, port)
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)
    assert again == port


async def test_a_repeat_takes_the_port_over(here: Client, connect: Connect) -> None:
    first, port = await listening(here, request_id="once")
    second, again = await listening(here, port, request_id="once")
    assert again == port
    with problem() as problems:
        await first.read()
    assert (problems[0].code, problems[0].reason) == (grpc.StatusCode.ABORTED, "ENDPOINT_TAKEN_OVER")
    await connect("127.0.0.1", port)
    assert (await second.read()).connection.connection_id
    with problem() as problems:
        await listening(here, port, request_id="another")
    assert (problems[0].code, problems[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PORT_IN_USE")


async def test_endpoints_and_their_connections_have_a_bound(
    here: Client, monkeypatch: pytest.MonkeyPatch, connect: Connect
) -> None:
    monkeypatch.setattr(ports, "MAXIMUM_ENDPOINTS", 1)
    monkeypatch.setattr(ports, "ENDPOINT_CONNECTIONS", 1)
    call, port = await listening(here)
    with problem() as problems:
        await listening(here)
    assert (problems[0].code, problems[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_ENDPOINTS")
    for _ in range(2):
        await connect("127.0.0.1", port)
    carried = await accept(here, (await call.read()).connection.connection_id)
    # The second waits in the kernel's queue until there is room.
    announced = asyncio.ensure_future(call.read())
    carried.cancel()
    assert (await announced).connection.connection_id


async def test_without_descriptors_connections_wait(here: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = asyncio.Event()

    class Watched(Listening):
        def accept(self) -> asyncio.Future[Connection]:
            accepted = super().accept()
            accepted.add_done_callback(lambda done: done.cancelled() or done.exception() is None or refused.set())
            return accepted

    monkeypatch.setattr(ports, "Listening", Watched)
    call, port = await listening(here)
    held: list[int] = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as sock:
        sock.setblocking(False)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            await asyncio.wait_for(refused.wait(), BACKSTOP)
        finally:
            for descriptor in held:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert (await call.read()).connection.connection_id


async def test_bad_requests_name_their_fields(here: Client) -> None:
    with problem() as problems:
        await serve(here, 65_536).read()
    assert (problems[0].code, problems[0].fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("port",))
    call = stub_of(here).ServeEndpoint(
        tunnel_service_pb2.ServeEndpointRequest(sandbox_id=SANDBOX), metadata=here.metadata, timeout=BACKSTOP
    )
    with problem() as problems:
        await call.read()
    assert (problems[0].code, problems[0].fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("request_id",))


async def test_a_taken_port_is_named(here: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with problem() as problems:
            await listening(here, port)
    assert problems[0].reason == "PORT_IN_USE" and str(port) in problems[0].message
