"""The server bootstrap and the interceptor over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from services.common.errors import NotFoundError, UnauthenticatedError, UnavailableError
from services.common.health import READY, Health
from services.common.interceptor import REQUEST_ID_KEY, CallInterceptor, current_call
from services.common.server import ListenError, Server
from services.common.telemetry import Telemetry
from services.common.tokens import Principal
from tests.support.health import NOT_SERVING, SERVING, check


class Handlers(grpc.GenericRpcHandler):
    """Handlers that do what the method's name says."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.finished = asyncio.Event()
        self.seen: list[str] = []

    def service(self, details: grpc.HandlerCallDetails):
        _, _, name = details.method.rpartition("/")
        work = getattr(self, name, None)
        if work is None:
            return None
        if name.startswith("stream"):
            return grpc.unary_stream_rpc_method_handler(work)
        return grpc.unary_unary_rpc_method_handler(work)

    async def fine(self, request: bytes, context) -> bytes:
        self.seen.append(current_call.get().request_id)
        return request

    async def missing(self, request: bytes, context) -> bytes:
        raise NotFoundError("no such thing", reason="THING_NOT_FOUND", thing="x")

    async def broken(self, request: bytes, context) -> bytes:
        raise RuntimeError("driver says: password=hunter2")

    async def cancelled_inside(self, request: bytes, context) -> bytes:
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task
        return b""

    async def waits(self, request: bytes, context) -> bytes:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)  # clean-up that takes a moment
            self.finished.set()
        return b""

    async def forwards(self, request: bytes, context) -> bytes:
        async with grpc.aio.insecure_channel(request.decode()) as channel:
            return await channel.unary_unary("/x/missing")(b"")

    async def stream_fine(self, request: bytes, context) -> AsyncIterator[bytes]:
        for number in range(3):
            yield b"%d" % number

    async def stream_breaks(self, request: bytes, context) -> AsyncIterator[bytes]:
        yield b"first"
        raise UnavailableError("gone", retry_seconds=2)

    async def stream_forever(self, request: bytes, context) -> AsyncIterator[bytes]:
        try:
            while True:
                self.started.set()
                yield b"x" * 65536
        finally:
            self.finished.set()


class Doorman:
    async def authenticate(self, method: str, metadata) -> Principal | None:
        if metadata.get("key") != "good":
            raise UnauthenticatedError("no")
        return Principal("t", "k", frozenset())


@asynccontextmanager
async def serving(authenticator=None, telemetry=None):
    handlers = Handlers()
    health = Health(["store"])
    server = Server(
        interceptor=CallInterceptor(authenticator=authenticator, telemetry=telemetry),
        health=health,
        service_names=["x"],
    )
    server.grpc_server.add_generic_rpc_handlers((handlers,))
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield handlers, channel, server, port
        await server.stop()


