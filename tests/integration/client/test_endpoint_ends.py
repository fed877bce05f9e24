"""Endpoints inside sandboxes that end for good while they are in use."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import orchard
import pytest
from orchard._client.trajectories.recording import status_after
from orchard.exec.v1 import endpoint_service_pb2, endpoint_service_pb2_grpc

from services.common.errors import FailedPreconditionError, NotFoundError, OrchardError
from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.server import Server

BACKSTOP = 110.0
GONE = NotFoundError("there is no endpoint 'llm' any more", reason="ENDPOINT_NOT_FOUND")
LOST = FailedPreconditionError("the sandbox has ended", reason="SANDBOX_LOST")


class Platform(endpoint_service_pb2_grpc.EndpointServiceServicer):
    """Opens each endpoint at port 8000, and ends it with an error when the test says so."""

    def __init__(self, error: OrchardError) -> None:
        self._error = error
        self.end = asyncio.Event()

    async def OpenEndpoint(self, request, context):
        yield endpoint_service_pb2.OpenEndpointResponse(opened=endpoint_service_pb2.EndpointOpened(port=8000))
        await self.end.wait()
        raise self._error


class Ended(logging.Handler):
    """Waits until the client says that an endpoint has ended; it has by the time that its loop goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "endpoint llm" in record.getMessage():
            self._heard.set()

    def wait(self) -> None:
        assert self._heard.wait(BACKSTOP)


@pytest.fixture
def ended() -> Iterator[Ended]:
    handler, log = Ended(), logging.getLogger("orchard")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


@asynccontextmanager
async def serving(platform: Platform) -> AsyncIterator[str]:
    interceptor = CallInterceptor(authenticator=None)
    server = Server(interceptor=interceptor, health=Health(), service_names=[], reflection=False)
    endpoint_service_pb2_grpc.add_EndpointServiceServicer_to_server(platform, server.grpc_server)
    port = await server.start("127.0.0.1:0")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop()


async def body(platform: Platform, ended: Ended) -> None:
    platform.end.set()
    await asyncio.to_thread(ended.wait)


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [(GONE, orchard.Unavailable, "ENDPOINT_LOST"), (LOST, orchard.SandboxLost, "SANDBOX_LOST")],
)
async def test_one_that_ended_in_use_is_no_result(
    ended: Ended, error: OrchardError, kind: type[orchard.OrchardError], reason: str
) -> None:
    platform = Platform(error)
    async with serving(platform) as address, orchard.AsyncSandboxClient(address, api_key="k") as client:
        with pytest.raises(kind) as caught:
            async with client.attach("box").expose("llm"):
                await body(platform, ended)
    assert caught.value.reason == reason
    assert error.message in str(caught.value)
    assert status_after(caught.value)[0] is orchard.TrajectoryStatus.ABORTED


async def test_an_error_of_the_body_stays_and_is_told_of_it(ended: Ended) -> None:
    platform = Platform(GONE)
    async with serving(platform) as address, orchard.AsyncSandboxClient(address, api_key="k") as client:
        with pytest.raises(ValueError, match="the body's own") as caught:
            async with client.attach("box").expose("llm"):
                await body(platform, ended)
                raise ValueError("the body's own")
    assert GONE.message in caught.value.__notes__[0]


async def test_one_that_lives_to_the_end_raises_nothing() -> None:
    async with serving(Platform(GONE)) as address, orchard.AsyncSandboxClient(address, api_key="k") as client:
        async with client.attach("box").expose("llm") as inside:
            assert inside.port == 8000
        closed = client.attach("box").expose("llm")
        async with closed:
            await closed.close()


async def test_the_synchronous_client_raises_it_too(ended: Ended) -> None:
    platform, loop = Platform(GONE), asyncio.get_running_loop()

    def use(address: str) -> None:
        with orchard.SandboxClient(address, api_key="k") as client, client.attach("box").expose("llm"):
            loop.call_soon_threadsafe(platform.end.set)
            ended.wait()

    async with serving(platform) as address:
        with pytest.raises(orchard.Unavailable) as caught:
            await asyncio.to_thread(use, address)
    assert caught.value.reason == "ENDPOINT_LOST"
