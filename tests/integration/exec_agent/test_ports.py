"""Connections to ports of a sandbox: one call is one TCP connection, with its ends and its breaks."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from orchard.exec.v1 import port_service_pb2, port_service_pb2_grpc

from services.common.peer_status import peer_status
from services.common.sockets import CHUNK_BYTES
from services.exec_agent.ports import service as ports
from tests.integration.exec_agent.conftest import BACKSTOP, SANDBOX, AgentProcess, Client, agent_here, problem
from tests.support.streams import serving

Request = port_service_pb2.ForwardPortRequest
Response = port_service_pb2.ForwardPortResponse


@pytest.fixture
async def here(launcher: None) -> AsyncIterator[Client]:
    async with agent_here() as client:
        yield client


def forward(client: Client, port: int, host: str = "", sandbox_id: str = SANDBOX) -> Any:
    """A call whose first request was not sent yet, and that request."""
    stub: Any = port_service_pb2_grpc.PortServiceStub(client.channel)
    call = stub.ForwardPort(metadata=client.metadata, timeout=BACKSTOP)
    start = port_service_pb2.ForwardPortStart(port=port, host=host)
    return call, Request(sandbox_id=sandbox_id, start=start)


async def opened(client: Client, port: int, host: str = "") -> Any:
    """A call whose connection is there."""
    call, start = forward(client, port, host)
    await call.write(start)
    assert (await call.read()).WhichOneof("event") == "opened"
    return call


async def rest(call: Any) -> bytes:
    """Everything up to eof, after which the call ends."""
    data = bytearray()
    while (response := await call.read()).WhichOneof("event") == "data":
        assert len(response.data) <= CHUNK_BYTES
        data += response.data
    assert response.eof
    assert await call.read() is grpc.aio.EOF
    return bytes(data)


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that is taken, and on which nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield int(sock.getsockname()[1])


async def test_bytes_go_both_ways_and_each_side_ends_by_itself(here: Client) -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers only when it has everything: without half-close it would wait for ever."""
        writer.write(b"%d" % len(await reader.read()))

    async with serving(count) as port:
        call = await opened(here, port)
        for size in (1, 1 << 20, 70_000):
            await call.write(Request(data=b"x" * size))
        await call.write(Request(keepalive=True))
        await call.write(Request(eof=True))
        assert await rest(call) == b"%d" % (1 + (1 << 20) + 70_000)
        assert await call.code() == grpc.StatusCode.OK


async def test_the_server_may_end_first(here: Client) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"all that I say")
        writer.write_eof()
        received.put_nowait(await reader.read())

    async with serving(talk) as port:
        call = await opened(here, port)
        assert (await call.read()).data == b"all that I say"
        assert (await call.read()).eof
        await call.write(Request(data=b"still heard"))
        await call.write(Request(eof=True))
        assert await call.read() is grpc.aio.EOF
        assert await received.get() == b"still heard"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "::ffff:127.0.0.1"])
async def test_hosts_that_are_the_sandbox(here: Client, host: str) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")

    async with serving(greet, "0.0.0.0") as port:
        call = await opened(here, port, host)
        await call.write(Request(eof=True))
        assert await rest(call) == b"hello"


@pytest.mark.parametrize(
    "host", ["192.0.2.1", "169.254.169.254", "0.0.0.0", "::", "2001:db8::1", "example.org", "127.1"]
)
async def test_hosts_that_are_not(here: Client, host: str) -> None:
    call, start = forward(here, 80, host)
    with problem() as problems, peer_status(call):
        await call.write(start)
        await call.read()
    assert (problems[0].code, problems[0].fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("start.host",))


@pytest.mark.parametrize("port", [0, 65_536])
async def test_ports_that_are_none(here: Client, port: int) -> None:
    call, start = forward(here, port)
    with problem() as problems, peer_status(call):
        await call.write(start)
        await call.read()
    assert (problems[0].code, problems[0].fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("start.port",))


async def test_the_first_message_must_be_a_start(here: Client) -> None:
    call, _ = forward(here, 80)
    with problem() as problems, peer_status(call):
        await call.write(Request(sandbox_id=SANDBOX, data=b"x"))
        await call.read()
    assert problems[0].code == grpc.StatusCode.INVALID_ARGUMENT
    assert "start" in problems[0].fields


