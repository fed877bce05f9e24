"""Parts that are away or stand still: health says so, what lives goes on, and nothing has to be mended afterwards."""

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import grpc.aio
import orchard
import pytest
from google.rpc import error_details_pb2
from orchard.sandbox.v1 import sandbox_pb2

from services.common.health import READY
from services.gateway.app import JUDGE_NAMES, TRAJECTORY_NAMES
from services.gateway.app import SERVICE_NAMES as GATEWAY_NAMES
from services.judge.app import SERVICE_NAMES as JUDGE_SERVICE_NAMES
from services.scheduler.app import SERVICE_NAMES as SCHEDULER_NAMES
from services.trajectories.app import SERVICE_NAMES as TRAJECTORIES_NAMES
from services.watcher.app import SERVICE_NAMES as WATCHER_NAMES
from tests.support.health import NOT_SERVING, SERVING, check, wait_health
from tests.support.platform import PlatformProcess, running_platform
from tests.support.wire import Wire, details, reason_of, wire_to

NAMES = {
    "gateway": (*GATEWAY_NAMES, *TRAJECTORY_NAMES, *JUDGE_NAMES),
    "judge": JUDGE_SERVICE_NAMES,
    "trajectories": TRAJECTORIES_NAMES,
    "scheduler": SCHEDULER_NAMES,
    "watcher": WATCHER_NAMES,
    "node": (),
}
# Who cannot do its work without what.
DEPENDENTS = {
    "postgres": {"gateway", "judge", "trajectories"},
    "valkey": {"scheduler"},
    "watcher": {"gateway", "scheduler"},
    "node": {"watcher", "gateway", "scheduler"},
}
# Longer than a silent stream passes for a live one (15 s) and than a record may be without a sandbox (20 s).
LONG_SECONDS = 26


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("outages")) as platform:
        yield platform


@pytest.fixture
async def client(platform: PlatformProcess) -> AsyncIterator[orchard.AsyncSandboxClient]:
    async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client:
        yield client


async def all_serve(platform: PlatformProcess) -> None:
    await asyncio.gather(*(wait_health(platform.address(service), SERVING) for service in NAMES))


async def dependents_say_so(platform: PlatformProcess, dependency: str) -> None:
    """Exactly the services that need it are NOT_SERVING, under every name."""
    affected = DEPENDENTS[dependency]
    await asyncio.gather(*(wait_health(platform.address(service), NOT_SERVING) for service in affected))
    for service in NAMES.keys() - {dependency}:
        expected = NOT_SERVING if service in affected else SERVING
        told = {name: await check(platform.address(service), name) for name in ("", *NAMES[service])}
        assert told == dict.fromkeys(told, expected), service


@pytest.mark.parametrize("dependency", DEPENDENTS)
async def test_health_says_that_a_dependency_is_down(platform: PlatformProcess, dependency: str) -> None:
    await all_serve(platform)
    with platform.held_down(dependency):
        await dependents_say_so(platform, dependency)
        # Balancers keep a gateway that can route; there is none that has what this one lacks.
        assert await check(platform.address("gateway"), READY) == SERVING
    await all_serve(platform)


@pytest.mark.parametrize("dependency", ["postgres", "valkey", "node"])
async def test_health_says_that_a_dependency_stands_still(platform: PlatformProcess, dependency: str) -> None:
    await all_serve(platform)
    with platform.paused(dependency):
        await dependents_say_so(platform, dependency)
    await all_serve(platform)


