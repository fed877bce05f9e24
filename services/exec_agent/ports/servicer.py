"""PortService and TunnelService over gRPC: field rules, and messages to domain and back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final, Protocol

import grpc.aio
from orchard.exec.v1 import port_service_pb2, tunnel_service_pb2
from orchard.exec.v1.port_service_pb2_grpc import PortServiceServicer
from orchard.exec.v1.tunnel_service_pb2_grpc import TunnelServiceServicer

from services.common.errors import AbortedError, InvalidArgumentError
from services.common.validation import Fields
from services.exec_agent.addressee import fields_for
from services.exec_agent.ports.exchange import Exchange
from services.exec_agent.ports.service import PortService

_LONGEST_HOST: Final = 64

_Context = grpc.aio.ServicerContext[Any, Any]


class _Piece(Protocol):
    """A message that the caller sends after its first."""

    data: bytes

    def WhichOneof(self, oneof_group: Any, /) -> Any: ...  # noqa: N802 (protobuf's name)


class PortServicer(PortServiceServicer, TunnelServiceServicer):
    """See the protos."""

    def __init__(self, service: PortService, sandbox_id: str) -> None:
        self._service = service
        self._sandbox_id = sandbox_id

    async def ForwardPort(  # noqa: N802
        self, request_iterator: AsyncIterator[port_service_pb2.ForwardPortRequest], context: _Context
    ) -> AsyncIterator[port_service_pb2.ForwardPortResponse]:
        """See the proto."""
        first = await anext(aiter(request_iterator), port_service_pb2.ForwardPortRequest())
        fields = fields_for(self._sandbox_id, first.sandbox_id)
        _check_start(fields, first)
        fields.between("start.port", first.start.port, 1, 65_535, zero=False)
        fields.text("start.host", first.start.host, maximum=_LONGEST_HOST)
        fields.done()
        connection, host = await self._service.connect(first.start.port, first.start.host)
        exchange = Exchange(connection, _data(request_iterator))
        _at_end(context, exchange.abandon)
        with self._service.carrying(exchange):
            yield port_service_pb2.ForwardPortResponse(opened=port_service_pb2.ForwardPortOpened(host=host))
            async for data in exchange.outgoing():
                if data:
                    yield port_service_pb2.ForwardPortResponse(data=data)
                else:
                    yield port_service_pb2.ForwardPortResponse(eof=True)

    async def ServeEndpoint(  # noqa: N802
        self, request: tunnel_service_pb2.ServeEndpointRequest, context: _Context
    ) -> AsyncIterator[tunnel_service_pb2.ServeEndpointResponse]:
        """See the proto."""
        fields = fields_for(self._sandbox_id, request.sandbox_id)
        fields.between("port", request.port, 1, 65_535)
        fields.token_id("request_id", request.request_id)
        fields.done()
        listener = await self._service.listen(request.port, request.request_id)
        _at_end(context, lambda: self._service.stop_listening(listener))
        try:
            listening = tunnel_service_pb2.EndpointListening(port=listener.port)
            yield tunnel_service_pb2.ServeEndpointResponse(listening=listening)
            async with aclosing(self._service.announcements(listener)) as ids:
                async for connection_id in ids:
                    announced = tunnel_service_pb2.EndpointConnection(connection_id=connection_id)
                    yield tunnel_service_pb2.ServeEndpointResponse(connection=announced)
        finally:
            self._service.stop_listening(listener)

    async def AcceptConnection(  # noqa: N802
        self, request_iterator: AsyncIterator[tunnel_service_pb2.AcceptConnectionRequest], context: _Context
    ) -> AsyncIterator[tunnel_service_pb2.AcceptConnectionResponse]:
        """See the proto."""
        first = await anext(aiter(request_iterator), tunnel_service_pb2.AcceptConnectionRequest())
        fields = fields_for(self._sandbox_id, first.sandbox_id)
        _check_start(fields, first)
        fields.done()
        exchange = Exchange(self._service.take(first.start.connection_id), _data(request_iterator))
        _at_end(context, exchange.abandon)
        with self._service.carrying(exchange):
            yield tunnel_service_pb2.AcceptConnectionResponse(accepted=tunnel_service_pb2.ConnectionAccepted())
            async for data in exchange.outgoing():
                if data:
                    yield tunnel_service_pb2.AcceptConnectionResponse(data=data)
                else:
                    yield tunnel_service_pb2.AcceptConnectionResponse(eof=True)


def _check_start(fields: Fields, first: _Piece) -> None:
    fields.check(first.WhichOneof("event") == "start", "start", "must be in the first message")


def _at_end(context: _Context, call: Callable[[], None]) -> None:
    """Clean up with a call: its client can leave between two messages, and the generator is collected later."""

    def ended(_context: _Context) -> None:
        call()

    context.add_done_callback(ended)  # type: ignore[arg-type]


async def _data(requests: AsyncIterator[_Piece]) -> AsyncIterator[bytes]:
    """The bytes of a stream of requests, to its eof."""
    async for request in requests:
        kind = request.WhichOneof("event")
        if kind == "data":
            yield request.data
        elif kind == "eof":
            return
        elif kind != "keepalive":
            raise InvalidArgumentError.of("event", "must be data, eof or keepalive", reason="MESSAGE_UNEXPECTED")
    raise AbortedError("the requests ended without eof; the connection was broken", reason="CONNECTION_CUT")