async def test_another_sandbox_is_not_reached(here: Client) -> None:
    call, start = forward(here, 80, sandbox_id="other")
    with problem() as problems, peer_status(call):
        await call.write(start)
        await call.read()
    assert problems[0].code == grpc.StatusCode.NOT_FOUND


async def test_a_port_without_a_server_is_told_with_when_to_look_again(here: Client) -> None:
    with silent_port() as port:
        call, start = forward(here, port)
        with problem() as problems, peer_status(call):
            await call.write(start)
            await call.read()
    found = problems[0]
    assert (found.code, found.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PORT_REFUSED")
    assert str(port) in found.message and found.retry


async def test_a_reset_is_told_as_one_after_what_was_said(here: Client) -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"before")
        await reader.read(1)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with serving(break_off) as port:
        call = await opened(here, port)
        assert (await call.read()).data == b"before"
        with problem() as problems, peer_status(call):
            await call.write(Request(data=b"x"))
            while await call.read() is not grpc.aio.EOF:
                pass
    assert (problems[0].code, problems[0].reason) == (grpc.StatusCode.ABORTED, "CONNECTION_RESET")


@pytest.mark.parametrize("how", ["cut", "cancelled"])
async def test_what_breaks_off_is_no_end_for_the_server(here: Client, how: str) -> None:
    seen: asyncio.Queue[object] = asyncio.Queue()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            seen.put_nowait(await reader.readexactly(4))
            seen.put_nowait(await reader.read())
        except ConnectionError:
            seen.put_nowait("reset")

    async with serving(listen) as port:
        call = await opened(here, port)
        await call.write(Request(data=b"half"))
        assert await asyncio.wait_for(seen.get(), BACKSTOP) == b"half"
        if how == "cancelled":
            call.cancel()
        else:
            with problem() as problems:
                await call.done_writing()
                await call.read()
            assert (problems[0].code, problems[0].reason) == (grpc.StatusCode.ABORTED, "CONNECTION_CUT")
        assert await asyncio.wait_for(seen.get(), BACKSTOP) == "reset"


async def test_a_slow_reader_holds_little_and_slows_nobody_else(here: Client) -> None:
    sent = 0
    blocked = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.transport.set_write_buffer_limits(high=0)
        while True:
            writer.write(bytes(1 << 20))
            draining = asyncio.ensure_future(writer.drain())
            done, _ = await asyncio.wait({draining}, timeout=1.0)
            if not done:
                blocked.set()
            await draining
            sent += 1 << 20

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")

    async with serving(flood) as loud, serving(greet) as quiet:
        slow = await opened(here, loud)
        await asyncio.wait_for(blocked.wait(), BACKSTOP)
        # What gRPC queues for one stream, and the kernel for two ends of a connection, is all that was taken.
        assert sent < 64 << 20
        other = await opened(here, quiet)
        await other.write(Request(eof=True))
        assert await rest(other) == b"hello"
        slow.cancel()


async def test_connections_have_a_bound(here: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "MAXIMUM_CONNECTIONS", 2)

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(hold) as port:
        calls = [await opened(here, port) for _ in range(2)]
        third, start = forward(here, port)
        with problem() as problems, peer_status(third):
            await third.write(start)
            await third.read()
        assert (problems[0].code, problems[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CONNECTIONS")
        await calls[0].write(Request(eof=True))
        await rest(calls[0])
        await (await opened(here, port)).write(Request(eof=True))


async def test_a_stopping_agent_says_so(make_agent: Callable[[], AgentProcess]) -> None:
    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    agent = make_agent()
    async with serving(hold) as port, agent.client() as client:
        call = await opened(client, port)
        agent.process.terminate()
        with problem() as problems:
            await call.read()
        assert (problems[0].code, problems[0].reason) == (grpc.StatusCode.UNAVAILABLE, "SERVER_STOPPING")


async def test_a_hundred_megabytes_arrive_as_they_were(here: Client) -> None:
    block = secrets.token_bytes(1 << 20)
    blocks = 100

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    async with serving(echo) as port:
        call = await opened(here, port)

        async def send() -> str:
            digest = hashlib.sha256()
            for index in range(blocks):
                data = block[index * 7 :] + block[: index * 7]
                digest.update(data)
                await call.write(Request(data=data))
            await call.write(Request(eof=True))
            return digest.hexdigest()

        sending = asyncio.ensure_future(send())
        back = hashlib.sha256(await rest(call)).hexdigest()
        assert back == await sending
