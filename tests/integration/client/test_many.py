"""Many streams and sandboxes through one client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from orchard import AsyncSandboxClient
from orchard._client.pool import STREAMS_PER_CONNECTION, Pool
from orchard._client.profile import Profile


@pytest.fixture
async def strict_server() -> AsyncIterator[str]:
    """Allows 100 streams a connection, as proxies do, and never ends one by itself."""

    async def hang(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        await asyncio.Event().wait()

    server = grpc.aio.server(options=[("grpc.max_concurrent_streams", 100)])
    handler = grpc.unary_stream_rpc_method_handler(hang)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Hang": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_thousand_streams_start_at_once_though_a_connection_takes_a_hundred(strict_server: str) -> None:
    pool = Pool(Profile(strict_server, "key"))
    started = 0
    everybody = asyncio.Event()

    async def hold() -> None:
        nonlocal started
        with pool.connection() as connection:
            call = connection.channel.unary_stream("/test.Test/Hang")(b"x")
            assert await call.read() == b"x"
            started += 1
            if started == 1000:
                everybody.set()
            await everybody.wait()
            call.cancel()

    async with asyncio.timeout(110):
        await asyncio.gather(*(hold() for _ in range(1000)))
    assert len(pool._connections) == -(-1000 // STREAMS_PER_CONNECTION)
    await pool.close()


async def test_many_sandboxes_at_once(aclient: AsyncSandboxClient) -> None:
    async def life(number: int) -> str:
        async with aclient.create(labels={"test": "many"}) as sandbox:
            return (await sandbox.exec(f"echo {number}")).stdout

    results = await asyncio.gather(*(life(number) for number in range(40)))
    assert results == [f"{number}\n" for number in range(40)]


async def test_200_commands_at_once_in_one_sandbox(aclient: AsyncSandboxClient) -> None:
    async with aclient.create() as sandbox:

        async def run(number: int) -> str:
            stream = sandbox.exec_stream(f"echo {number}; until test -e /tmp/all; do sleep 0.5; done", concurrent=True)
            text = ""
            async for chunk in stream:
                text += chunk.text
                waiting.discard(number)
                if not waiting:
                    await sandbox.write_file("/tmp/all", "")
            return text

        waiting = set(range(200))
        assert await asyncio.gather(*(run(number) for number in range(200))) == [f"{n}\n" for n in range(200)]


async def test_a_client_serves_one_loop_after_the_other(aclient: AsyncSandboxClient) -> None:
    profile = aclient._session.profile

    def run() -> list[str]:
        client = AsyncSandboxClient(profile.endpoint, api_key=profile.api_key)

        async def ask() -> str:
            return (await client.version()).runtime

        return [asyncio.run(ask()), asyncio.run(ask())]

    assert await asyncio.to_thread(run) == ["process", "process"]
