"""Creates that were accepted and then lost with the lease store, before anything was made of them."""

import asyncio
import contextlib
import secrets
import signal
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import orchard
import pytest
import redis.asyncio as redis
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2

from tests.support.platform import PlatformProcess, running_platform
from tests.support.wire import Wire, reason_of

QUEUED = sandbox_pb2.SANDBOX_STATE_QUEUED
BACKSTOP = 110


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    # One start at a time: what comes behind a start that hangs stays in the queue.
    environment = {"ORCHARD_STARTS_IN_FLIGHT": "1"}
    with running_platform(tmp_path_factory.mktemp("lost-queue"), environment=environment) as platform:
        yield platform


@pytest.fixture
async def client(platform: PlatformProcess) -> AsyncIterator[orchard.AsyncSandboxClient]:
    async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client:
        yield client


def unique() -> str:
    return f"q-{secrets.token_hex(5)}"


async def accepted(wire: Wire, sandbox_id: str, state: int = QUEUED) -> sandbox_pb2.Sandbox:
    """Wait until a create has come that far."""
    async with asyncio.timeout(BACKSTOP):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                found = await wire.get(sandbox_id)
                if found.state == state:
                    return found


@contextlib.asynccontextmanager
async def stuck_queue(platform: PlatformProcess, wire: Wire) -> AsyncIterator[str]:
    """The runtime stands still over one create, which is given, and so every other stays QUEUED."""
    # The scheduler's connection is open: one that cannot be opened would put starts off, and they would take turns.
    await wire.delete(await wire.ready())
    platform.kill_service("node", signal.SIGSTOP)
    try:
        first = await wire.create(unique())
        await accepted(wire, first.sandbox_id, sandbox_pb2.SANDBOX_STATE_STARTING)
        yield first.sandbox_id
    finally:
        platform.kill_service("node", signal.SIGCONT)
    # Not even that one is lost, whatever became of the store: its start was under way.
    ready = await accepted(wire, first.sandbox_id, sandbox_pb2.SANDBOX_STATE_READY)
    assert (ready.request_id, ready.create_time) == (first.request_id, first.create_time)
    await wire.delete(first.sandbox_id)


async def empty_the_store(platform: PlatformProcess) -> None:
    async with redis.Redis.from_url(f"unix://{platform.run}/valkey.sock") as store:
        await store.flushall()


async def test_a_wait_says_that_the_queue_was_lost(platform: PlatformProcess, wire: Wire) -> None:
    async with stuck_queue(platform, wire):
        name, request_id = unique(), unique()
        created = await wire.create(name, request_id=request_id)
        assert created.state == QUEUED
        told: asyncio.Queue[sandbox_pb2.Sandbox] = asyncio.Queue()

        async def wait() -> None:
            request = sandbox_service_pb2.WaitSandboxRequest(sandbox_id=name)
            async for response in wire.sandboxes.WaitSandbox(request, metadata=wire.metadata, timeout=BACKSTOP):
                told.put_nowait(response.sandbox)

        waiting = asyncio.ensure_future(wait())
        assert (await asyncio.wait_for(told.get(), BACKSTOP)).state == QUEUED
        await empty_the_store(platform)
        await waiting
        end = told.get_nowait()
        assert told.empty()
        assert (end.state, end.reason) == (sandbox_pb2.SANDBOX_STATE_FAILED, sandbox_pb2.SANDBOX_REASON_QUEUE_LOST)
        assert "repeat it under the same request id" in end.message
        again = await wire.create(name, request_id=request_id)
        assert (again.state, again.sandbox_id) == (QUEUED, name)
    assert (await wire.wait(name))[-1].request_id == request_id
    await wire.delete(name)


async def accepted_again(wire: Wire, lost: sandbox_pb2.Sandbox) -> None:
    """Wait until a create that was lost is there anew."""
    async with asyncio.timeout(BACKSTOP):
        while True:
            try:
                found = await wire.get(lost.sandbox_id)
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.NOT_FOUND
            else:
                if found.create_time != lost.create_time:
                    assert (found.state, found.request_id) == (QUEUED, lost.request_id)
                    return


async def test_the_client_asks_again_while_it_waits(
    platform: PlatformProcess, wire: Wire, client: orchard.AsyncSandboxClient
) -> None:
    name = unique()
    async with stuck_queue(platform, wire):
        creating = asyncio.ensure_future(client.create(sandbox_id=name, labels={"lost": "once"}))
        lost = await accepted(wire, name)
        await empty_the_store(platform)
        await accepted_again(wire, lost)
    async with await creating as sandbox:
        assert (sandbox.info.labels, sandbox.info.request_id) == ({"lost": "once"}, lost.request_id)
        assert (await sandbox.exec("echo here")).stdout == "here\n"
    assert (await sandbox.refresh()).reason == "REQUESTED"


async def test_the_client_asks_again_when_it_waits_later(
    platform: PlatformProcess, wire: Wire, client: orchard.AsyncSandboxClient
) -> None:
    """Nobody waited when it was lost, so that nobody could be told."""
    async with stuck_queue(platform, wire):
        sandbox = await client.create(wait=False)
        kept = await client.create(wait=False, detach=True)
        lost = await wire.get(sandbox.sandbox_id)
        assert lost.state == QUEUED
        await empty_the_store(platform)
        waiting = [asyncio.ensure_future(one.wait_ready()) for one in (sandbox, kept)]
        await accepted_again(wire, lost)
    ready, _ = await asyncio.gather(*waiting)
    assert (ready.state, ready.request_id) == (orchard.SandboxState.READY, lost.request_id)
    await client.close()
    # What was to be deleted with the client still is, and what was not is not.
    assert (await wire.wait(ready.sandbox_id, until_terminal=True))[-1].state == sandbox_pb2.SANDBOX_STATE_DELETED
    assert (await wire.get(kept.sandbox_id)).state == sandbox_pb2.SANDBOX_STATE_READY
    await wire.delete(kept.sandbox_id)


async def test_one_that_was_deleted_is_not_made_again(
    platform: PlatformProcess, wire: Wire, client: orchard.AsyncSandboxClient
) -> None:
    async with stuck_queue(platform, wire):
        sandbox = await client.create(wait=False)
        await sandbox.delete()
        await empty_the_store(platform)
        with pytest.raises(orchard.SandboxNotFound):
            await sandbox.wait_ready()


async def test_what_the_runtime_is_making_is_not_forgotten(platform: PlatformProcess, wire: Wire) -> None:
    """Nobody is told that it is not there: a client would believe it, and leave it behind."""
    async with stuck_queue(platform, wire) as first:
        await empty_the_store(platform)
        for attempt in (wire.get(first), wire.delete(first), wire.wait(first)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await attempt
            assert (caught.value.code(), reason_of(caught.value)) == (
                grpc.StatusCode.UNAVAILABLE,
                "LEASE_STORE_REBUILDING",
            )
