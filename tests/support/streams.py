"""TCP connections of a test, all closed at its end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[str, int], Awaitable[Streams]]
_ROUNDS = 5
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


class Accepted:
    """The connections of a server, each with a task that handles it. However that ends, the connection is closed."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a connection over; for asyncio.start_server."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # One that is cancelled before it has begun closes nothing itself.
        task.add_done_callback(lambda _task: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._handler(reader, writer)
            writer.close()
        finally:
            if not writer.is_closing():
                writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    def cancel(self) -> None:
        """Break every connection."""
        for task in self._tasks:
            task.cancel()

    async def end(self, server: asyncio.Server) -> None:
        """Take no more, and break those that there are."""
        server.close()
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # What was taken from the kernel just before gets here some rounds of the loop later.
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)
            self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def serving(
    handler: Handler, host: str = "127.0.0.1", sock: socket.socket | None = None, port: int = 0
) -> AsyncIterator[int]:
    """A TCP server at a port, a free one by default, or at a bound socket; yields its port. At the end it breaks its
    connections.
    """
    accepted = Accepted(handler)
    where = {"host": host, "port": port} if sock is None else {"sock": sock.dup()}
    server = await asyncio.start_server(accepted.accept, **where)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await accepted.end(server)