async def test_a_watcher_that_stands_still_ends_nothing(
    platform: PlatformProcess, client: orchard.AsyncSandboxClient, wire: Wire
) -> None:
    """Longer than anybody's patience: what lives is left alone, and what is asked for meanwhile comes later."""
    kept, doomed = await client.create(), await client.create()
    uid = (await kept.refresh()).uid
    with platform.paused("watcher"):
        command = asyncio.ensure_future(kept.exec(f"sleep {LONG_SECONDS}; echo whole", concurrent=True))
        creating = asyncio.ensure_future(client.create())
        await doomed.delete()
        assert (await kept.exec("echo first")).stdout == "first\n"
        await dependents_say_so(platform, "watcher")
        assert (await kept.exec("echo second")).stdout == "second\n"
        assert (await kept.refresh()).state is orchard.SandboxState.READY
        # Nobody can tell the gateway of this one: that is no reason to call it missing.
        unseen = await wire.create()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wire.run(unseen.sandbox_id, "true")
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "SANDBOXES_UNSEEN")
        assert (await command).stdout == "whole\n"
        assert not creating.done()
        assert (await wire.get(unseen.sandbox_id)).state == sandbox_pb2.SANDBOX_STATE_STARTING
    async with await creating as created:
        assert (await created.exec("echo third")).stdout == "third\n"
    assert (await wire.wait(unseen.sandbox_id))[-1].state == sandbox_pb2.SANDBOX_STATE_READY
    await wire.delete(unseen.sandbox_id)
    await all_serve(platform)
    ended = await doomed.wait_ended(110)
    assert (ended.state, ended.reason) == (orchard.SandboxState.DELETED, "REQUESTED")
    found = await kept.refresh()
    assert (found.state, found.uid) == (orchard.SandboxState.READY, uid)
    assert (await kept.exec("echo last")).stdout == "last\n"
    await kept.delete()


def stores_paused(platform: PlatformProcess) -> AbstractContextManager[None]:
    return platform.paused("valkey", "postgres")


def stores_down(platform: PlatformProcess) -> AbstractContextManager[None]:
    return platform.held_down("valkey", "postgres")


@pytest.mark.parametrize("away", [stores_paused, stores_down])
async def test_commands_and_files_need_no_store(
    platform: PlatformProcess,
    client: orchard.AsyncSandboxClient,
    wire: Wire,
    tmp_path: Path,
    away: Callable[[PlatformProcess], AbstractContextManager[None]],
) -> None:
    sandbox = await client.create()
    uid = (await sandbox.refresh()).uid
    source = tmp_path / "source"
    source.write_bytes(os.urandom(3 << 20))
    running = asyncio.ensure_future(
        sandbox.exec("until [ -e /root/go ]; do sleep 0.05; done; echo went", concurrent=True)
    )
    with away(platform):
        await asyncio.gather(
            wait_health(platform.address("gateway"), NOT_SERVING),
            wait_health(platform.address("scheduler"), NOT_SERVING),
        )
        # A connection of its own, as another process with the same key would have.
        async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as other:
            await move_and_run(other.attach(sandbox.sandbox_id), source, tmp_path / "back")
        assert (await running).stdout == "went\n"
        await creates_are_put_off(wire)
        creating = asyncio.ensure_future(client.create(labels={"made": "later"}))
        await creates_are_put_off(wire)
        await nobody_is_refused_for_want_of_a_store(platform)
        assert not creating.done()
    async with await creating as created:
        assert (await created.exec("echo here")).stdout == "here\n"
    assert (await sandbox.refresh()).uid == uid
    await all_serve(platform)
    await sandbox.delete()


async def move_and_run(sandbox: orchard.AsyncSandbox, source: Path, back: Path) -> None:
    await sandbox.upload(source, "/root/file")
    summed = await sandbox.exec("sha256sum < /root/file | cut -d' ' -f1", check=True)
    assert summed.stdout.strip() == hashlib.sha256(source.read_bytes()).hexdigest()
    await sandbox.download("/root/file", back)
    assert back.read_bytes() == source.read_bytes()
    streamed = [chunk.text async for chunk in sandbox.exec_stream("touch /root/go; cat", input="streamed")]
    assert "".join(streamed) == "streamed"


async def creates_are_put_off(wire: Wire) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.create(f"never-{secrets.token_hex(4)}")
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert reason_of(caught.value) == "LEASE_STORE_UNAVAILABLE"
    (retry,) = details(caught.value)[error_details_pb2.RetryInfo]
    assert retry.retry_delay.ToMilliseconds() > 0


async def nobody_is_refused_for_want_of_a_store(platform: PlatformProcess) -> None:
    """A key that cannot be looked up may be good."""
    async with wire_to(platform.endpoint, "ork_0123456789ab_unknown") as stranger:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stranger.get("any")
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
