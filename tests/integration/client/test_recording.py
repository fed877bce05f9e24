"""Recording a rollout: what happens in it is kept, however it ends, and recording never gets in its way."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from typing import Any

import orchard
import pytest
from orchard import AsyncSandbox, AsyncSandboxClient, Sandbox, SandboxClient, SandboxState, Step, Task, TrajectoryStatus
from orchard._client.trajectories.buffer import StepBuffer
from orchard._client.trajectories.client import AsyncTrajectories
from orchard._client.trajectories.recording import AsyncRecording
from orchard._client.trajectories.writer import AsyncTrajectory, prepared

from tests.support.platform import PlatformProcess


def new_name() -> str:
    return f"r-{secrets.token_hex(6)}"


def commands_of(client: SandboxClient, trajectory_id: str) -> list[tuple[str, str, dict]]:
    """(command, output, what became of it) of each recorded command."""
    steps = list(client.trajectories.steps(trajectory_id))
    found = []
    for call, observation in zip(steps[::2], steps[1::2], strict=True):
        assert (call.role, observation.role) == ("assistant", "tool")
        assert (call.tool_calls[0].call_id, call.tool_calls[0].name) == (observation.tool_call_id, observation.name)
        assert call.time is not None
        assert observation.time is not None
        assert call.time <= observation.time
        arguments = json.loads(call.tool_calls[0].arguments)
        found.append((arguments["command"], client.trajectories.text(observation), dict(observation.extra or {})))
    return found


def test_one_line_keeps_a_rollout(client: SandboxClient, sandbox: Sandbox) -> None:
    task = Task("i-1", "d")
    with client.record(task, sandbox=sandbox, model="m", labels={"kept": "yes"}) as trajectory:
        assert sandbox.exec("echo out; echo err >&2; exit 3", merge_stderr=True).exit_code == 3
        sandbox.exec(["printf", "%s", "b c"], cwd="/tmp", env={"SECRET": "hidden"})
        with pytest.raises(orchard.CommandNotStarted):
            sandbox.exec(["no-such-program"])
        trajectory.reward(1, judge="tests")
    assert trajectory.info is not None
    info = client.trajectories.get(trajectory.trajectory_id)
    assert info.status is TrajectoryStatus.COMPLETED
    assert (info.task, info.model, info.sandbox_id, info.labels) == (task, "m", sandbox.sandbox_id, {"kept": "yes"})
    assert info.outcome is not None
    assert (info.outcome.value, info.totals.steps, info.totals.turns) == (1.0, 6, 3)
    failed, quiet, missing = commands_of(client, trajectory.trajectory_id)
    assert failed[:2] == ("echo out; echo err >&2; exit 3", "out\nerr\n")
    assert (failed[2]["exit_code"], failed[2]["ended"], failed[2]["output_bytes"]) == (3, "exited", 8)
    assert quiet[:2] == (["printf", "%s", "b c"], "b c")
    assert missing[2]["error"] == "COMMAND_NOT_FOUND"
    steps = list(client.trajectories.steps(trajectory.trajectory_id))
    assert [step.is_error for step in steps[1::2]] == [True, False, True]
    assert "hidden" not in repr(steps)
    assert json.loads(steps[2].tool_calls[0].arguments)["cwd"] == "/tmp"
    # Afterwards nothing is recorded any more.
    sandbox.exec("true")
    assert client.trajectories.get(trajectory.trajectory_id).totals.steps == 6


def test_streams_and_large_and_odd_outputs_are_kept(client: SandboxClient, sandbox: Sandbox) -> None:
    with client.record(sandbox=sandbox) as trajectory:
        assert "".join(chunk.text for chunk in sandbox.exec_stream("seq 100000")) == sandbox.exec("seq 100000").stdout
        sandbox.exec(r"printf 'a\xff\0b'")
        for _chunk in sandbox.exec_stream("echo begun; sleep 600"):
            break
        process = sandbox.start("sleep 600")
        process.cancel()
    numbers = "".join(f"{number}\n" for number in range(1, 100_001))
    streamed, whole, odd, left, started = commands_of(client, trajectory.trajectory_id)
    assert streamed[1] == whole[1] == numbers
    assert streamed[2]["output_bytes"] == len(numbers)
    assert odd[1] == "a\ufffd\0b"
    assert (left[1], left[2]["error"]) == ("begun\n", "CANCELLED")
    assert started[1] == "started"


def test_attaching_and_detaching_and_the_users_own_steps(client: SandboxClient, sandbox: Sandbox) -> None:
    with client.record() as trajectory:
        sandbox.exec("echo before")
        trajectory.add(Step.user("Go."), {"role": "assistant", "content": "I go."})
        trajectory.attach(sandbox)
        sandbox.exec("echo kept")
        trajectory.detach(sandbox)
        sandbox.exec("echo after")
        assert trajectory.append(Step.user("Thanks.")) == 5
        # Durable at once, before the end.
        assert client.trajectories.get(trajectory.trajectory_id).totals.steps == 5
        assert trajectory.next_index == 5
        with pytest.raises(orchard.InvalidArgument):
            trajectory.add({"role": "nobody"})
    texts = [step.text for step in client.trajectories.steps(trajectory.trajectory_id)]
    assert texts == ["Go.", "I go.", "", "kept\n", "Thanks."]
    assert all(step.time is not None for step in client.trajectories.steps(trajectory.trajectory_id))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("no such tool"), TrajectoryStatus.FAILED),
        (orchard.CommandNotStarted("no such program"), TrajectoryStatus.FAILED),
        (orchard.SandboxLost("its machine is gone"), TrajectoryStatus.ABORTED),
        (orchard.Unavailable("nobody answers"), TrajectoryStatus.ABORTED),
        (orchard.DeadlineExceeded("no answer in time"), TrajectoryStatus.ABORTED),
        (ExceptionGroup("tools", [ValueError("no such tool")]), TrajectoryStatus.FAILED),
        (ExceptionGroup("tools", [ValueError("x"), orchard.SandboxLost("gone")]), TrajectoryStatus.ABORTED),
        (KeyboardInterrupt(), TrajectoryStatus.ABORTED),
        (SystemExit(1), TrajectoryStatus.ABORTED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_how_it_ends_says_how_it_is_sealed(
    client: SandboxClient, error: BaseException, status: TrajectoryStatus
) -> None:
    with pytest.raises(type(error)), client.record() as trajectory:
        trajectory.add(Step.user("Go."))
        raise error
    info = client.trajectories.get(trajectory.trajectory_id)
    assert (info.status, info.totals.steps) == (status, 1)
    assert type(error).__name__ in info.status_message
    assert str(error) in info.status_message


def test_a_commands_own_timeout_is_a_result_and_a_clients_is_not(client: SandboxClient, sandbox: Sandbox) -> None:
    with pytest.raises(orchard.CommandTimeout), client.record(sandbox=sandbox) as own:
        sandbox.exec("sleep 600", timeout=0.1).check()
    assert client.trajectories.get(own.trajectory_id).status is TrajectoryStatus.FAILED
    process = sandbox.start("sleep 600")
    try:
        with pytest.raises(orchard.DeadlineExceeded), client.record(sandbox=sandbox) as clients:
            process.wait(0.1)
    finally:
        process.cancel()
    assert client.trajectories.get(clients.trajectory_id).status is TrajectoryStatus.ABORTED


def test_the_end_can_be_said(client: SandboxClient) -> None:
    with client.record() as trajectory:
        trajectory.end("failed", "step limit")
    info = client.trajectories.get(trajectory.trajectory_id)
    assert (info.status, info.status_message) == (TrajectoryStatus.FAILED, "step limit")
    with client.record() as trajectory, pytest.raises(orchard.InvalidArgument):
        trajectory.end("done")


async def test_a_cancelled_rollout_is_aborted_and_whole(aclient: AsyncSandboxClient, asandbox: AsyncSandbox) -> None:
    name, running = new_name(), asyncio.Event()

    async def rollout() -> None:
        async with aclient.record(trajectory_id=name, sandbox=asandbox):
            await asandbox.exec("echo first")
            async for _chunk in asandbox.exec_stream("echo second; sleep 600"):
                running.set()

    task = asyncio.ensure_future(rollout())
    await asyncio.wait_for(running.wait(), 110)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    info = await aclient.trajectories.get(name)
    assert (info.status, info.totals.steps) == (TrajectoryStatus.ABORTED, 4)
    assert [step.text async for step in aclient.trajectories.steps(name)] == ["", "first\n", "", "second\n"]


async def test_one_that_is_cancelled_as_it_begins_is_aborted(
    aclient: AsyncSandboxClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, created, go_on = new_name(), asyncio.Event(), asyncio.Event()
    create = AsyncTrajectories.create

    async def late(*arguments: Any, **options: Any) -> AsyncTrajectory:
        made = await create(*arguments, **options)
        created.set()
        await go_on.wait()
        return made

    monkeypatch.setattr(AsyncTrajectories, "create", late)

    async def rollout() -> None:
        async with aclient.record(trajectory_id=name):
            raise AssertionError("it never begins")

    task = asyncio.ensure_future(rollout())
    await asyncio.wait_for(created.wait(), 110)
    task.cancel()
    asyncio.get_running_loop().call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    info = await aclient.trajectories.get(name)
    assert (info.status, info.status_message) == (TrajectoryStatus.ABORTED, "CancelledError")


_PROGRAM = """
import sys
from orchard import SandboxClient, Step
with SandboxClient() as client, client.record(trajectory_id=sys.argv[1]) as trajectory:
    trajectory.append(Step.user("Go."))
    print("running", flush=True)
    sys.stdin.read()
