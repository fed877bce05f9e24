"""Calls that are under way while a gateway is told to stop, as in a rolling update."""

import asyncio
import contextlib
import hashlib
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import orchard
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orchard.admin.v1 import version_service_pb2
from orchard.exec.v1 import file_service_pb2
from orchard.sandbox.v1 import sandbox_pb2

from tests.support.health import NOT_SERVING, SERVING
from tests.support.platform import PlatformProcess, running_platform
from tests.support.wire import Wire, details, reason_of

BACKSTOP = 110
# Longer than a stopping gateway lets calls go on, and a busy machine needs to tell it to stop.
LONG_SECONDS = 25


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("graceful")) as platform:
        yield platform


@pytest.fixture
async def client(platform: PlatformProcess) -> AsyncIterator[orchard.AsyncSandboxClient]:
    async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client:
        yield client


@contextlib.asynccontextmanager
async def stopping_gateway(platform: PlatformProcess) -> AsyncIterator[None]:
    """The gateway has begun to stop in order; its successor serves at the end."""
    async with grpc.aio.insecure_channel(platform.endpoint) as channel:
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == SERVING
        stopped = platform.kill_service("gateway", signal.SIGTERM)
        while (await health.read()).status != NOT_SERVING:
            pass
        yield
    await asyncio.to_thread(platform.wait_ready, "gateway", not_pid=stopped)


def counted(run: str, rest: str) -> str:
    """A command that leaves a line for every time that it ran."""
    return f"echo ran >> /root/{run}; {rest}; echo end of {run}"


async def ran_once(wire: Wire, sandbox_id: str, *runs: str) -> None:
    for run in runs:
        assert await wire.output(sandbox_id, f"cat /root/{run}") == b"ran\n"


async def reached(wire: Wire) -> None:
    """What was sent before this on the same connection has reached the gateway."""
    await wire.call(wire.version.GetVersion, version_service_pb2.GetVersionRequest())


async def test_calls_that_end_soon_are_answered(platform: PlatformProcess, wire: Wire) -> None:
    name, new = await wire.ready(), f"g-{secrets.token_hex(5)}"
    stopping = asyncio.Event()

    async def pieces() -> AsyncIterator[file_service_pb2.WriteFileRequest]:
        request = file_service_pb2.WriteFileRequest
        yield request(sandbox_id=name, start=file_service_pb2.WriteFileStart(path="/root/written"))
        yield request(data=b"before, ")
        await stopping.wait()
        yield request(data=b"after")
        yield request(end=True)

    with platform.paused("valkey"):
        creating = asyncio.ensure_future(wire.create(new, labels={"made": "once"}))
        writing = asyncio.ensure_future(drained(wire.files.WriteFile(pieces(), metadata=wire.metadata)))
        running = asyncio.ensure_future(wire.run(name, counted("short", "sleep 1"), exec_id="short"))
        await reached(wire)
        stop = stopping_gateway(platform)
        await stop.__aenter__()
    stopping.set()
    answer = await running
    assert (answer.exec.result.exit_code, answer.output_complete) == (0, True)
    assert b"".join(chunk.data for chunk in answer.output) == b"end of short\n"
    assert (await writing).size == len("before, after")
    assert (await creating).sandbox_id == new
    await stop.__aexit__(None, None, None)
    await ran_once(wire, name, "short")
    assert await wire.output(name, "cat /root/written") == b"before, after"
    assert (await wire.wait(new))[-1].state == sandbox_pb2.SANDBOX_STATE_READY
    for one in (name, new):
        await wire.delete(one)


async def drained(call: Any) -> Any:
    return await call


async def test_a_call_that_is_cut_says_so_and_is_taken_up_again(platform: PlatformProcess, wire: Wire) -> None:
    name = await wire.ready()
    command = {"shell": counted("long", f"sleep {LONG_SECONDS}"), "exec_id": "long"}
    running = asyncio.ensure_future(wire.run(name, **command))
    await reached(wire)
    async with stopping_gateway(platform):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert reason_of(caught.value) == "SERVER_STOPPING"
    assert details(caught.value)[error_details_pb2.RetryInfo]
    answer = await wire.run(name, **command)
    assert (answer.exec.result.exit_code, answer.output_complete) == (0, True)
    assert b"".join(chunk.data for chunk in answer.output) == b"end of long\n"
    await ran_once(wire, name, "long")
    await wire.delete(name)


async def test_the_client_notices_nothing(
    platform: PlatformProcess, wire: Wire, client: orchard.AsyncSandboxClient, tmp_path: Path
) -> None:
    sandbox, doomed = await client.create(), await client.create()
    source = tmp_path / "source"
    source.write_bytes(os.urandom(20 << 20))
    runs = {f"run{number}": seconds for number, seconds in enumerate((0, 0.5, 1, 2, 4, 6, 8, LONG_SECONDS))}
    commands = [
        asyncio.ensure_future(sandbox.exec(counted(run, f"sleep {seconds}"), concurrent=True))
        for run, seconds in runs.items()
    ]
    others = [
        asyncio.ensure_future(client.create(labels={"made": "once"})),
        asyncio.ensure_future(sandbox.upload(source, "/root/file")),
        asyncio.ensure_future(doomed.delete()),
    ]
    async with stopping_gateway(platform):
        late = asyncio.ensure_future(client.create(labels={"made": "once"}))
        results = await asyncio.gather(*commands)
        await asyncio.gather(*others)
    assert [result.stdout for result in results] == [f"end of {run}\n" for run in runs]
    await ran_once(wire, sandbox.sandbox_id, *runs)
    summed = await sandbox.exec("sha256sum < /root/file", check=True)
    assert summed.stdout.split()[0] == hashlib.sha256(source.read_bytes()).hexdigest()
    made = {others[0].result().sandbox_id, (await late).sandbox_id}
    assert {found.sandbox_id async for found in client.list(labels={"made": "once"})} == made
    assert (await doomed.wait_ended(BACKSTOP)).reason == "REQUESTED"
