"""Passes calls through as bytes: to a sandbox's agent by the sandbox id in the first message, or to a service
behind the gateway.

Nothing of a message is decoded but field 1, and nothing of a response at all.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from orchard.exec.v1 import agent_service_pb2

from services.common.auth import principal
from services.common.errors import InvalidArgumentError, reason_of
from services.common.interceptor import REQUEST_ID_KEY, current_call, note_target
from services.common.peer_status import peer_status
from services.common.telemetry import AGENT_SPAN_KEY, TRACEPARENT, Telemetry
from services.common.tokens import PRINCIPAL_KEY, Signer
from services.common.validation import Fields
from services.gateway.agents_client import Agent, Agents
from services.gateway.streams import OpenStreams

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]

_LENGTH_TAG: Final = 0x0A  # field 1, length-delimited
_SECRET_ENV_PENDING: Final = "SECRET_ENV_PENDING"  # noqa: S105 (a reason)


def sandbox_id_of(message: bytes) -> str:
    """The sandbox id, field 1, of a request's first message.

    Raises:
        InvalidArgumentError: it is missing or not an id.
    """
    try:
        if len(message) > 2 and message[0] == _LENGTH_TAG and message[1] < 0x80:
            sandbox_id = message[2 : 2 + message[1]].decode()
        else:
            # Serialisers put field 1 first; a hand-made message may not.
            sandbox_id = agent_service_pb2.GetAgentRequest.FromString(message).sandbox_id
    except (UnicodeDecodeError, DecodeError):
        raise InvalidArgumentError.of(
            "sandbox_id", "cannot be read; the request is not a message of this call"
        ) from None
    fields = Fields()
    fields.sandbox_id("sandbox_id", sandbox_id)
    fields.done()
    return sandbox_id


async def _first_of(requests: AsyncIterator[bytes]) -> bytes:
    first = await anext(aiter(requests), None)
    if first is None:
        raise InvalidArgumentError.of("start", "the stream ended before its first message")
    return first


async def _with_first(first: bytes, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for message in requests:
        yield message


def _path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


class ServiceProxy(grpc.GenericRpcHandler, ABC):
    """Serves every method of some services; a subclass says how each kind of call is passed on."""

    def __init__(self, *services: ServiceDescriptor) -> None:
        self._streams = OpenStreams()
        self._handlers: dict[str, Handler] = {
            _path_of(method): self._handler(method) for service in services for method in service.methods
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """See grpc.GenericRpcHandler."""
        return self._handlers.get(handler_call_details.method)

    def _handler(self, method: MethodDescriptor) -> Handler:
        if method.client_streaming and method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(self._stream_stream(method))
        if method.client_streaming:
            return grpc.stream_unary_rpc_method_handler(self._stream_unary(method))
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(self._unary_stream(method))
        return grpc.unary_unary_rpc_method_handler(self._unary_unary(method))

    @abstractmethod
    def _unary_unary(self, method: MethodDescriptor) -> Callable[[bytes, Context], Awaitable[bytes]]:
        """One request, one answer."""

    @abstractmethod
    def _unary_stream(self, method: MethodDescriptor) -> Callable[[bytes, Context], AsyncIterator[bytes]]:
        """One request, a stream of answers."""

    @abstractmethod
    def _stream_unary(self, method: MethodDescriptor) -> Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]:
        """A stream of requests, one answer."""

    @abstractmethod
    def _stream_stream(
        self, method: MethodDescriptor
    ) -> Callable[[AsyncIterator[bytes], Context], AsyncIterator[bytes]]:
        """Streams of both."""

    def end_streams(self) -> None:
        """The server stops: end every stream of responses with UNAVAILABLE instead of letting it be cut."""
        self._streams.end()


class AgentProxy(ServiceProxy):
    """The services of agents, passed to the agent of the sandbox that the call names."""

    def __init__(
        self,
        agents: Agents,
        telemetry: Telemetry | None,
        *services: ServiceDescriptor,
        on_secret_pending: Callable[[Agent], None] = lambda _agent: None,
    ) -> None:
        """`on_secret_pending` is told of an agent that waits for its secret environment."""
        self._agents = agents
        self._telemetry = telemetry
        self._on_secret_pending = on_secret_pending
        super().__init__(*services)

    def _unary_unary(self, method: MethodDescriptor) -> Callable[[bytes, Context], Awaitable[bytes]]:
        path = _path_of(method)

        async def serve(request: bytes, context: Context) -> bytes:
            agent = await self._find(request)
            send = agent.callables.get(path)
            if send is None:
                send = agent.callables[path] = agent.channel.unary_unary(path)
            with self._used(agent):
                call = send(request, metadata=self._metadata(agent), timeout=context.time_remaining())
                reply: bytes = await call
                if self._telemetry is not None:
                    await self._keep_span(call)
                return reply

        return serve

    def _unary_stream(self, method: MethodDescriptor) -> Callable[[bytes, Context], AsyncIterator[bytes]]:
        path = _path_of(method)

        async def serve(request: bytes, context: Context) -> AsyncIterator[bytes]:
            agent = await self._find(request)
            with self._used(agent):
                open_stream: Any = agent.channel.unary_stream(path)
                call = open_stream(request, metadata=self._metadata(agent), timeout=context.time_remaining())
                with self._streams.ending(call, context):
                    async for reply in call:
                        yield reply
                    if self._telemetry is not None:
                        await self._keep_span(call)

        return serve

    def _stream_unary(self, method: MethodDescriptor) -> Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]:
        path = _path_of(method)

        async def serve(requests: AsyncIterator[bytes], context: Context) -> bytes:
            first = await _first_of(requests)
            agent = await self._find(first)
            with self._used(agent):
                open_stream: Any = agent.channel.stream_unary(path)
                call = open_stream(
                    _with_first(first, requests), metadata=self._metadata(agent), timeout=context.time_remaining()
                )
                try:
                    with peer_status(call):
                        reply: bytes = await call
                    if self._telemetry is not None:
                        await self._keep_span(call)
                    return reply
                finally:
                    call.cancel()

        return serve

    def _stream_stream(
        self, method: MethodDescriptor
    ) -> Callable[[AsyncIterator[bytes], Context], AsyncIterator[bytes]]:
        path = _path_of(method)

        async def serve(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            first = await _first_of(requests)
            agent = await self._find(first)
            with self._used(agent):
                open_stream: Any = agent.channel.stream_stream(path)
                call = open_stream(
                    _with_first(first, requests), metadata=self._metadata(agent), timeout=context.time_remaining()
                )
                with self._streams.ending(call, context), peer_status(call):
                    async for reply in call:
                        yield reply
                    if self._telemetry is not None:
                        await self._keep_span(call)

        return serve

    async def _find(self, first_message: bytes) -> Agent:
        sandbox_id = sandbox_id_of(first_message)
        note_target(sandbox_id)
        return await self._agents.find(principal().tenant, sandbox_id)

    @contextlib.contextmanager
    def _used(self, agent: Agent) -> Any:
        self._agents.begin(agent)
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and reason_of(error) == _SECRET_ENV_PENDING:
                self._on_secret_pending(agent)
            raise
        finally:
            self._agents.end(agent)

    def _metadata(self, agent: Agent) -> tuple[tuple[str, str], ...]:
        call = current_call.get()
        token = self._agents.metadata(agent)
        if self._telemetry is None or call.span is None:
            return (token, (REQUEST_ID_KEY, call.request_id))
        call.span.set_attribute("orchard.sandbox_id", agent.sandbox_id)
        return (token, (REQUEST_ID_KEY, call.request_id), (TRACEPARENT, self._telemetry.traceparent(call.span)))

    async def _keep_span(self, call: Any) -> None:
        """An agent may have no network: its span comes with the answer and is exported from here."""
        span = current_call.get().span
        if self._telemetry is None or span is None:
            return
        for key, value in await call.trailing_metadata() or ():
            if key == AGENT_SPAN_KEY:
                self._telemetry.record_agent_span(value, span)


class PrincipalProxy(ServiceProxy):
    """Services behind the gateway that accept its word on who calls."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        signer: Signer,
        telemetry: Telemetry | None,
        *services: ServiceDescriptor,
    ) -> None:
        self._channel = channel
        self._signer = signer
        self._telemetry = telemetry
        super().__init__(*services)

    def override(self, handlers: Mapping[str, Handler]) -> None:
        """Serve some methods otherwise, by their paths."""
        self._handlers.update(handlers)

    def _unary_unary(self, method: MethodDescriptor) -> Callable[[bytes, Context], Awaitable[bytes]]:
        send: Any = self._channel.unary_unary(_path_of(method))
        first = method.input_type.fields_by_number.get(1)
        about_one = first is not None and first.name == "sandbox_id"

        async def serve(request: bytes, context: Context) -> bytes:
            if about_one:
                # What is no id is for the scheduler to refuse.
                with contextlib.suppress(InvalidArgumentError):
                    note_target(sandbox_id_of(request))
            reply: bytes = await send(request, metadata=self.metadata(), timeout=context.time_remaining())
            return reply

        return serve

    def _unary_stream(self, method: MethodDescriptor) -> Callable[[bytes, Context], AsyncIterator[bytes]]:
        open_stream: Any = self._channel.unary_stream(_path_of(method))

        async def serve(request: bytes, context: Context) -> AsyncIterator[bytes]:
            call = open_stream(request, metadata=self.metadata(), timeout=context.time_remaining())
            with self._streams.ending(call, context):
                async for reply in call:
                    yield reply

        return serve

    def _stream_unary(self, method: MethodDescriptor) -> Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]:
        open_stream: Any = self._channel.stream_unary(_path_of(method))

        async def serve(requests: AsyncIterator[bytes], context: Context) -> bytes:
            call = open_stream(requests, metadata=self.metadata(), timeout=context.time_remaining())
            try:
                with peer_status(call):
                    reply: bytes = await call
                return reply
            finally:
                call.cancel()

        return serve

    def _stream_stream(
        self, method: MethodDescriptor
    ) -> Callable[[AsyncIterator[bytes], Context], AsyncIterator[bytes]]:
        open_stream: Any = self._channel.stream_stream(_path_of(method))

        async def serve(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            call = open_stream(requests, metadata=self.metadata(), timeout=context.time_remaining())
            with self._streams.ending(call, context), peer_status(call):
                async for reply in call:
                    yield reply

        return serve

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The caller's signed principal, its request id, and the trace."""
        call = current_call.get()
        base = (
            (PRINCIPAL_KEY, self._signer.principal_token(principal())),
            (REQUEST_ID_KEY, call.request_id),
        )
        if self._telemetry is None or call.span is None:
            return base
        return (*base, (TRACEPARENT, self._telemetry.traceparent(call.span)))
