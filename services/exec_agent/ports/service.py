"""Connects to ports of the sandbox, and listens on them for the gateway."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import secrets
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Final

from services.common.errors import (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OrchardError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.sockets import Connection, Listening
from services.exec_agent.ports.exchange import Breakable, Exchange

LOOPBACK: Final = ("127.0.0.1", "::1")
CONNECT_SECONDS: Final = 10.0
"""A server on the same machine that takes longer has its queue of connections full."""
TAKE_SECONDS: Final = 10.0
"""What the gateway has to take a connection that was announced to it."""
MAXIMUM_CONNECTIONS: Final = 1024
MAXIMUM_ENDPOINTS: Final = 32
ENDPOINT_CONNECTIONS: Final = 256
"""Of one endpoint at once; more wait in the kernel's queue."""
_BACKLOG: Final = 128
_REFUSED_RETRY_SECONDS: Final = 0.2
_ACCEPT_AGAIN_SECONDS: Final = 0.1
"""Without descriptors or memory a connection waits in the kernel's queue; nothing tells when there are some again."""
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Of a kernel or a namespace without IPv6.
_NO_SUCH_FAMILY: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)


class Listener(Breakable):
    """One endpoint's port."""

    def __init__(self, port: int, request_id: str) -> None:
        """Raises OSError where the port cannot be had."""
        super().__init__()
        self._socket = Listening("127.0.0.1", port, backlog=_BACKLOG)
        self._slots = asyncio.Semaphore(ENDPOINT_CONNECTIONS)
        self.port = self._socket.port
        self.request_id = request_id

    async def accept(self) -> Connection:
        """The next connection, as long as there are not too many, and descriptors for it.

        Raises:
            OrchardError: what it was ended with.
        """
        await self.unless_broken(asyncio.ensure_future(self._slots.acquire()))
        try:
            connection = await self._accept()
        except BaseException:
            self._slots.release()
            raise
        connection.on_close(self._slots.release)
        return connection

    async def _accept(self) -> Connection:
        while True:
            try:
                return await self.unless_broken(self._socket.accept())
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    raise
            await self.unless_broken(asyncio.ensure_future(asyncio.sleep(_ACCEPT_AGAIN_SECONDS)))

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()

    async def wait_closed(self) -> None:
        """After `close`: wait until the port is free."""
        await self._socket.wait_closed()


class PortService:
    """Every connection and endpoint of one sandbox."""

    def __init__(self) -> None:
        self._exchanges: set[Exchange] = set()
        self._connecting = 0
        self._listeners: dict[int, Listener] = {}
        self._announced: dict[str, tuple[Connection, asyncio.TimerHandle]] = {}
        self._stopping = False

    async def connect(self, port: int, host: str = "") -> tuple[Connection, str]:
        """Connect to a port of this sandbox; also returns the address that answered.

        Raises:
            InvalidArgumentError: `host` is no address of this sandbox.
            FailedPreconditionError: nothing listens there (PORT_REFUSED), or it cannot be reached (PORT_UNREACHABLE).
            ResourceExhaustedError: there are too many connections.
            UnavailableError: the server accepts nothing (PORT_BUSY).
        """
        addresses = LOOPBACK if host in ("", "localhost") else (_own_address(host),)
        if len(self._exchanges) + self._connecting >= MAXIMUM_CONNECTIONS:
            raise ResourceExhaustedError(
                f"{MAXIMUM_CONNECTIONS:,} connections are forwarded already; close some",
                reason="TOO_MANY_CONNECTIONS",
                maximum=MAXIMUM_CONNECTIONS,
            )
        self._connecting += 1
        try:
            return await _connect_first(addresses, port)
        except TimeoutError:
            raise UnavailableError(
                f"the server on port {port} of the sandbox does not accept connections; its queue is full",
                reason="PORT_BUSY",
                port=port,
            ) from None
        except OSError as error:
            raise _connect_error(error, port) from error
        finally:
            self._connecting -= 1

    @contextmanager
    def carrying(self, exchange: Exchange) -> Iterator[Exchange]:
        """Around the life of an exchange; it is abandoned when this is left before both sides have ended."""
        self._exchanges.add(exchange)
        if self._stopping:
            exchange.end_with(_stopping_error())
        try:
            yield exchange
        finally:
            exchange.abandon()
            self._exchanges.discard(exchange)

    async def listen(self, port: int, request_id: str) -> Listener:
        """Listen on a port of 127.0.0.1, 0 for a free one. A port that the same request listens on is taken over.

        Raises:
            FailedPreconditionError: the port is in use (PORT_IN_USE) or not permitted (PORT_NOT_PERMITTED).
            ResourceExhaustedError: there are too many endpoints.
            UnavailableError: the agent stops.
        """
        if self._stopping:
            raise _stopping_error()
        before = next((one for one in self._listeners.values() if one.request_id == request_id), None)
        if before is not None and port in (0, before.port):
            port = before.port
            before.end_with(
                AbortedError("a repeat of the call has taken the endpoint over", reason="ENDPOINT_TAKEN_OVER")
            )
            self.stop_listening(before)
            await before.wait_closed()
        if len(self._listeners) >= MAXIMUM_ENDPOINTS:
            raise ResourceExhaustedError(
                f"{MAXIMUM_ENDPOINTS} endpoints are open in this sandbox already; close one",
                reason="TOO_MANY_ENDPOINTS",
                maximum=MAXIMUM_ENDPOINTS,
            )
        try:
            listener = Listener(port, request_id)
        except OSError as error:
            raise _listen_error(error, port) from error
        self._listeners[listener.port] = listener
        return listener

    def stop_listening(self, listener: Listener) -> None:
        """Close a listener."""
        if self._listeners.get(listener.port) is listener:
            del self._listeners[listener.port]
        listener.close()

    async def announcements(self, listener: Listener) -> AsyncGenerator[str, None]:
        """Ids of the listener's connections, one after the other; each is reset unless it is taken in time."""
        mine: set[str] = set()
        try:
            while True:
                connection = await listener.accept()
                connection_id = secrets.token_hex(8)
                timer = asyncio.get_running_loop().call_later(TAKE_SECONDS, self._drop, connection_id)
                self._announced[connection_id] = connection, timer
                mine &= self._announced.keys()
                mine.add(connection_id)
                yield connection_id
        finally:
            for connection_id in mine:
                self._drop(connection_id)

    def take(self, connection_id: str) -> Connection:
        """A connection that was announced.

        Raises:
            NotFoundError: it is gone.
        """
        connection, timer = self._announced.pop(connection_id, (None, None))
        if connection is None or timer is None:
            raise NotFoundError(
                "the connection is gone; nobody took it in time",
                reason="CONNECTION_NOT_FOUND",
                connection_id=connection_id,
            )
        timer.cancel()
        return connection

    def _drop(self, connection_id: str) -> None:
        connection, timer = self._announced.pop(connection_id, (None, None))
        if connection is not None and timer is not None:
            timer.cancel()
            connection.reset()

    def interrupt(self) -> None:
        """The agent stops: end every connection and endpoint with UNAVAILABLE."""
        self._stopping = True
        for exchange in self._exchanges:
            exchange.end_with(_stopping_error())
        for listener in self._listeners.values():
            listener.end_with(_stopping_error())