"""


def test_ctrl_c_seals_as_aborted(platform: PlatformProcess, client: SandboxClient) -> None:
    name = new_name()
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, name],
        env=platform.client_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=110)
    finally:
        process.kill()
    info = client.trajectories.get(name)
    assert (info.status, info.status_message) == (TrajectoryStatus.ABORTED, "KeyboardInterrupt")


async def test_what_nobody_ended_is_aborted_with_the_client(platform: PlatformProcess, client: SandboxClient) -> None:
    name = new_name()
    async with AsyncSandboxClient(platform.endpoint, api_key=platform.api_key) as other:
        recording = await other.record(trajectory_id=name).__aenter__()
        recording.add(Step.user("Go."))
    info = client.trajectories.get(name)
    assert (info.status, info.status_message) == (TrajectoryStatus.ABORTED, "the client was closed")
    assert info.totals.steps == 1


async def test_nothing_is_added_behind_the_end(
    aclient: AsyncSandboxClient, asandbox: AsyncSandbox, client: SandboxClient, sandbox: Sandbox
) -> None:
    """It would be stored by nobody, which a log alone would say."""
    async with aclient.record("i") as recording:
        recording.add(Step.user("Go."))
    with client.record("i") as plain:
        plain.add(Step.user("Go."))
    for act in (
        lambda: recording.add(Step.user("More.")),
        lambda: recording.attach(asandbox),
        lambda: recording.end("failed"),
        lambda: plain.add(Step.user("More.")),
        lambda: plain.append(Step.user("More.")),
        lambda: plain.attach(sandbox),
        lambda: plain.end("failed"),
    ):
        with pytest.raises(orchard.TrajectorySealed, match="has ended, and its trajectory takes no more; add within"):
            act()
    with pytest.raises(orchard.TrajectorySealed):
        await recording.append(Step.user("More."))
    # What is judged afterwards is judged as ever, and the command of a sandbox is nobody's.
    await recording.reward(1.0)
    sandbox.exec("true")
    assert client.trajectories.get(recording.trajectory_id).totals.steps == 1


async def test_what_the_client_closes_it_closes_together(
    platform: PlatformProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None waits for another: each ends only once all have begun."""
    begun = asyncio.Barrier(5)
    whole = AsyncRecording._close

    async def together(recording: AsyncRecording, *arguments: Any) -> None:
        await begun.wait()
        await whole(recording, *arguments)

    monkeypatch.setattr(AsyncRecording, "_close", together)
    async with AsyncSandboxClient(platform.endpoint, api_key=platform.api_key) as other:
        recordings = [await other.record().__aenter__() for _ in range(5)]
        await asyncio.wait_for(other.close(), 120)
    assert [one.info.status for one in recordings if one.info is not None] == [TrajectoryStatus.ABORTED] * 5


