"""The one interceptor around every handler of every server.

In this order, outermost first: count the call as in flight, give it a request id, time and trace it, map every error to
a status, bound its time, authenticate. One object instead of a chain: each layer of a chain costs a coroutine a call.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from services.common import logs
from services.common.errors import (
    STATUS_DETAILS_KEY,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    OrchardError,
    UnavailableError,
)
from services.common.requests import ANSWER_SECONDS, IDLE_SECONDS, Dialogue, Upload, idle_error
from services.common.telemetry import Telemetry
from services.common.tokens import Principal

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    Handler = grpc.RpcMethodHandler[Any, Any]
    UnaryBehavior = Callable[[Any, Any], Awaitable[Any]]
    StreamBehavior = Callable[[Any, Any], AsyncIterator[Any]]
    Context = grpc.aio.ServicerContext[Any, Any]

_log = logs.get_logger(__name__)

REQUEST_ID_KEY: Final = "orchard-request-id"
_OPEN_PREFIXES: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.")


@dataclass(slots=True)
class Call:
    """What is known of the call that is being served."""

    method: str
    request_id: str
    principal: Principal | None = None
    key_id: str = ""
    """Id of the key that was shown, also of one that is not valid."""
    authenticated: bool = False
    target: str = ""
    """What the call is about, as far as it is known: an id or a name."""
    span: Span | None = None
    trailing: list[tuple[str, str | bytes]] = field(default_factory=list)


current_call: contextvars.ContextVar[Call] = contextvars.ContextVar("current_call")
"""The call that this task serves."""

Metadata = dict[str, Any]


class CallObserver(Protocol):
    """Is told of every call of this server's own services that has ended."""

    def ended(self, call: Call, status: str, peer: Callable[[], str]) -> None:
        """A call has ended with a status, like "OK"; `peer` gives gRPC's name of the caller. Must not wait or raise."""


def note_target(target: str) -> None:
    """Note what the call that is being served is about."""
    if (call := current_call.get(None)) is not None:
        call.target = target


class Authenticator(Protocol):
    """Finds out who calls. Async, since a gateway may have to ask its store for a key it has not seen."""

    async def authenticate(self, method: str, metadata: Metadata) -> Principal | None:
        """Return the principal, or None where calls have none.

        Raises:
            UnauthenticatedError: the credentials are missing or wrong.
            PermissionDeniedError: they do not allow this method.
        """


