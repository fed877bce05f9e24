"""A forwarded connection's local side, on every event loop that a harness may run."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from orchard._client.ports.connection import ForwardedConnection

NewLoop = Callable[[], asyncio.AbstractEventLoop]
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def carried(
    new_loop: NewLoop,
    work: Callable[[ForwardedConnection, asyncio.StreamWriter], Awaitable[None]],
    then: Callable[[socket.socket], None],
) -> None:
    """Do `work` with a connection that a local program has made, then look at it from that program's side."""

    async def main(accepted: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=accepted)
        transport: Any = None  # how it goes on into the sandbox is no matter here
        await work(ForwardedConnection(transport, "sandbox", reader, writer), writer)
        await asyncio.sleep(0)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=10) as program,
    ):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main(listener.accept()[0]))
        then(program)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_reset_tells_the_local_program(new_loop: NewLoop) -> None:
    async def reset(connection: ForwardedConnection, _writer: asyncio.StreamWriter) -> None:
        connection.reset()
        connection.reset()

    def is_told(program: socket.socket) -> None:
        with pytest.raises(ConnectionResetError):
            program.recv(1)

    carried(new_loop, reset, is_told)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_reset_after_the_close_changes_nothing(new_loop: NewLoop) -> None:
    async def close_and_reset(connection: ForwardedConnection, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()
        connection.reset()

    def is_ended(program: socket.socket) -> None:
        assert program.recv(1) == b""

    carried(new_loop, close_and_reset, is_ended)
