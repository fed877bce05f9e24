"""The probe of an agent over TCP, as Pods are probed, against real servers."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.server import Server
from services.watcher.agent_client import AgentProber

BACKSTOP = 110


@asynccontextmanager
async def agent(host: str, uid: str) -> AsyncIterator[str]:
    """A server that answers as this sandbox; gives its endpoint."""
    server = Server(
        interceptor=CallInterceptor(authenticator=None, telemetry=None), health=Health(), service_names=[uid]
    )
    port = await server.start(f"{host}:0")
    try:
        yield f"{host}:{port}"
    finally:
        await server.stop()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_an_agent_answers_as_its_own_sandbox_alone(host: str) -> None:
    async with agent(host, "uid-1") as endpoint:
        assert await AgentProber().answers(endpoint, "uid-1") == ""
        # The address of a Pod that is gone may be another's now.
        assert await AgentProber().answers(endpoint, "uid-2") is None


async def test_nobody_there() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
        assert await AgentProber().answers(endpoint, "uid-1") is None


async def test_one_that_never_answers_does_not_hold_the_watcher_up() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(5)  # the kernel takes the connection, and nobody speaks on it
        async with asyncio.timeout(BACKSTOP):
            assert await AgentProber().answers(f"127.0.0.1:{mute.getsockname()[1]}", "uid-1") is None


async def test_a_full_backlog_does_not_hold_the_watcher_up() -> None:
    """Connections that are never accepted look like an address behind which packets are dropped."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = []
        try:
            while True:  # until the kernel takes no more
                one = socket.socket()
                waiting.append(one)
                one.settimeout(0.2)
                try:
                    one.connect(address)
                except TimeoutError:
                    break
            async with asyncio.timeout(BACKSTOP):
                assert await AgentProber().answers(f"127.0.0.1:{address[1]}", "uid-1") is None
        finally:
            for one in waiting:
                one.close()