async def failing(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    found = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(found)
    return found


async def test_a_request_id_is_kept_or_made() -> None:
    async with serving() as (handlers, channel, _server, _port):
        await channel.unary_unary("/x/fine")(b"", metadata=((REQUEST_ID_KEY, "mine"),))
        await channel.unary_unary("/x/fine")(b"")
        assert handlers.seen[0] == "mine"
        assert len(handlers.seen[1]) == 16


async def test_domain_errors_carry_their_details_and_the_request_id() -> None:
    async with serving() as (_handlers, channel, _server, _port):
        error = await failing(channel.unary_unary("/x/missing")(b"", metadata=((REQUEST_ID_KEY, "mine"),)))
        assert error.code() == grpc.StatusCode.NOT_FOUND
        assert (info(error).reason, dict(info(error).metadata)) == ("THING_NOT_FOUND", {"thing": "x"})
        assert dict(error.trailing_metadata())[REQUEST_ID_KEY] == "mine"


async def test_nothing_of_an_unexpected_error_reaches_the_client() -> None:
    async with serving() as (_handlers, channel, _server, _port):
        error = await failing(channel.unary_unary("/x/broken")(b""))
        assert error.code() == grpc.StatusCode.INTERNAL
        assert "hunter2" not in str(error)
        assert info(error).metadata["request_id"] in error.details()


async def test_a_cancellation_inside_is_unavailable_and_not_a_hang() -> None:
    async with serving() as (_handlers, channel, _server, _port):
        error = await failing(channel.unary_unary("/x/cancelled_inside")(b"", timeout=110))
        assert (error.code(), info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "CALL_INTERRUPTED")


async def test_an_error_behind_is_passed_on_whole() -> None:
    async with serving() as (_h, _c, _s, port), serving() as (_handlers, channel, _server, _port):
        error = await failing(channel.unary_unary("/x/forwards")(f"127.0.0.1:{port}".encode()))
        assert (error.code(), info(error).reason) == (grpc.StatusCode.NOT_FOUND, "THING_NOT_FOUND")
        gone = await failing(channel.unary_unary("/x/forwards")(b"127.0.0.1:1"))
        assert (gone.code(), info(gone).reason) == (grpc.StatusCode.UNAVAILABLE, "UPSTREAM_UNAVAILABLE")
        assert "127.0.0.1" not in gone.details()


async def test_a_client_that_cancels_ends_the_handler() -> None:
    async with serving() as (handlers, channel, _server, _port):
        call = channel.unary_unary("/x/waits")(b"")
        await asyncio.wait_for(handlers.started.wait(), 110)
        call.cancel()
        await asyncio.wait_for(handlers.finished.wait(), 110)


async def test_a_reader_that_leaves_ends_the_stream() -> None:
    async with serving() as (handlers, channel, _server, _port):
        call = channel.unary_stream("/x/stream_forever")(b"")
        async for _ in call:
            break
        call.cancel()
        await asyncio.wait_for(handlers.finished.wait(), 110)


async def test_streams_end_as_they_should() -> None:
    async with serving() as (_handlers, channel, _server, _port):
        assert [part async for part in channel.unary_stream("/x/stream_fine")(b"")] == [b"0", b"1", b"2"]
        received = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for part in channel.unary_stream("/x/stream_breaks")(b""):
                received.append(part)
        assert received == [b"first"]
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert info(caught.value).reason == "UNAVAILABLE"


async def test_calls_are_authenticated_and_health_is_not() -> None:
    async with serving(Doorman()) as (_handlers, channel, server, _port):
        assert (await failing(channel.unary_unary("/x/fine")(b""))).code() == grpc.StatusCode.UNAUTHENTICATED
        assert await channel.unary_unary("/x/fine")(b"a", metadata=(("key", "good"),)) == b"a"
        await server.health.well("store")
        assert await health(channel) == health_pb2.HealthCheckResponse.SERVING


async def health(channel: grpc.aio.Channel) -> int:
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x"))).status


async def test_health_tells_the_truth() -> None:
    async with serving() as (_handlers, channel, server, _port):
        assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.health.well("store")
        assert await health(channel) == health_pb2.HealthCheckResponse.SERVING
        await server.health.unwell("store", "away")
        assert await health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert server.health.wrong == {"store": "away"}


async def test_stopping_tells_what_it_cannot_wait_for_and_waits_for_the_clean_up() -> None:
    async with serving() as (handlers, channel, server, _port):
        call = channel.unary_unary("/x/waits")(b"")
        await asyncio.wait_for(handlers.started.wait(), 110)
        await server.stop()
        assert handlers.finished.is_set()
        assert server.stopping.is_set()
        error = await failing(call)
        assert (error.code(), info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "SERVER_STOPPING")


class SlowDoorman:
    """Looks for a key that nobody can find just now."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answers = asyncio.Event()

    async def authenticate(self, method: str, metadata) -> Principal | None:
        self.asked.set()
        await self.answers.wait()
        return None


async def test_stopping_tells_calls_whose_key_is_still_looked_for() -> None:
    doorman = SlowDoorman()
    async with serving(doorman) as (_handlers, channel, server, _port):
        call = channel.unary_unary("/x/fine")(b"")
        await asyncio.wait_for(doorman.asked.wait(), 110)
        await server.stop()
        error = await failing(call)
        assert (error.code(), info(error).reason) == (grpc.StatusCode.UNAVAILABLE, "SERVER_STOPPING")


async def test_a_limit_that_begins_after_the_calls_were_given_up_is_over() -> None:
    in_flight = CallInterceptor(authenticator=None).in_flight
    in_flight.give_up()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(110), asyncio.timeout(None) as limit:
            in_flight.bound(limit)
            await asyncio.Event().wait()
    assert limit.expired()


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    async with serving() as (_handlers, _channel, _server, port):
        other = Server(interceptor=CallInterceptor(authenticator=None), health=Health(), service_names=["x"])
        with pytest.raises(ListenError, match=f"127.0.0.1:{port}.*in use"):
            await other.start(f"127.0.0.1:{port}")
        await other.grpc_server.stop(None)


async def test_calls_are_counted_under_the_status_they_had() -> None:
    reader = InMemoryMetricReader()
    telemetry = Telemetry(TracerProvider(), MeterProvider([reader]), "test")
    async with serving(telemetry=telemetry) as (handlers, channel, _server, _port):
        await channel.unary_unary("/x/fine")(b"")
        await failing(channel.unary_unary("/x/missing")(b""))
        await failing(channel.unary_unary("/x/cancelled_inside")(b"", timeout=110))
        assert [part async for part in channel.unary_stream("/x/stream_fine")(b"")]
        for method, deadline in (("waits", 5), ("waits", None), ("stream_forever", None)):
            handlers.started.clear()
            handlers.finished.clear()
            begin = channel.unary_unary if method == "waits" else channel.unary_stream
            call = begin(f"/x/{method}")(b"", timeout=deadline)
            await asyncio.wait_for(handlers.started.wait(), 110)
            if deadline is None:
                call.cancel()
            await asyncio.wait_for(handlers.finished.wait(), 110)
    counted = {}
    for resource in reader.get_metrics_data().resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                if metric.name == "orchard.calls":
                    for point in metric.data.data_points:
                        counted[point.attributes["method"], point.attributes["status"]] = point.value
    telemetry.close()
    assert counted == {
        ("/x/fine", "OK"): 1,
        ("/x/missing", "NOT_FOUND"): 1,
        ("/x/cancelled_inside", "UNAVAILABLE"): 1,
        ("/x/stream_fine", "OK"): 1,
        ("/x/waits", "CANCELLED"): 2,
        ("/x/stream_forever", "CANCELLED"): 1,
    }


@pytest.mark.parametrize("notice_seconds", [0.0, 0.1])
async def test_a_health_watch_sees_the_stop_and_does_not_hold_it_up(
    monkeypatch: pytest.MonkeyPatch, notice_seconds: float
) -> None:
    monkeypatch.setattr("services.common.server.STREAM_GRACE_SECONDS", 3600.0)
    async with asyncio.timeout(110), serving() as (_handlers, channel, server, _port):
        await server.health.well("store")
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="x"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stop = asyncio.ensure_future(server.stop(notice_seconds=notice_seconds))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING:
                pass
        await stop
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_ready_means_that_everything_was_there_once() -> None:
    health = Health(["store", "watcher"])
    server = Server(interceptor=CallInterceptor(authenticator=None), health=health, service_names=["x"])
    port = await server.start("127.0.0.1:0")
    address = f"127.0.0.1:{port}"

    async def told() -> tuple[int, int]:
        return await check(address, READY), await check(address)

    assert await told() == (NOT_SERVING, NOT_SERVING)
    await health.well("store")
    assert await told() == (NOT_SERVING, NOT_SERVING)
    await health.unwell("store", "it went before the other came")
    await health.well("watcher")
    assert await told() == (SERVING, NOT_SERVING)
    await health.well("store")
    assert await told() == (SERVING, SERVING)
    await health.unwell("watcher", "it is away")
    assert await told() == (SERVING, NOT_SERVING)
    await health.shutdown()
    assert await told() == (NOT_SERVING, NOT_SERVING)
    await server.stop()
