"""An agent that stops in order begins nothing more, and leaves its commands as one that is killed does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from orchard.exec.v1 import exec_pb2, exec_service_pb2

from services.common.errors import UnavailableError
from services.exec_agent import service
from services.exec_agent.servicer_attach import Attachment
from services.exec_agent.stdin import BUFFER_BYTES
from tests.integration.exec_agent.conftest import (
    AgentProcess,
    agent_here,
    short_folder,
    spec,
)

MakeAgent = Callable[..., AgentProcess]
RESTARTED = exec_pb2.EXEC_END_AGENT_RESTARTED


async def test_an_agent_that_stops_in_order_leaves_the_same(make_agent: MakeAgent) -> None:
    agent = make_agent()
    async with agent.client() as client:
        await client.run(spec("echo", "small"), "small")
        await client.start(spec("head", "-c", "100000", "/dev/zero"), exec_id="large")
        await client.start(spec(shell="printf up; exec sleep 1000"), wait=0, exec_id="running")
        await client.until_output("running", b"up")
        before = [found for found in await client.list() if found.exec_id != "running"]
    assert await asyncio.to_thread(agent.stop) == 0
    agent.start()
    async with agent.client() as client:
        found = {found.exec_id: found for found in await client.list()}
        assert found.pop("running").result.ended == RESTARTED
        assert list(found.values()) == before
        assert (await client.read("large")).stdout == bytes(100_000)
        assert (await client.read("running")).stdout == b"up"


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> list[service.ExecService]:
    """Those of the agents of this process, in the order in which they are made."""
    services: list[service.ExecService] = []
    made = service.ExecService.__init__

    def remember(self: service.ExecService, *arguments: Any, **named: Any) -> None:
        services.append(self)
        made(self, *arguments, **named)

    monkeypatch.setattr(service.ExecService, "__init__", remember)
    return services


async def test_no_command_starts_while_the_agent_stops(services: list[service.ExecService]) -> None:
    with short_folder() as folder:
        async with agent_here(folder) as client:
            await client.start(spec(shell="until [ -e go ]; do sleep 0.01; done"), wait=0, exec_id="first")
            await client.start(spec(shell="touch ran"), wait=0, exec_id="second")
            services[0].interrupt()
            (folder / "go").touch()
            first = services[0].find("first")
            await first.done.wait(110)
            assert first.result is not None
            assert services[0].find("second").result is None
        assert not (folder / "ran").exists()
        async with agent_here(folder) as client:
            # It never began, so whoever asked for it may ask again.
            await client.run(spec(shell="touch ran"), "second")
        assert (folder / "ran").exists()


async def test_input_that_is_half_taken_when_the_agent_stops_is_no_fault_of_its_client(
    services: list[service.ExecService],
) -> None:
    """What is on its way behind it goes on behind a hole; a client that reads slowly has not heard of the stop yet."""
    said: asyncio.Queue[exec_service_pb2.AttachRequest] = asyncio.Queue()

    async def requests() -> AsyncIterator[exec_service_pb2.AttachRequest]:
        while True:
            yield await said.get()

    async with agent_here() as client, asyncio.timeout(110):
        command = spec("sh", "-c", "echo ready; exec sleep 1000", stdin_mode=exec_pb2.STDIN_MODE_PIPE, concurrent=True)
        await client.start(command, wait=0, exec_id="deaf")
        deaf = services[0].find("deaf")
        attachment = Attachment(services[0], deaf, services[0].read(deaf, 0, follow=True))
        answers = attachment.responses(requests())
        assert (await anext(answers)).HasField("started")
        assert (await anext(answers)).output.data == b"ready\n"
        for offset in range(0, 8 * BUFFER_BYTES, BUFFER_BYTES // 4):
            chunk = exec_service_pb2.StdinChunk(offset=offset, data=bytes(BUFFER_BYTES // 4))
            said.put_nowait(exec_service_pb2.AttachRequest(stdin=chunk))
        stdin = services[0].stdin_of(deaf)
        while stdin.offset - stdin.written < BUFFER_BYTES:
            await asyncio.sleep(0)
        services[0].interrupt()
        while attachment._hearing is None or not attachment._hearing.done():
            await asyncio.sleep(0)
        with pytest.raises(UnavailableError) as caught:
            async for _ in answers:
                pass
        assert caught.value.reason == "AGENT_STOPPING"
        attachment.close()
