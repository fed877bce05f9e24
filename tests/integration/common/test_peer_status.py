"""Peers that end a call before they have read its requests, over real gRPC: the caller learns what they said."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from services.common.peer_status import peer_status

REFUSED = (grpc.StatusCode.PERMISSION_DENIED, "not here", (("reason", "why"),))


class Handlers(grpc.GenericRpcHandler):
    """Refuses whatever streams requests, and answers `count` when it has read them."""

    def service(self, details: grpc.HandlerCallDetails):
        return {
            "/x/refuse": grpc.stream_unary_rpc_method_handler(self.refuse),
            "/x/break_off": grpc.stream_stream_rpc_method_handler(self.break_off),
            "/x/end": grpc.stream_stream_rpc_method_handler(self.end),
            "/x/count": grpc.stream_unary_rpc_method_handler(self.count),
        }.get(details.method)

    async def refuse(self, requests: AsyncIterator[bytes], context) -> bytes:
        await context.abort(*REFUSED)
        return b""

    async def break_off(self, requests: AsyncIterator[bytes], context) -> AsyncIterator[bytes]:
        yield b"first"
        await context.abort(*REFUSED)

    async def end(self, requests: AsyncIterator[bytes], context) -> AsyncIterator[bytes]:
        yield b"first"
        yield b"last"

    async def count(self, requests: AsyncIterator[bytes], context) -> bytes:
        return b"%d" % len([request async for request in requests])


@pytest_asyncio.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def endless() -> AsyncIterator[bytes]:
    yield b"x"
    await asyncio.Event().wait()


async def failed_send(call: Any) -> None:
    """What grpc.aio does when its next message finds the call ended: seldom, so that no test could wait for it."""
    await call.code()
    call._cython_call.set_internal_error("send failed")


def is_the_peers(error: grpc.aio.AioRpcError) -> bool:
    return (error.code(), error.details(), tuple(error.trailing_metadata() or ())) == REFUSED


async def test_a_refusal_is_told_although_the_next_message_could_not_be_sent(channel: grpc.aio.Channel) -> None:
    call: Any = channel.stream_unary("/x/refuse")(endless())
    with pytest.raises(grpc.aio.AioRpcError) as caught, peer_status(call):
        await failed_send(call)
        await call
    assert is_the_peers(caught.value)


async def test_without_it_the_library_gives_its_own_error(channel: grpc.aio.Channel) -> None:
    """When this fails, grpc.aio keeps the status, and peer_status can go."""
    call: Any = channel.stream_unary("/x/refuse")(endless())
    await failed_send(call)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_a_dialogue_that_is_broken_off(channel: grpc.aio.Channel) -> None:
    call: Any = channel.stream_stream("/x/break_off")(endless())
    answers = []
    with pytest.raises(grpc.aio.AioRpcError) as caught, peer_status(call):
        async for answer in call:
            answers.append(answer)
            await failed_send(call)
    assert is_the_peers(caught.value)


async def test_a_dialogue_that_is_ended_well_ends_well(channel: grpc.aio.Channel) -> None:
    call: Any = channel.stream_stream("/x/end")(endless())
    answers = []
    with peer_status(call):
        async for answer in call:
            answers.append(answer)
            if answer == b"last":
                await failed_send(call)
        raise AssertionError("grpc.aio keeps the status, and peer_status can go")
    assert answers == [b"first", b"last"]


async def test_answers_and_other_errors_pass(channel: grpc.aio.Channel) -> None:
    call: Any = channel.stream_unary("/x/count")(iter([b"1", b"2"]))
    with peer_status(call):
        assert await call == b"2"
    call = channel.stream_unary("/x/unknown")(iter([b"1"]))
    with pytest.raises(grpc.aio.AioRpcError) as caught, peer_status(call):
        await call
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_many_refused_uploads(channel: grpc.aio.Channel) -> None:
    async def upload(number: int) -> None:
        call: Any = channel.stream_unary("/x/refuse")(iter([b"x" * 100_000] * (number % 8 + 1)))
        with pytest.raises(grpc.aio.AioRpcError) as caught, peer_status(call):
            await call
        assert is_the_peers(caught.value)

    for _ in range(10):
        await asyncio.gather(*(upload(number) for number in range(50)))