@pytest.mark.parametrize("cut", [True, False])
async def test_sandboxes_are_deleted_whatever_becomes_of_recordings(
    platform: PlatformProcess, client: SandboxClient, monkeypatch: pytest.MonkeyPatch, cut: bool
) -> None:
    """Also where whoever waits for the end does not want to wait any longer."""
    if not cut:
        monkeypatch.setattr("orchard._client.session._DRAIN_SECONDS", 1.0)
    other = AsyncSandboxClient(platform.endpoint, api_key=platform.api_key)
    made = await other.create()
    recordings = [await other.record(sandbox=made).__aenter__() for _ in range(3)]
    with platform.held_down("trajectories"):
        closing = asyncio.ensure_future(other.close())
        async with asyncio.timeout(110):
            while other._session.recordings:
                await asyncio.sleep(0)
        if cut:
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
        else:
            await closing
        assert client.attach(made.sandbox_id).wait_ended(110).state is SandboxState.DELETED
    assert [one.info for one in recordings] == [None] * 3


async def test_commands_go_on_while_nothing_can_be_stored(
    platform: PlatformProcess, aclient: AsyncSandboxClient, asandbox: AsyncSandbox
) -> None:
    async with aclient.record(sandbox=asandbox) as trajectory:
        await asandbox.exec("echo 0")
        await trajectory.flush()
        with platform.held_down("trajectories"):
            for number in range(1, 6):
                assert (await asandbox.exec(f"echo {number}")).stdout == f"{number}\n"
            assert trajectory.next_index == 12
    texts = [step.text async for step in aclient.trajectories.steps(trajectory.trajectory_id)]
    assert texts[1::2] == [f"{number}\n" for number in range(6)]
    assert (await aclient.trajectories.get(trajectory.trajectory_id)).status is TrajectoryStatus.COMPLETED


