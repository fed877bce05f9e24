"""Sandboxes end with their owner, in every way in which an owner can end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Callable
from typing import IO

import orchard
import pytest
from orchard import AsyncSandboxClient, SandboxClient, SandboxState

from tests.support.platform import PlatformProcess

Program = Callable[..., "subprocess.Popen[str]"]


def line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def gone(client: SandboxClient, sandbox_id: str) -> bool:
    return client.attach(sandbox_id).wait_ended(110).state is SandboxState.DELETED


def test_create_takes_every_option(client: SandboxClient) -> None:
    with client.create(
        sandbox_id="all-options",
        env={"COLOUR": "red"},
        secret_env={"TOKEN": "hidden"},
        labels={"kind": "options"},
        working_directory="/tmp",
        ttl=3600,
        idle_timeout=1800,
        start_argv=["sh", "-c", "echo started"],
        network="none",
        priority=3,
    ) as sandbox:
        assert sandbox.info.state is SandboxState.READY
        assert sandbox.exec("echo $COLOUR $TOKEN; pwd").stdout == "red hidden\n/tmp\n"
        info = sandbox.refresh()
        assert (info.labels, info.env) == ({"kind": "options"}, {"COLOUR": "red"})
        assert sandbox.process("start").wait(110).stdout == "started\n"
        assert [found.sandbox_id for found in client.list(labels={"kind": "options"})] == ["all-options"]
        with pytest.raises(orchard.AlreadyExists):
            client.create(sandbox_id="all-options")
        # The failed create did not undo what was not its own.
        assert sandbox.exec("echo alive").stdout == "alive\n"
    assert gone(client, "all-options")


@pytest.mark.parametrize(
    ("image", "options", "error"),
    [
        ("never-imported", {}, orchard.ImageNotFound),
        (None, {"sandbox_id": "all"}, orchard.InvalidArgument),
        (None, {"sandbox_id": "Upper"}, orchard.InvalidArgument),
        (None, {"memory": "much"}, orchard.InvalidArgument),
        (None, {"network": "wild"}, orchard.InvalidArgument),
        (None, {"ttl": -1}, orchard.InvalidArgument),
        (None, {"env": {"A": 1}}, orchard.InvalidArgument),
    ],
)
def test_create_refuses_bad_input(
    client: SandboxClient, image: str | None, options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.create(image, **options)  # type: ignore[arg-type]


async def test_the_client_deletes_what_it_made_when_it_is_closed(
    platform: PlatformProcess, client: SandboxClient
) -> None:
    async with AsyncSandboxClient(platform.endpoint, api_key=platform.api_key) as own:
        kept = await own.create(detach=True)
        made = await own.create()
        attached = own.attach(kept.sandbox_id)
        async with attached:
            assert (await attached.exec("echo hi")).ok
    assert await asyncio.to_thread(gone, client, made.sandbox_id)
    assert client.get(kept.sandbox_id).info.state is SandboxState.READY
    client.delete(kept.sandbox_id)
    with pytest.raises(orchard.ClientClosed):
        await own.version()


async def test_cancelling_a_create_leaves_nothing(aclient: AsyncSandboxClient) -> None:
    for step in range(6):
        task = asyncio.ensure_future(_create(aclient))
        for _ in range(step * 3):
            await asyncio.sleep(0)
        if step > 3:
            await asyncio.sleep(0.005 * step)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await task).delete()  # it was quicker
    living = [info async for info in aclient.list(labels={"test": "cancelled-create"})]
    assert [info for info in living if info.state not in (SandboxState.DELETING, SandboxState.DELETED)] == []


async def _create(client: AsyncSandboxClient) -> orchard.AsyncSandbox:
    return await client.create(labels={"test": "cancelled-create"})


def test_wait_ready_times_out_with_the_state(client: SandboxClient) -> None:
    with client.create(wait=False) as sandbox:
        with pytest.raises(orchard.DeadlineExceeded):
            sandbox.wait_ended(0.2)
        assert sandbox.wait_ready(110).state is SandboxState.READY


def test_extend_moves_the_end(client: SandboxClient) -> None:
    with client.create(ttl=600) as sandbox:
        before = sandbox.refresh().expire_time
        after = sandbox.extend(7200).expire_time
        assert before is not None
        assert after is not None
        assert 6000 < (after - before).total_seconds() < 7200


def test_heartbeats_keep_a_sandbox_and_missing_ones_are_told(client: SandboxClient) -> None:
    with client.create(keep_alive=True, heartbeat_timeout=15) as sandbox:  # a busy machine may stand still for a while
        with pytest.raises(orchard.DeadlineExceeded):
            sandbox.wait_ended(18)
        assert client.heartbeat([sandbox.sandbox_id, "not-there"]) == ["not-there"]


def test_a_sandbox_without_heartbeats_expires(client: SandboxClient) -> None:
    with client.create(heartbeat_timeout=5) as sandbox:
        info = sandbox.wait_ended(110)
        assert (info.state, info.reason) == (SandboxState.DELETED, "EXPIRED")


def test_admin_calls(client: SandboxClient, platform: PlatformProcess) -> None:
    version = client.version()
    assert (version.runtime, version.tenant) == ("process", "default")
    made = client.keys.create("default", name="test key", ttl=3600)
    assert "test key" in [key.name for key in client.keys.list()]
    with SandboxClient(platform.endpoint, api_key=made.secret) as other:
        assert other.version().tenant == "default"
        with pytest.raises(orchard.PermissionDenied):
            list(other.keys.list())
    assert client.keys.revoke(made.key.key_id).revoke_time is not None
    assert client.usage()[0].sandboxes > 0
    with SandboxClient(platform.endpoint, api_key="wrong") as other, pytest.raises(orchard.Unauthenticated):
        other.version()


# Programs of their own

FORGETS = """
import sys
from orchard import SandboxClient
client = SandboxClient()
sandbox = client.create()
print(sandbox.sandbox_id, flush=True)
if sys.argv[1] == "raise":
    raise ValueError("a bug")
