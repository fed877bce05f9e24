"""kill -9 of each part under load: nothing that should live dies, no command runs twice, no byte is lost.

Three rounds each by default; `make chaos` makes it twenty, in an order that its seed gives.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import secrets
from collections.abc import AsyncIterator, Iterator

import orchard
import pytest
import redis.asyncio as redis
from orchard._client.trajectories.recording import status_after

from tests.support.platform import SERVICES, PlatformProcess, running_platform

ROUNDS = int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "3"))
SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "1"))
# Writes its start to a file that outlives it, then numbered lines for about two seconds.
COMMAND = (
    "echo started >> /root/{run}; i=0; while [ $i -lt 2000 ]; do i=$((i+1)); echo line $i of {run}; "
    "[ $((i % 100)) = 0 ] && sleep 0.1; done; true"
)


def expected(run: str) -> bytes:
    return b"".join(b"line %d of %s\n" % (number, run.encode()) for number in range(1, 2001))


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("kills")) as platform:
        yield platform


@pytest.fixture
async def client(platform: PlatformProcess) -> AsyncIterator[orchard.AsyncSandboxClient]:
    async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client:
        yield client


async def run_once(sandbox: orchard.AsyncSandbox) -> None:
    """One command whose output must come whole, and which must have run once."""
    run = secrets.token_hex(4)
    stream = sandbox.exec_stream(COMMAND.format(run=run))
    output = b"".join([chunk.data async for chunk in stream])
    assert stream.result.exit_code == 0, stream.result
    assert hashlib.sha256(output).digest() == hashlib.sha256(expected(run)).digest(), output[-200:]
    assert (await sandbox.exec(f"cat /root/{run}")).stdout == "started\n"


async def kill(platform: PlatformProcess, service: str) -> None:
    killed = platform.kill_service(service)
    await asyncio.to_thread(platform.wait_ready, service, not_pid=killed)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("service", SERVICES)
async def test_kill_under_load(platform: PlatformProcess, client: orchard.AsyncSandboxClient, service: str) -> None:
    rng = random.Random(SEED)
    sandboxes = [await client.create(labels={"victim": service}) for _ in range(4)]
    uids = {sandbox.sandbox_id: (await sandbox.refresh()).uid for sandbox in sandboxes}
    for _ in range(ROUNDS):
        commands = [asyncio.ensure_future(run_once(sandbox)) for sandbox in sandboxes]
        await asyncio.sleep(rng.uniform(0.2, 1.0))  # somewhere in the middle, wherever the seed says
        await kill(platform, service)
        creates = [asyncio.ensure_future(client.create(labels={"victim": service})) for _ in range(3)]
        await asyncio.gather(*commands)
        for created in await asyncio.gather(*creates):
            assert (await created.exec("echo new")).stdout == "new\n"
            await created.delete()
    for sandbox in sandboxes:
        found = await sandbox.refresh()
        assert (found.state, found.uid) == (orchard.SandboxState.READY, uids[sandbox.sandbox_id])
        await sandbox.delete()


@pytest.mark.chaos
@pytest.mark.timeout(3600)
async def test_everything_in_turn_while_creates_go_on(
    platform: PlatformProcess, client: orchard.AsyncSandboxClient
) -> None:
    rng = random.Random(SEED)
    steady = [await client.create() for _ in range(3)]
    done = asyncio.Event()
    lives = 0

    async def live() -> None:
        nonlocal lives
        while not done.is_set():
            async with await client.create() as sandbox:
                token = secrets.token_hex(4)
                assert (await sandbox.exec(f"echo {token}")).stdout == f"{token}\n"
                lives += 1

    lifecycles = [asyncio.ensure_future(live()) for _ in range(3)]
    for _ in range(ROUNDS):
        commands = [asyncio.ensure_future(run_once(sandbox)) for sandbox in steady]
        await kill(platform, rng.choice(SERVICES))
        await asyncio.gather(*commands)
    done.set()
    await asyncio.gather(*lifecycles)
    assert lives >= 3
    for sandbox in steady:
        await sandbox.delete()


async def test_an_emptied_lease_store_loses_no_sandbox(
    platform: PlatformProcess, client: orchard.AsyncSandboxClient
) -> None:
    request = {"sandbox_id": f"flush-{secrets.token_hex(4)}", "labels": {"kept": "yes"}, "ttl": 900}
    sandbox = await client.create(**request)
    before = await sandbox.refresh()
    command = asyncio.ensure_future(run_once(sandbox))
    async with redis.Redis.from_url(f"unix://{platform.run}/valkey.sock") as store:
        assert await store.dbsize() > 0
        await store.flushall()
    after = await sandbox.refresh()
    assert (after.uid, after.state, after.labels) == (before.uid, before.state, before.labels)
    # Never shorter than it was promised.
    assert abs((after.expire_time - before.expire_time).total_seconds()) < 1
    await command
    assert sandbox.sandbox_id in [found.sandbox_id async for found in client.list(labels={"kept": "yes"})]
    with pytest.raises(orchard.AlreadyExists):
        await client.create(**request)
    await sandbox.delete()


async def test_a_write_to_a_command_that_the_agent_took_along_says_whose_doing_it_was(
    client: orchard.AsyncSandboxClient,
) -> None:
    async with await client.create() as sandbox:
        process = await sandbox.start("cat", stdin=True, concurrent=True)
        await process.write(b"taken")
        with pytest.raises(orchard.CommandInterrupted):
            await sandbox.exec("kill -9 -1; sleep 60", concurrent=True)
        with pytest.raises(orchard.CommandInterrupted) as caught:
            await process.write(b"more")
        assert caught.value.reason == "AGENT_RESTARTED"
        assert status_after(caught.value)[0] is orchard.TrajectoryStatus.ABORTED
        await process.close_stdin()
        with pytest.raises(orchard.CommandInterrupted):
            await process.wait()


@pytest.mark.parametrize("size", [3, 1 << 20])
async def test_a_command_that_waited_for_another_runs_once_the_agent_is_back(
    client: orchard.AsyncSandboxClient, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    # As one that has waited for longer than its first call.
    monkeypatch.setattr("orchard._client.execs.INLINE_WAIT_SECONDS", 0.0)
    async with await client.create() as sandbox:
        first = asyncio.ensure_future(sandbox.exec("touch /root/first; sleep 600"))
        while not await sandbox.exists("/root/first"):
            await asyncio.sleep(0.02)
        command = "wc -c >> /root/second; cat /root/second"
        second = asyncio.ensure_future(sandbox.exec(command, exec_id="second", input=bytes(size)))
        while "second" not in {one.exec_id for one in await sandbox.list_execs()}:
            await asyncio.sleep(0.02)
        with pytest.raises(orchard.CommandInterrupted):
            await sandbox.exec("kill -9 -1; sleep 60", concurrent=True)
        with pytest.raises(orchard.CommandInterrupted):
            await first
        assert (await second).stdout == f"{size}\n"


async def test_what_waits_in_the_queue_goes_on_with_its_input_once_the_agent_is_back(
    client: orchard.AsyncSandboxClient,
) -> None:
    async with await client.create() as sandbox:
        first = await sandbox.start("sleep 600", concurrent=False)
        mark = "echo {0} >> /root/ran; "
        waiting = {
            "plain": await sandbox.start(mark.format("plain") + "printf out", concurrent=False),
            "env": await sandbox.start(mark.format("env") + "printf %s $A", concurrent=False, env={"A": "own"}),
            "fed": await sandbox.start(mark.format("fed") + "cat", concurrent=False, stdin=True),
            "closed": await sandbox.start(mark.format("closed") + "cat", concurrent=False, stdin=True),
        }
        await waiting["fed"].write(b"before ")
        await waiting["closed"].write(b"all")
        await waiting["closed"].close_stdin()
        waits = {name: asyncio.ensure_future(process.wait()) for name, process in waiting.items()}
        with pytest.raises(orchard.CommandInterrupted):
            await sandbox.exec("kill -9 -1; sleep 60", concurrent=True)
        await waiting["fed"].write(b"after")
        await waiting["fed"].close_stdin()
        outputs = {name: (await wait).stdout for name, wait in waits.items()}
        assert outputs == {"plain": "out", "env": "own", "fed": "before after", "closed": "all"}
        assert (await sandbox.read_text("/root/ran")).split() == list(waiting)
        with pytest.raises(orchard.CommandInterrupted):
            await first.wait()


async def test_a_patch_is_applied_though_its_agent_is_killed(client: orchard.AsyncSandboxClient) -> None:
    rng, names = random.Random(SEED), [f"d{number}/f" for number in range(100)]
    section = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-{1}\n+{2}\n"
    async with await client.create() as sandbox:
        await sandbox.exec("mkdir /root/tree; cd /root/tree; for i in $(seq 0 99); do mkdir d$i; echo 0 > d$i/f; done")
        for number in range(5):
            diff = "".join(section.format(name, number, number + 1) for name in names)
            patch = asyncio.ensure_future(sandbox.apply_patch(diff, path="/root/tree"))
            await asyncio.sleep(rng.uniform(0.0, 0.1))  # the moment of the kill is what varies
            with pytest.raises(orchard.CommandInterrupted):
                await sandbox.exec("kill -9 -1; sleep 60", concurrent=True)
            assert (await patch).applied
            found = await sandbox.exec("cd /root/tree; cat */f | sort | uniq -c; find . -type f | wc -l")
            assert found.stdout.split() == ["100", str(number + 1), "100"]


async def test_the_agent_killed_from_inside_comes_back(client: orchard.AsyncSandboxClient) -> None:
    async with await client.create() as sandbox:
        # What the platform did to a command is an error, never a result that could be scored.
        with pytest.raises(orchard.CommandInterrupted) as caught:
            await sandbox.exec("kill -9 -1; sleep 60")
        assert caught.value.reason == "AGENT_RESTARTED"
        assert (await sandbox.exec("echo back")).stdout == "back\n"
