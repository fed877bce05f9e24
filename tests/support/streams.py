"""TCP connections of a test, all closed at its end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str, int], Awaitable[Streams]]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def connections() -> AsyncIterator[Connect]:
    """Opens connections to a host and port."""
    writers: list[asyncio.StreamWriter] = []

    async def connect(host: str, port: int) -> Streams:
        reader, writer = await asyncio.open_connection(host, port)
        writers.append(writer)
        return reader, writer

    try:
        yield connect
    finally:
        for writer in writers:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def serving(handler: Handler, host: str = "127.0.0.1", sock: socket.socket | None = None) -> AsyncIterator[int]:
    """A TCP server at a free port or at a bound socket; yields its port. At the end it breaks its connections."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError):
                await handler(reader, writer)
            writer.close()
        finally:
            if not writer.is_closing():
                writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    where = {"host": host, "port": 0} if sock is None else {"sock": sock.dup()}
    server = await asyncio.start_server(accept, **where)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