if sys.argv[1] == "wait":
    sandbox.exec("sleep 300")
"""

FORGETS_ASYNC = """
import asyncio, sys
from orchard import AsyncSandboxClient
async def main():
    client = AsyncSandboxClient()
    sandbox = await client.create()
    print(sandbox.sandbox_id, flush=True)
    if sys.argv[1] == "wait":
        await sandbox.exec("sleep 300")
asyncio.run(main())
"""


@pytest.mark.parametrize("source", [FORGETS, FORGETS_ASYNC])
def test_a_program_that_forgets_its_sandbox_deletes_it_at_its_end(
    client: SandboxClient, program: Program, source: str
) -> None:
    process = program(source, "end")
    sandbox_id = line(process.stdout)
    assert process.wait(110) == 0
    assert gone(client, sandbox_id)
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_a_program_that_fails_deletes_its_sandbox(client: SandboxClient, program: Program) -> None:
    process = program(FORGETS, "raise")
    sandbox_id = line(process.stdout)
    assert process.wait(110) == 1
    assert gone(client, sandbox_id)


@pytest.mark.parametrize("source", [FORGETS, FORGETS_ASYNC])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_program_that_is_stopped_deletes_its_sandbox(
    client: SandboxClient, program: Program, source: str, number: signal.Signals
) -> None:
    process = program(source, "wait")
    sandbox_id = line(process.stdout)
    process.send_signal(number)
    # SIGINT: Python's own way of ending by KeyboardInterrupt, which is by the signal.
    assert process.wait(110) == -number
    assert gone(client, sandbox_id)


INTERRUPTED = """
import sys
from orchard import SandboxClient
with SandboxClient() as client:
    sandbox = client.attach(sys.argv[1])
    try:
        sandbox.exec("echo > /tmp/interrupt-me; sleep 300", exec_id="interrupted-1", concurrent=True)
    except KeyboardInterrupt:
        print(sandbox.process("interrupted-1").wait(110).ended, flush=True)
"""


def test_ctrl_c_ends_the_command(client: SandboxClient, program: Program) -> None:
    with client.create() as sandbox:
        process = program(INTERRUPTED, sandbox.sandbox_id)
        sandbox.exec("until test -e /tmp/interrupt-me; do sleep 0.02; done", concurrent=True, timeout=60)
        process.send_signal(signal.SIGINT)
        assert line(process.stdout) == "killed"
        assert process.wait(110) == 0
