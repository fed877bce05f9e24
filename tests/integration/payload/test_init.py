"""PID 1 of a Pod's container."""

import asyncio
import contextlib
import filecmp
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from orchard.exec.v1 import agent_service_pb2

from tests.integration.exec_agent.conftest import BACKSTOP, Client, await_end, lives, new_id, spec
from tests.integration.payload.conftest import client_of
from tests.support.payload import SANDBOX, STOPPED, Container, children


async def restarts(client: Client) -> int:
    request = agent_service_pb2.GetAgentRequest(sandbox_id=SANDBOX)
    return (await client.agent.GetAgent(request, metadata=client.metadata, timeout=BACKSTOP)).restarts


async def kill_all(client: Client) -> None:
    """A command that kills whatever it may, its agent included, perhaps before that has answered."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        await client.start(spec(shell="kill -9 -1", concurrent=True), wait=0)


async def test_an_agent_that_dies_is_started_again_and_knows_what_ran(
    busybox: Path, run_in: Callable[..., Container]
) -> None:
    container = run_in(busybox)
    done = new_id()
    async with client_of(container) as client:
        assert await restarts(client) == 0
        assert (await client.run(spec(shell="echo once >>/ran"), exec_id=done)).result.exit_code == 0
    for number in (1, 2):
        agent = container.agent()
        os.kill(agent, signal.SIGKILL)
        await_end(agent)
        async with client_of(container) as client:
            assert await restarts(client) == number
            await client.wait(done)
            assert (await client.run(spec("cat", "/ran"))).stdout == b"once\n"
    assert lives(container.init)


async def test_a_command_that_kills_all_it_can_leaves_an_agent_that_answers(
    busybox: Path, run_in: Callable[..., Container]
) -> None:
    container = run_in(busybox)
    async with client_of(container) as client:
        agent = container.agent()
        await kill_all(client)
        await asyncio.to_thread(await_end, agent)
    async with client_of(container) as client:
        assert (await client.run(spec("echo", "unharmed"))).stdout == b"unharmed\n"
        assert await restarts(client) == 1


async def test_orphans_are_reaped(busybox: Path, run_in: Callable[..., Container]) -> None:
    container = run_in(busybox)
    async with client_of(container) as client:
        script = "for i in 1 2 3 4 5; do setsid sh -c 'sh -c true & sleep 0.01 & exec true' & done"
        assert (await client.run(spec(shell=script))).result.exit_code == 0
        await no_zombies(client)
        # Also those that become children of PID 1: here, of an agent that was killed with its launcher.
        agent = container.agent()
        await kill_all(client)
        await asyncio.to_thread(await_end, agent)
    async with client_of(container) as client:
        await no_zombies(client)


async def no_zombies(client: Client) -> None:
    deadline = time.monotonic() + BACKSTOP
    while (left := (await client.run(spec(shell="cat /proc/[0-9]*/stat"))).stdout.count(b") Z ")) > 0:
        assert time.monotonic() < deadline, f"{left} zombies stay"


async def test_sigterm_ends_the_agent_first_and_then_everything(
    busybox: Path, run_in: Callable[..., Container]
) -> None:
    container = run_in(busybox)
    async with client_of(container) as client:
        await client.start(spec(shell="setsid sh -c 'trap \"\" TERM; sleep 1000' & setsid sleep 1000 & wait"), wait=0)
        started = [pid async for pid in until_children(container, 3)]
        assert container.stop() == STOPPED
    for pid in started:
        await_end(pid)
    assert "is started again" not in container.said()


async def until_children(container: Container, count: int):
    """All processes of the container, once there are so many."""
    deadline = time.monotonic() + BACKSTOP
    while True:
        todo, found = [container.init], []
        while todo:
            below = children(todo.pop())
            todo += below
            found += below
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one has ended
            if len([pid for pid in found if b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()]) >= count:
                break
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
    for pid in found:
        yield pid


async def test_an_agent_that_does_not_stop_is_killed(busybox: Path, run_in: Callable[..., Container]) -> None:
    container = run_in(busybox)
    await container.healthy()
    os.kill(container.agent(), signal.SIGSTOP)
    assert container.stop() == STOPPED


async def test_what_runs_inside_cannot_end_the_container(busybox: Path, run_in: Callable[..., Container]) -> None:
    container = run_in(busybox)
    async with client_of(container) as client:
        for name in ("TERM", "INT", "KILL", "STOP", "SEGV"):
            assert (await client.run(spec("kill", f"-{name}", "1"))).result.exit_code == 0
        assert (await client.run(spec("echo", "here"))).stdout == b"here\n"
        assert await restarts(client) == 0


@pytest.mark.parametrize(
    ("files", "named"),
    [({"spec": "!"}, "spec"), ({"public-keys": ""}, "public"), ({"expects-secret-env": "maybe"}, "expects-secret-env")],
)
async def test_a_configuration_that_no_restart_helps_ends_the_container_and_says_why(
    busybox: Path, run_in: Callable[..., Container], files: dict[str, str], named: str
) -> None:
    container = run_in(busybox, files=files)
    assert await asyncio.to_thread(container.process.wait, BACKSTOP) == 78
    assert "orchard agent: " in container.said()
    assert named in container.said()


async def test_the_payload_copies_itself_and_runs_from_the_copy(
    tmp_path: Path, payload: Path, busybox: Path, run_in: Callable[..., Container]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for _ in range(2):  # an init container may be run again
        subprocess.run([payload / "init", "copy", copy], check=True, timeout=BACKSTOP)
    assert_same(payload, copy)
    container = run_in(busybox, payload=copy)
    async with client_of(container) as client:
        assert (await client.run(spec("echo", "copied"))).stdout == b"copied\n"


def assert_same(one: Path, other: Path) -> None:
    compared = filecmp.dircmp(one, other, ignore=[])
    assert (compared.left_only, compared.right_only, compared.funny_files) == ([], [], [])
    _, wrong, errors = filecmp.cmpfiles(one, other, compared.common_files, shallow=False)
    assert (wrong, errors) == ([], [])
    for name in compared.common_files:
        assert (one / name).stat().st_mode == (other / name).stat().st_mode
    for name in compared.common_dirs:
        assert_same(one / name, other / name)


def test_a_copy_that_does_not_fit_says_so(payload: Path) -> None:
    full = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    script = 'mount -t tmpfs -o size=1m none /mnt && exec "$0" copy /mnt'
    done = subprocess.run([*full, script, payload / "init"], capture_output=True, text=True, timeout=BACKSTOP)
    assert done.returncode == 1
    assert done.stderr.startswith("orchard init: copying ")
    assert done.stderr.endswith("No space left on device\n")