async def test_what_could_not_be_stored_is_told_at_the_end(aclient: AsyncSandboxClient, asandbox: AsyncSandbox) -> None:
    with pytest.raises(orchard.RecordingIncomplete) as caught:
        async with aclient.record(sandbox=asandbox) as trajectory:
            await asandbox.exec("echo mine")
            await trajectory.flush()
            await (await aclient.trajectories.open(trajectory.trajectory_id, take_over=True)).append(Step.user("hers"))
            # The commands are none the worse for it.
            assert (await asandbox.exec("echo lost")).stdout == "lost\n"
            assert (await asandbox.exec("echo too")).stdout == "too\n"
    assert caught.value.lost == 4
    assert isinstance(caught.value.__cause__, orchard.WriterConflict)
    assert trajectory.trajectory_id in caught.value.message
    # It is not whole, so nobody learns from it.
    info = await aclient.trajectories.get(trajectory.trajectory_id)
    assert (info.status, info.totals.steps) == (TrajectoryStatus.ABORTED, 3)


async def test_what_waits_is_bounded_and_nothing_stands_behind_a_hole(
    platform: PlatformProcess, aclient: AsyncSandboxClient
) -> None:
    trajectory = await aclient.trajectories.create()
    buffer = StepBuffer(trajectory, aclient._session.background, most_bytes=10_000)
    with platform.held_down("trajectories"):
        for number in range(4):
            buffer.add([prepared(Step.user(f"{number}" * 4000))])
        # The last would find room again, behind what did not.
        buffer.add([prepared(Step.user("small"))])
    assert buffer.lost == 3
    with pytest.raises(orchard.OrchardError) as caught:
        await buffer.flush()
    assert caught.value.reason == "RECORDING_BUFFER_FULL"
    texts = [step.text async for step in aclient.trajectories.steps(trajectory.trajectory_id)]
    assert texts == ["0" * 4000, "1" * 4000]
    assert buffer.stop() == 3


async def test_what_stands_before_a_refused_step_is_kept(
    platform: PlatformProcess, aclient: AsyncSandboxClient
) -> None:
    unknown = orchard.Blob("0" * 64, 1, "image/png")
    with pytest.raises(orchard.RecordingIncomplete) as caught:
        async with aclient.record() as trajectory:
            # All of them wait, and are sent together.
            with platform.held_down("trajectories"):
                trajectory.add(Step.user("first"), Step.user("second"), Step.user(unknown), Step.user("behind"))
    assert caught.value.lost == 2
    assert isinstance(caught.value.__cause__, orchard.FailedPrecondition)
    steps = [step.text async for step in aclient.trajectories.steps(trajectory.trajectory_id)]
    assert steps == ["first", "second"]
    assert (await aclient.trajectories.get(trajectory.trajectory_id)).status is TrajectoryStatus.ABORTED


def test_two_at_once_do_not_mix(client: SandboxClient, sandbox: Sandbox) -> None:
    with client.create() as other, client.record(sandbox=sandbox) as first, client.record(sandbox=other) as second:
        sandbox.exec("echo first")
        other.exec("echo second")
    assert [output for _, output, _ in commands_of(client, first.trajectory_id)] == ["first\n"]
    assert [output for _, output, _ in commands_of(client, second.trajectory_id)] == ["second\n"]
