"""Outgoing gRPC channels: in the clear on a socket of this machine, else with TLS where it is set up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from services.common.server import CHANNEL_OPTIONS
from services.common.tls import ClientTls


def connect(address: str, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel to "host:port" or "unix:/path". A Unix socket is in the clear: its folder says who may use it."""
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return TlsChannel(address, tls)


class TlsChannel(grpc.aio.Channel):
    """A channel that makes new calls on a new connection when the files of its credentials have changed.

    Calls that run go on as they are, on the connection that they have. Of gRPC's own interface everything is here.
    """

    def __init__(self, address: str, tls: ClientTls) -> None:
        self._address = address
        self._tls = tls
        self._generation = tls.look()
        self._connection = self._make()
        self._old: set[_Connection] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def _make(self) -> _Connection:
        options = list(CHANNEL_OPTIONS)
        if self._tls.server_name:
            options.append(("grpc.ssl_target_name_override", self._tls.server_name))
        return _Connection(grpc.aio.secure_channel(self._address, self._tls.credentials(), options=options))

    def current(self) -> _Connection:
        """The connection to make a call on now."""
        generation = self._tls.look()
        if generation != self._generation:
            self._generation = generation
            old, self._connection = self._connection, self._make()
            self._old.add(old)
            self._close_if_unused(old)
        return self._connection

    def ended(self, connection: _Connection, call: Any) -> None:
        """A call has ended."""
        connection.calls.discard(call)
        self._close_if_unused(connection)

    def _close_if_unused(self, connection: _Connection) -> None:
        if connection in self._old and not connection.calls:
            self._old.discard(connection)
            task = asyncio.get_running_loop().create_task(
                connection.channel.close(), name=f"close an old connection to {self._address}"
            )
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel; ends the calls on old connections too."""
        connections = [self._connection, *self._old]
        await asyncio.gather(*(connection.channel.close(grace) for connection in connections), *self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self.current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self.current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self.current().channel.channel_ready()

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Callable(self, lambda channel: channel.unary_unary(*arguments, **named))

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Callable(self, lambda channel: channel.unary_stream(*arguments, **named))

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Callable(self, lambda channel: channel.stream_unary(*arguments, **named))

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Callable(self, lambda channel: channel.stream_stream(*arguments, **named))


@dataclass(eq=False, slots=True)
class _Connection:
    """A channel and the calls that run on it."""

    channel: grpc.aio.Channel
    calls: set[Any] = field(default_factory=set)


class _Callable:
    """One method, on whichever connection is current."""

    __slots__ = ("_connection", "_make", "_method", "_owner")

    def __init__(self, owner: TlsChannel, make: Callable[[grpc.aio.Channel], Any]) -> None:
        self._owner = owner
        self._make = make
        self._connection = owner.current()
        self._method = make(self._connection.channel)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        connection = self._owner.current()
        if connection is not self._connection:
            self._connection, self._method = connection, self._make(connection.channel)
        call = self._method(*arguments, **named)
        connection.calls.add(call)
        call.add_done_callback(lambda done: self._owner.ended(connection, done))
        return call
