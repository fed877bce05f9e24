"""A client that is closed while others use it: their calls end by that, and not as if somebody had cancelled them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import orchard
import pytest
from orchard import AsyncSandboxClient

BACKSTOP = 110.0


class Hanging(grpc.GenericRpcHandler):
    """Takes every call and answers none."""

    def __init__(self) -> None:
        self.taken = asyncio.Event()

    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(self._hang)

    async def _hang(self, requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        await anext(requests)
        self.taken.set()
        await asyncio.Event().wait()
        yield b""


@asynccontextmanager
async def hanging() -> AsyncIterator[tuple[AsyncSandboxClient, asyncio.Event]]:
    server, handler = grpc.aio.server(), Hanging()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield AsyncSandboxClient(f"127.0.0.1:{port}", api_key="k"), handler.taken
    finally:
        await server.stop(None)


async def ask(client: AsyncSandboxClient) -> None:
    await client.version()


async def write(client: AsyncSandboxClient) -> None:
    await client.attach("box").write_file("/file", b"content")


async def stream(client: AsyncSandboxClient) -> None:
    async for _ in client.attach("box").exec_stream("true"):
        pass


async def wait(client: AsyncSandboxClient) -> None:
    await client.attach("box").wait_ended()


async def expose(client: AsyncSandboxClient) -> None:
    async with client.attach("box").expose("llm"):
        pass


Use = Callable[[AsyncSandboxClient], Awaitable[None]]


@pytest.mark.parametrize("use", [ask, write, stream, wait, expose])
async def test_a_call_under_way_ends_as_its_client_is_closed(use: Use) -> None:
    async with hanging() as (client, taken):
        using = asyncio.ensure_future(use(client))
        await asyncio.wait_for(taken.wait(), BACKSTOP)
        await asyncio.wait_for(client.close(), BACKSTOP)
        with pytest.raises(orchard.ClientClosed):
            await asyncio.wait_for(using, BACKSTOP)


@pytest.mark.parametrize("use", [ask, write, stream, wait])
async def test_whoever_is_cancelled_is_cancelled_also_where_the_client_is_closed_then(use: Use) -> None:
    async with hanging() as (client, taken):
        using = asyncio.ensure_future(use(client))
        await asyncio.wait_for(taken.wait(), BACKSTOP)
        using.cancel()
        await asyncio.wait_for(client.close(), BACKSTOP)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(using, BACKSTOP)