class InFlight:
    """Calls that run, so that a stopping server can end them and wait for their `finally` blocks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.limits: set[asyncio.Timeout] = set()
        """Of calls that have one answer."""
        self.given_up = False
        """Whether `give_up` was called."""

    def give_up(self) -> None:
        """The server stops and waits no longer for calls that have one answer: each tells its client so."""
        self.given_up = True
        now = asyncio.get_running_loop().time()
        for limit in self.limits:
            if not limit.expired():
                limit.reschedule(now)

    def bound(self, limit: asyncio.Timeout) -> None:
        """Note the limit of a call that has one answer; it is over at once where the server waits no longer."""
        self.limits.add(limit)
        if self.given_up:
            limit.reschedule(asyncio.get_running_loop().time())

    def add(self) -> asyncio.Task[Any] | None:
        """Note the current task."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        return task

    def remove(self, task: asyncio.Task[Any] | None) -> None:
        """Forget a task."""
        if task is not None:
            self._tasks.discard(task)

    async def drained(self, timeout: float) -> bool:
        """Wait until no call runs; False if some still do after `timeout` seconds."""
        tasks = self._tasks - {asyncio.current_task()}
        if not tasks:
            return True
        _done, pending = await asyncio.wait(tasks, timeout=timeout)
        return not pending


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler; see the module."""

    def __init__(
        self,
        *,
        authenticator: Authenticator | None,
        telemetry: Telemetry | None = None,
        observer: CallObserver | None = None,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """Take what every call goes through.

        Args:
            authenticator: says who calls; None where the transport alone decides.
            telemetry: where calls are traced and counted; None for nowhere.
            observer: is told of every call that has ended.
            idle_seconds: how long a client that sends a stream may be silent.
        """
        self._authenticator = authenticator
        self._idle_seconds = idle_seconds
        self._telemetry = telemetry
        self._observer = observer
        self._wrapped: dict[str, Handler] = {}
        self.in_flight = InFlight()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Give the method's handler, wrapped once and kept."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None or method.startswith(_OPEN_PREFIXES):
                return handler
            wrapped = self._wrapped[method] = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: Handler) -> Handler:
        codecs = {
            "request_deserializer": _reader(handler.request_deserializer, streamed=handler.request_streaming),
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            stream = self._stream(
                method,
                cast("StreamBehavior", handler.stream_stream or handler.unary_stream),
                streamed=handler.request_streaming,
            )
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return make(stream, **codecs)
        unary = self._unary(
            method,
            cast("UnaryBehavior", handler.stream_unary or handler.unary_unary),
            streamed=handler.request_streaming,
        )
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(unary, **codecs)

    def _unary(
        self, method: str, inner: Callable[[Any, Any], Awaitable[Any]], *, streamed: bool
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def serve(request: Any, context: Context) -> Any:
            task = self.in_flight.add()
            metadata = dict(context.invocation_metadata() or ())
            call, started = self._begin(method, metadata)
            status = "OK"
            upload = None
            try:
                async with asyncio.timeout(self._idle_seconds if streamed else _limit(context)) as limit:
                    self.in_flight.bound(limit)
                    try:
                        await self._admit(call, metadata, request)
                        if streamed:
                            request = upload = Upload(request, limit, self._idle_seconds, self.in_flight)
                        return await inner(request, context)
                    finally:
                        self.in_flight.limits.discard(limit)
            except BaseException as raised:  # noqa: BLE001 (the one place that maps everything)
                error = raised
                if isinstance(raised, TimeoutError) and self.in_flight.given_up:
                    error = UnavailableError("the server stops; retry", reason="SERVER_STOPPING")
                elif isinstance(raised, TimeoutError) and upload is not None and not upload.ended:
                    error = idle_error(self._idle_seconds)
                status = _status_of(error)
                await self._fail(error, call, context)
            finally:
                self._end(call, started, status, context)
                self.in_flight.remove(task)

        return serve

    def _stream(
        self, method: str, inner: Callable[[Any, Any], AsyncIterator[Any]], *, streamed: bool
    ) -> Callable[[Any, Any], AsyncIterator[Any]]:
        async def serve(request: Any, context: Context) -> AsyncIterator[Any]:
            task = self.in_flight.add()
            metadata = dict(context.invocation_metadata() or ())
            call, started = self._begin(method, metadata)
            status = "OK"
            responses = dialogue = None
            try:
                await self._admit(call, metadata, request)
                if streamed:
                    request = dialogue = Dialogue(request, self._idle_seconds)
                responses = inner(request, context)
                async for response in responses:
                    if dialogue is not None:
                        dialogue.touch()
                    yield response
            except BaseException as raised:  # noqa: BLE001
                is_idle = dialogue is not None and dialogue.idle
                error = idle_error(self._idle_seconds) if is_idle else raised
                status = _status_of(error)
                await self._fail(error, call, context)
            finally:
                if responses is not None and hasattr(responses, "aclose"):
                    await responses.aclose()
                self._end(call, started, status, context)
                self.in_flight.remove(task)

        return serve

    def _begin(self, method: str, metadata: Metadata) -> tuple[Call, float]:
        request_id = metadata.get(REQUEST_ID_KEY) or uuid.uuid4().hex[:16]
        call = Call(method, str(request_id)[:64])
        fields = {"request_id": call.request_id}
        if self._telemetry is not None:
            call.span = self._telemetry.start_span(method.lstrip("/"), metadata.items())
            call.span.set_attribute("orchard.request_id", call.request_id)
            fields["trace_id"] = f"{call.span.get_span_context().trace_id:032x}"
        current_call.set(call)
        logs.call_fields.set(fields)
        return call, time.perf_counter()

    async def _admit(self, call: Call, metadata: Metadata, request: Any) -> None:
        if self._authenticator is not None:
            call.principal = await self._authenticator.authenticate(call.method, metadata)
            call.authenticated = True
        if isinstance(request, OrchardError):  # see _reader
            raise request

    async def _fail(self, error: BaseException, call: Call, context: Context) -> NoReturn:
        """Turn any exception into the call's status."""
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, grpc.aio.AbortError)):
            raise error
        if isinstance(error, asyncio.CancelledError):
            if context.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
                raise error
            # Something of ours was cancelled: let out as it is, it would leave the client waiting for its deadline.
            error = UnavailableError("the server gave the call up; retry", reason="CALL_INTERRUPTED")
        elif isinstance(error, TimeoutError):
            error = DeadlineExceededError("the call took longer than it may")
        elif isinstance(error, grpc.aio.AioRpcError):
            await _forward(error, call, context)
        elif not isinstance(error, OrchardError):
            _log.error("call failed", method=call.method, exc_info=error)
            error = InternalError(
                f"internal error; the server's log has it under request id {call.request_id}",
                request_id=call.request_id,
            )
        status = error.to_status()
        await context.abort(
            error.code,
            error.message,
            (*call.trailing, (REQUEST_ID_KEY, call.request_id), (STATUS_DETAILS_KEY, status.SerializeToString())),
        )

    def _end(self, call: Call, started: float, status: str, context: Context) -> None:
        if call.trailing and status == "OK":
            context.set_trailing_metadata(tuple(call.trailing))
        if self._observer is not None:
            self._observer.ended(call, status, context.peer)
        if self._telemetry is None:
            return
        code = context.code()
        name = code.name if isinstance(code, grpc.StatusCode) else status
        attributes = {"method": call.method, "status": name}
        self._telemetry.calls.add(1, attributes)
        self._telemetry.latency.record((time.perf_counter() - started) * 1e3, {"method": call.method})
        if call.span is not None:
            call.span.set_attribute("rpc.grpc.status", name)
            call.span.end()


