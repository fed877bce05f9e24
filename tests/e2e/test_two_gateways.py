"""Exactly once at scale: many long commands through two gateways that are killed in turn, and clients that are cut off.

Some commands and three rounds by default; `make chaos` makes it 200 and twenty.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import orchard
import pytest

from tests.support.platform import ROOT, PlatformProcess, running_platform
from tests.support.second_gateway import SecondGateway, second_gateway

ROUNDS = int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "3"))
SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "1"))
COMMANDS, SANDBOXES = (200, 10) if ROUNDS > 3 else (24, 4)
PATIENCE = 600
# Writes its start to a file that outlives it, then numbered lines until it is told to stop, and how many there were.
COMMAND = """python3 -c '
import os, sys, time
with open("/root/started-" + sys.argv[1], "a") as file:
    file.write("started\\n")
number = 0
while not os.path.exists("/root/stop"):
    number += 1
    print("line", number, "of", sys.argv[1], flush=True)
    time.sleep(0.2)
print("lines:", number)
' {run}"""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("two-gateways")) as platform:
        yield platform


@pytest.fixture
async def other(platform: PlatformProcess) -> AsyncIterator[SecondGateway]:
    async with second_gateway(platform) as gateway:
        yield gateway


def client_of(platform: PlatformProcess, endpoint: str) -> orchard.AsyncSandboxClient:
    return orchard.AsyncSandboxClient(endpoint=endpoint, api_key=platform.api_key, retry_timeout=PATIENCE)


async def output_of(sandbox: orchard.AsyncSandbox, run: str) -> bytes:
    """All that one long command writes; it must end by itself."""
    stream = sandbox.exec_stream(COMMAND.format(run=run), exec_id=run, concurrent=True, timeout=3600)
    output = b"".join([chunk.data async for chunk in stream])
    assert (stream.result.ended, stream.result.exit_code) == ("exited", 0), stream.result
    return output


def is_whole(output: bytes, run: str) -> bool:
    """Whether every line is there, once and in order."""
    lines = output.decode().splitlines()
    return lines == [f"line {number} of {run}" for number in range(1, len(lines))] + [f"lines: {len(lines) - 1}"]


@pytest.mark.chaos
@pytest.mark.timeout(3600)
async def test_gateways_die_in_turn(platform: PlatformProcess, other: SecondGateway) -> None:
    rng = random.Random(f"{SEED} two gateways")
    async with AsyncExitStack() as stack:
        endpoints = (platform.endpoint, other.endpoint)
        clients = [await stack.enter_async_context(client_of(platform, endpoint)) for endpoint in endpoints]
        sandboxes = [await clients[0].create() for _ in range(SANDBOXES)]
        runs = [f"run-{number}-{secrets.token_hex(4)}" for number in range(COMMANDS)]
        # Each through one of the gateways; those of a sandbox through both.
        places = {run: (clients[n % 2], sandboxes[n // 2 % SANDBOXES].sandbox_id) for n, run in enumerate(runs)}
        waiting = {
            run: asyncio.ensure_future(output_of(client.attach(sandbox_id), run))
            for run, (client, sandbox_id) in places.items()
        }
        for _ in range(ROUNDS):
            await asyncio.sleep(rng.uniform(0.2, 1.0))  # wherever the seed says
            killed = platform.kill_service("gateway")
            await asyncio.to_thread(platform.wait_ready, "gateway", not_pid=killed)
            await asyncio.sleep(rng.uniform(0.2, 1.0))
            await other.kill()
        assert not any(task.done() for task in waiting.values()), "one ended before it was told to"
        await asyncio.gather(*(sandbox.exec("touch /root/stop", concurrent=True) for sandbox in sandboxes))
        for run, task in waiting.items():
            output = await task
            assert is_whole(output, run), output[-200:]
        for sandbox in sandboxes:
            own = [run for run, (_, sandbox_id) in places.items() if sandbox_id == sandbox.sandbox_id]
            for run in own:
                assert await sandbox.read_text(f"/root/started-{run}") == "started\n"
            await sandbox.delete()


async def test_another_process_takes_up_what_a_dead_client_began(
    platform: PlatformProcess, other: SecondGateway
) -> None:
    """By the exec id alone, through the other gateway, from the first byte on."""
    run = f"run-{secrets.token_hex(4)}"
    async with client_of(platform, platform.endpoint) as client, await client.create() as sandbox:
        program = (
            "import orchard, sys; client = orchard.SandboxClient(sys.argv[1]); "
            "stream = client.attach(sys.argv[2]).exec_stream(sys.argv[3], exec_id=sys.argv[4], concurrent=True)\n"
            "for chunk in stream: print(len(chunk.data), flush=True)"
        )
        arguments = (platform.endpoint, sandbox.sandbox_id, COMMAND.format(run=run), run)
        begun = subprocess.Popen(
            (sys.executable, "-c", program, *arguments),
            cwd=ROOT,
            env={**platform.client_environment(), "ORCHARD_API_KEY": platform.api_key},
            stdout=subprocess.PIPE,
        )
        assert begun.stdout is not None
        assert await asyncio.to_thread(begun.stdout.readline), "it never saw any output"
        begun.kill()
        begun.wait()
        begun.stdout.close()
        async with client_of(platform, other.endpoint) as second:
            process = second.attach(sandbox.sandbox_id).process(run)
            await sandbox.exec("touch /root/stop", concurrent=True)
            output = b"".join([chunk.data async for chunk in process.output()])
            result = await process.wait()
        assert (result.ended, result.exit_code) == ("exited", 0)
        assert is_whole(output, run), output[-200:]
        assert await sandbox.read_text(f"/root/started-{run}") == "started\n"
