"""TCP connections whose bytes are carried over gRPC streams.

Nothing is read from a socket before somebody wants it, and nothing more is taken to write before the socket has taken
what was there: a slow side slows its own connection alone, and a connection holds one chunk each way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

CHUNK_BYTES: Final = 512 << 10
"""Of one read. Half of it costs gRPC a tenth more for each byte; twice as much is little quicker, and each of a
thousand connections may hold some."""
KEEPALIVE_SECONDS: Final = 30.0
"""How often a stream that carries a connection says something: a quarter of requests.IDLE_SECONDS."""
_FIRST_BYTES: Final = 16 << 10
_RESET_AT_CLOSE: Final = struct.pack("ii", 1, 0)

T = TypeVar("T")


class _Socket:
    """A socket that is closed only when the event loop has let go of it: its number may be another's at once."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._closing = False
        self._on_close: Callable[[], None] | None = None
        self._closed = asyncio.Event()

    def on_close(self, call: Callable[[], None]) -> None:
        """Call this once when it is closed."""
        self._on_close = call

    def close(self) -> None:
        """Close it, in order: what was sent still arrives. What waits for it is cancelled. Can be repeated."""
        if self._closing:
            return
        self._closing = True
        for waiting in self._waiting:
            waiting.cancel()
        if not self._waiting:
            self._finish()
        if self._on_close is not None:
            self._on_close()

    async def wait_closed(self) -> None:
        """After `close`: wait until the socket is gone."""
        await self._closed.wait()

    def _finish(self) -> None:
        self._sock.close()
        self._closed.set()

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        future = asyncio.ensure_future(work)
        if self._closing:
            future.cancel()
        self._waiting.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._waiting.discard(future)
        if not future.cancelled():
            future.exception()  # whoever started it may have stopped to look
        if self._closing and not self._waiting:
            self._finish()


class Connection(_Socket):
    """A TCP connection. Take a connected socket over on the event loop that carries its bytes."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._size = _FIRST_BYTES

    def receive(self) -> asyncio.Future[bytes]:
        """The next bytes, at most CHUNK_BYTES; none at the end of what the other side sends.

        Raises, when it is awaited:
            ConnectionError: it was reset.
        """
        return self._start(self._receive())

    async def _receive(self) -> bytes:
        data = await self._loop.sock_recv(self._sock, self._size)
        # A buffer of the full size for each keystroke of a terminal would be a waste.
        self._size = min(CHUNK_BYTES, max(_FIRST_BYTES, 4 * len(data)))
        return data

    async def send(self, data: bytes) -> None:
        """Write all of it, as fast as the other side takes it.

        Raises:
            ConnectionError: it was reset.
        """
        await self._start(self._loop.sock_sendall(self._sock, data))

    def send_eof(self) -> None:
        """Say that nothing more is sent.

        Raises:
            OSError: it is not connected any more.
        """
        self._sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Break it, so that the other side cannot take it for complete. On a closed one it does nothing."""
        if not self._closing:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        self.close()


class Listening(_Socket):
    """A TCP port that is listened on."""

    def __init__(self, host: str, port: int, *, backlog: int) -> None:
        """Listen on an IPv4 address; port 0 takes a free one.

        Raises:
            OSError: it is in use, or not permitted.
        """
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # The connections of one that was here before are no reason to wait a minute.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(backlog)
        except OSError:
            sock.close()
            raise
        super().__init__(sock)
        self.port = int(sock.getsockname()[1])

    def accept(self) -> asyncio.Future[Connection]:
        """The next connection.

        Raises, when it is awaited:
            OSError: there is none to be had now, as without descriptors.
        """
        return self._start(self._accept())

    async def _accept(self) -> Connection:
        sock, _address = await self._loop.sock_accept(self._sock)
        return Connection(sock)


async def dial(host: str, port: int, *, timeout: float) -> Connection:
    """Connect to the first address of a host that answers.

    Raises:
        OSError: none does, or the name is not known.
        TimeoutError: not within `timeout` seconds.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        last: OSError = OSError(f"{host} has no address")
        for family, kind, protocol, _name, address in found:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                return Connection(sock)
            except OSError as error:
                sock.close()
                last = error
            except BaseException:
                sock.close()
                raise
        raise last