def _reader(read: Callable[[bytes], Any] | None, *, streamed: bool) -> Callable[[bytes], Any] | None:
    """Reads requests; what is none is the caller's fault, which gRPC would call an unknown error of ours.

    The single request of a call is read before there is anything of the call to answer with: its error is given in its
    place.
    """
    if read is None:
        return None

    def request_of(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            error = InvalidArgumentError.of("request", "cannot be read; it is no message of this call")
            if streamed:
                raise error from None
            return error

    return request_of


def _limit(context: Context) -> float | None:
    """Seconds that a call may take: every wait has an end, also for callers that set no deadline.

    A deadline that gRPC itself keeps needs no timer of ours. Streams of requests have their own (requests.py).
    """
    remaining = context.time_remaining()
    return None if remaining is not None and remaining <= ANSWER_SECONDS else ANSWER_SECONDS


def _status_of(error: BaseException) -> str:
    """The name of the status under which a failed call is counted, known before it is told: that raises too."""
    if isinstance(error, OrchardError):
        return error.code.name
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code().name
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return grpc.StatusCode.CANCELLED.name
    if isinstance(error, TimeoutError):
        return grpc.StatusCode.DEADLINE_EXCEEDED.name
    return grpc.StatusCode.INTERNAL.name


async def _forward(error: grpc.aio.AioRpcError, call: Call, context: Context) -> NoReturn:
    """Pass on the status of a service behind this one, details and all.

    A status that gRPC itself made (a connection that broke) has no details: it becomes UNAVAILABLE of our own.
    """
    trailing = dict(error.trailing_metadata() or ())
    details = trailing.get(STATUS_DETAILS_KEY)
    code, message = error.code(), error.details() or ""
    if details is None and code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    ):
        _log.warning("a service behind this one failed", method=call.method, status=code.name, detail=message)
        unavailable = UnavailableError(
            "a service behind the gateway did not answer; retry", reason="UPSTREAM_UNAVAILABLE"
        )
        code, message, details = unavailable.code, unavailable.message, unavailable.to_status().SerializeToString()
    metadata = [(REQUEST_ID_KEY, call.request_id)]
    if details is not None:
        metadata.append((STATUS_DETAILS_KEY, details))
    await context.abort(code, message, tuple(metadata))
