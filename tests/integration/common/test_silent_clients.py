"""Clients that fall silent, over real gRPC: no stream of requests holds its place for ever."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from orchard._client.pool import CONNECTION_OPTIONS

from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.peer_status import peer_status
from services.common.server import CHANNEL_OPTIONS, SERVER_OPTIONS, Server
from tests.support.silence import SilentProxy


class Handlers(grpc.GenericRpcHandler):
    """An upload that is kept, one that is passed on by gRPC's own reader, one that hangs, and a dialogue."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.address = ""

    def service(self, details: grpc.HandlerCallDetails):
        _, _, name = details.method.rpartition("/")
        if name.startswith("talk"):
            return grpc.stream_stream_rpc_method_handler(getattr(self, name))
        if name == "listen":
            return grpc.unary_stream_rpc_method_handler(self.listen)
        return grpc.stream_unary_rpc_method_handler(getattr(self, name))

    async def keep(self, requests: AsyncIterator[bytes], context) -> bytes:
        try:
            return b"".join([request async for request in requests])
        finally:
            self.ended.set()

    async def pass_on(self, requests: AsyncIterator[bytes], context) -> bytes:
        async def forward() -> AsyncIterator[bytes]:
            async for request in requests:
                yield request

        async with grpc.aio.insecure_channel(self.address) as channel:
            call = channel.stream_unary("/x/keep")(forward())
            try:
                return await call
            finally:
                call.cancel()

    async def hang(self, requests: AsyncIterator[bytes], context) -> bytes:
        await anext(requests)
        await asyncio.Event().wait()
        return b""

    async def talk(self, requests: AsyncIterator[bytes], context) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def talk_on(self, requests: AsyncIterator[bytes], context) -> AsyncIterator[bytes]:
        """Passes them on, as a gateway does."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            call = channel.stream_stream("/x/talk")(requests)
            try:
                async for answer in call:
                    yield answer
            finally:
                call.cancel()

    async def talk_alone(self, requests: AsyncIterator[bytes], context) -> AsyncIterator[bytes]:
        """Answers while the client only listens."""
        reading = asyncio.ensure_future(anext(requests))
        try:
            for number in range(8):
                done, _ = await asyncio.wait({reading}, timeout=1.0)
                if done:
                    reading.result()
                yield b"%d" % number
        finally:
            reading.cancel()

    async def listen(self, request: bytes, context) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@asynccontextmanager
async def serving(idle_seconds: float, options=()):
    handlers = Handlers()
    server = Server(
        interceptor=CallInterceptor(authenticator=None, idle_seconds=idle_seconds),
        health=Health([]),
        service_names=["x"],
        options=options,
    )
    server.grpc_server.add_generic_rpc_handlers((handlers,))
    port = await server.start("127.0.0.1:0")
    handlers.address = f"127.0.0.1:{port}"
    async with grpc.aio.insecure_channel(handlers.address) as channel:
        yield handlers, channel
        await server.stop()


async def half_sent() -> AsyncIterator[bytes]:
    yield b"one"
    await asyncio.Event().wait()


async def slow(messages: int, seconds: float) -> AsyncIterator[bytes]:
    for _ in range(messages):
        await asyncio.sleep(seconds)
        yield b"x"


def reason(error: grpc.aio.AioRpcError) -> str:
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.reason


@pytest.mark.parametrize("method", ["keep", "pass_on", "hang"])
async def test_an_upload_whose_client_falls_silent_ends(method: str) -> None:
    async with serving(0.5) as (_handlers, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            call = channel.stream_unary(f"/x/{method}")(half_sent(), timeout=110)
            with peer_status(call):
                await call
        assert (caught.value.code(), reason(caught.value)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "STREAM_IDLE")
        assert "0.5 s" in caught.value.details()


@pytest.mark.parametrize("method", ["keep", "pass_on"])
async def test_each_message_gives_an_upload_more_time(method: str) -> None:
    async with serving(6.0) as (_handlers, channel):
        assert await channel.stream_unary(f"/x/{method}")(slow(32, 0.25), timeout=110) == b"x" * 32


@pytest.mark.parametrize("method", ["talk", "talk_on"])
async def test_a_dialogue_that_falls_silent_ends(method: str) -> None:
    async with serving(4.0) as (_handlers, channel):
        call = channel.stream_stream(f"/x/{method}")(half_sent(), timeout=110)
        answers = aiter(call)
        assert await anext(answers) == b"one"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(answers)
        assert (caught.value.code(), reason(caught.value)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "STREAM_IDLE")


async def test_a_client_that_only_listens_is_not_silent_while_answers_come() -> None:
    async with serving(6.0) as (_handlers, channel):
        call = channel.stream_stream("/x/talk_alone")(half_sent(), timeout=110)
        assert [answer async for answer in call] == [b"%d" % number for number in range(8)]


def quickly(options) -> list[tuple[str, int]]:
    """The same options with the times of keepalive, and only those, a tenth."""
    times = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"}
    return [(name, value // 10 if name in times else value) for name, value in options]


async def test_the_calls_of_a_client_that_vanished_without_a_word_end() -> None:
    async with (
        serving(3600, quickly(SERVER_OPTIONS)) as (handlers, _channel),
        SilentProxy(handlers.address) as proxy,
        grpc.aio.insecure_channel(proxy.address) as channel,
    ):
        call = channel.unary_stream("/x/listen")(b"", timeout=220)
        assert await anext(aiter(call)) == b"first"
        proxy.fall_silent()
        await asyncio.wait_for(handlers.ended.wait(), 110)
        call.cancel()


@pytest.mark.parametrize("options", [CHANNEL_OPTIONS, CONNECTION_OPTIONS], ids=["services", "SDK"])
async def test_a_call_to_a_server_that_vanished_without_a_word_ends(options) -> None:
    async with (
        serving(3600) as (handlers, _channel),
        SilentProxy(handlers.address) as proxy,
        grpc.aio.insecure_channel(proxy.address, options=quickly(options)) as channel,
    ):
        answers = aiter(channel.unary_stream("/x/listen")(b"", timeout=220))
        assert await anext(answers) == b"first"
        proxy.fall_silent()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(anext(answers), 110)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
