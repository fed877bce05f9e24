"""A port of a sandbox as a port of this machine."""

from __future__ import annotations

import asyncio
import errno
import logging
from types import TracebackType
from typing import Final

from orchard._client import errors
from orchard._client.ports.connection import CHUNK_BYTES, ForwardedConnection, LocalBreak, was_reset
from orchard._client.ports.types import Address, ForwardEvent, ForwardState, OnForward
from orchard._client.session import Session
from orchard._client.units import Seconds, seconds_of
from orchard.exec.v1 import port_service_pb2

_log: Final = logging.getLogger("orchard")
MAXIMUM_CONNECTIONS: Final = 1000
"""Of one forward at once; more are refused."""
BACKLOG: Final = 256
HEARTBEAT_SECONDS: Final = 5.0
"""How often a sandbox is renewed while its connections carry something."""


class AsyncPortForward:
    """Listens on this machine while `async with` lasts; each connection goes to the sandbox's port.

    async with sandbox.forward(80) as address:
        ...  # address.url is like "http://127.0.0.1:43210"

    It outlives broken connections to the platform: only those that were open then are reset.
    """

    def __init__(
        self,
        session: Session,
        sandbox_id: str,
        port: int,
        *,
        local_port: int,
        bind: str,
        host: str,
        wait: Seconds,
        on_event: OnForward | None,
    ) -> None:
        check_port("port", port)
        check_port("local_port", local_port, minimum=0)
        if not isinstance(bind, str):
            raise errors.InvalidArgument.of("bind", f"must be an address of this machine, not {bind!r}")
        self._session = session
        self._sandbox_id = sandbox_id
        self._start = port_service_pb2.ForwardPortStart(port=port, host=host)
        self._bind = (bind, local_port)
        self._wait_seconds = seconds_of("wait", wait)
        self._on_event = on_event
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None
        self._count = 0
        self._closed = False
        self._told: set[str] = set()

    @property
    def open_connections(self) -> int:
        """How many connections there are now."""
        return len(self._tasks)

    @property
    def address(self) -> Address:
        """Where it listens.

        Raises:
            RuntimeError: it does not.
        """
        if self._server is None or not self._server.sockets:
            raise RuntimeError("it listens only within `with`")
        host, port = self._server.sockets[0].getsockname()[:2]
        return Address(host, port)

    async def __aenter__(self) -> Address:
        """Listen.

        Raises:
            PortInUse: the local port is taken.
            InvalidArgument: it cannot be listened on `bind`, or the port is not permitted.
        """
        host, port = self._bind
        try:
            self._server = await asyncio.start_server(self._accept, host, port, backlog=BACKLOG, limit=CHUNK_BYTES // 2)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise errors.PortInUse(
                    f"port {port} of this machine ({host}) is taken; choose another, or 0 for a free one",
                    reason="LOCAL_PORT_IN_USE",
                    metadata={"host": host, "port": str(port)},
                ) from None
            raise errors.InvalidArgument.of(
                "bind", f"cannot listen on {host} port {port}: {error.strerror or error}"
            ) from None
        self._beating = asyncio.get_running_loop().create_task(self._beat(), name=f"renew {self._sandbox_id}")
        return self.address

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop listening and reset what is open."""
        await self.close()

    async def close(self) -> None:
        """Stop listening and reset what is open. Can be repeated."""
        self._closed = True
        server, self._server = self._server, None
        if server is not None:
            server.close()
        tasks = [*self._tasks, *([self._beating] if self._beating is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed or len(self._tasks) >= MAXIMUM_CONNECTIONS:
            writer.transport.abort()
            return
        self._count += 1
        connection = ForwardedConnection(self._session.transport, self._sandbox_id, reader, writer)
        task = asyncio.get_running_loop().create_task(
            self._serve(self._count, connection), name=f"forward {self._count} to {self._sandbox_id}"
        )
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._served(task, connection))

    def _served(self, task: asyncio.Task[None], connection: ForwardedConnection) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            # Before it has begun, nothing else does.
            connection.reset()

    async def _serve(self, number: int, connection: ForwardedConnection) -> None:
        def tell(state: ForwardState, error: errors.OrchardError | None = None) -> None:
            if self._on_event is not None:
                self._on_event(
                    ForwardEvent(number, self._start.port, state, connection.sent, connection.received, error)
                )

        try:
            await connection.run(
                self._start,
                wait_seconds=self._wait_seconds,
                opened=lambda: tell(ForwardState.OPENED),
                moved=self._moved.set,
            )
        except LocalBreak:
            tell(ForwardState.BROKEN)
        except errors.OrchardError as error:
            self._log(error)
            tell(ForwardState.BROKEN, error)
        else:
            tell(ForwardState.ENDED)

    def _log(self, error: errors.OrchardError) -> None:
        """Once for each kind: all that a program sees is a reset."""
        level = logging.WARNING
        is_meant = was_reset(error) or isinstance(error, errors.ClientClosed)
        if self._on_event is not None or is_meant or error.reason in self._told:
            level = logging.DEBUG
        self._told.add(error.reason)
        _log.log(level, "a connection to port %d of sandbox %s broke: %s", self._start.port, self._sandbox_id, error)

    async def _beat(self) -> None:
        """Renew the sandbox while there is traffic."""
        while True:
            await self._moved.wait()
            self._moved.clear()
            try:
                await self._session.heartbeats.beat([self._sandbox_id])
            except errors.OrchardError as error:
                _log.debug("heartbeat of a forward failed, will be repeated: %s", error)
            await asyncio.sleep(HEARTBEAT_SECONDS)


def check_port(field: str, port: int, *, minimum: int = 1) -> None:
    """Whether it is a TCP port.

    Raises:
        InvalidArgument: it is none.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not minimum <= port <= 65_535:
        raise errors.InvalidArgument.of(field, f"{port!r} is no port; it must be from {minimum} to 65,535")