def _stopping_error() -> UnavailableError:
    return UnavailableError("the sandbox's agent stops; connect again", reason="SERVER_STOPPING")


def _own_address(host: str) -> str:
    """An address of this sandbox, in its plain form.

    Raises:
        InvalidArgumentError: it is none.
    """
    wrong = InvalidArgumentError.of(
        "start.host", "must be empty, localhost or an address of the sandbox itself, like 127.0.0.1"
    )
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise wrong from None
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id:
            raise wrong
        address = address.ipv4_mapped or address
    if address.is_unspecified or address.is_multicast:
        raise wrong
    if not address.is_loopback:
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                # The kernel binds to none but its own.
                probe.bind((str(address), 0))
            except OSError:
                raise wrong from None
    return str(address)


async def _connect_first(addresses: tuple[str, ...], port: int) -> tuple[Connection, str]:
    first: OSError | None = None
    for address in addresses:
        try:
            return await _connect(address, port), address
        except TimeoutError:
            raise
        except OSError as error:
            if first is None or first.errno in _NO_SUCH_FAMILY:
                first = error
    raise first or OSError(errno.EADDRNOTAVAIL, "no address")


async def _connect(address: str, port: int) -> Connection:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.get_running_loop().sock_connect(sock, (address, port))
        return Connection(sock)
    except BaseException:
        sock.close()
        raise


def _connect_error(error: OSError, port: int) -> OrchardError:
    if error.errno == errno.ECONNREFUSED:
        return FailedPreconditionError(
            f"nothing listens on port {port} of the sandbox; start the server, or try again when it has started",
            reason="PORT_REFUSED",
            retry_seconds=_REFUSED_RETRY_SECONDS,
            port=port,
        )
    if error.errno in _NO_DESCRIPTORS:
        return ResourceExhaustedError(
            "the agent is out of descriptors or memory; close connections", reason="TOO_MANY_CONNECTIONS", port=port
        )
    return FailedPreconditionError(
        f"port {port} of the sandbox cannot be reached: {error.strerror or error}", reason="PORT_UNREACHABLE", port=port
    )


def _listen_error(error: OSError, port: int) -> OrchardError:
    if error.errno == errno.EADDRINUSE:
        return FailedPreconditionError(
            f"port {port} of the sandbox is in use; choose another, or 0 for a free one",
            reason="PORT_IN_USE",
            port=port,
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return FailedPreconditionError(
            f"the agent may not listen on port {port}; choose one above 1023", reason="PORT_NOT_PERMITTED", port=port
        )
    if error.errno in _NO_DESCRIPTORS:
        return ResourceExhaustedError(
            "the agent is out of descriptors or memory; close connections", reason="TOO_MANY_ENDPOINTS", port=port
        )
    return FailedPreconditionError(
        f"the agent cannot listen on port {port}: {error.strerror or error}", reason="PORT_UNREACHABLE", port=port
    )
