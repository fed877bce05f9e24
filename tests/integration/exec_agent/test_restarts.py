"""An agent that is killed and started again answers as if it had never been away."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import pytest
from orchard.exec.v1 import exec_pb2

from tests.integration.exec_agent.conftest import (
    AgentProcess,
    Client,
    Output,
    await_end,
    lives,
    new_id,
    problem,
    spec,
)
from tests.integration.exec_agent.test_output import blocks
from tests.integration.exec_agent.test_stdin import write

MakeAgent = Callable[..., AgentProcess]
KIB, MIB = 1 << 10, 1 << 20
RESTARTED = exec_pb2.EXEC_END_AGENT_RESTARTED
KILL_ROUNDS = 12


@dataclass(frozen=True)
class Seen:
    """All that can be asked of an exec."""

    listed: exec_pb2.Exec
    waited: exec_pb2.Exec
    reads: dict[int, Output]
    inline: tuple[tuple[int, int, bytes], ...]


async def seen(client: Client, exec_id: str, command: exec_pb2.ExecSpec | None, offsets: tuple[int, ...]) -> Seen:
    (listed,) = [found for found in await client.list() if found.exec_id == exec_id]
    inline: tuple[tuple[int, int, bytes], ...] = ()
    if command is not None:
        response = await client.start(command, exec_id=exec_id)
        assert response.exec == listed
        inline = tuple((0, c.stream, c.data) for c in response.output) if response.output_complete else ()
        inline = ((0, 0, b"".join(data for _, _, data in inline)),)
    reads = {offset: await client.read(exec_id, offset) for offset in offsets}
    return Seen(listed, await client.wait(exec_id, 0), reads, inline)


def files(agent: AgentProcess) -> list[str]:
    return sorted(path.name for path in (agent.folder / "state").iterdir())


async def test_finished_commands_are_as_before(make_agent: MakeAgent) -> None:
    agent = make_agent()
    content = blocks(3 * MIB)
    (agent.work / "in").write_bytes(content)
    commands = {
        "small": spec(shell="printf 'a\\0\\377'; printf err >&2; exit 7"),
        "silent": spec("true"),
        "edge": spec("head", "-c", str(8 * KIB), "in"),
        "above": spec("head", "-c", str(8 * KIB + 1), "in"),
        "large": spec(shell="cat in; head -c 100000 in >&2"),
        "wrapped": spec("cat", "in", retained_limit_bytes=128 * KIB),
        "limited": spec("yes", output_limit_bytes=70_001),
        "timed-out": spec(shell="echo partial; sleep 1000", timeout=0.2),
        "signalled": spec(shell="kill -SEGV $$"),
    }
    offsets = {"large": (0, 5, MIB, 3 * MIB + 17), "wrapped": (0, 3 * MIB - 1000), "limited": (0, 70_000)}
    before: dict[str, Seen] = {}
    async with agent.client() as client:
        for exec_id, command in commands.items():
            await client.start(command, exec_id=exec_id)
            before[exec_id] = await seen(client, exec_id, command, offsets.get(exec_id, (0,)))
        order = [found.exec_id for found in await client.list()]
    assert before["large"].reads[0].stdout == content
    assert before["wrapped"].reads[0].gaps == [(0, 3 * MIB - 128 * KIB)]
    assert before["small"].listed.result.HasField("user_cpu")
    for round_ in range(3):
        agent.kill()
        agent.start()
        async with agent.client() as client:
            for exec_id, command in commands.items():
                again = await seen(client, exec_id, command, offsets.get(exec_id, (0,)))
                assert again == before[exec_id], f"{exec_id} after restart {round_}"
                streamed = await client.stream(command, exec_id)
                assert streamed.everything == before[exec_id].reads[0].everything
                assert streamed.result == before[exec_id].listed.result
            assert [found.exec_id for found in await client.list()] == order
            with problem() as found:
                await client.start(spec("false"), exec_id="small")
            assert found[0].reason == "EXEC_ID_REUSED"
            with problem() as found:
                await client.read("small", 100)
            assert found[0].code == grpc.StatusCode.OUT_OF_RANGE
    # What is small is in no file of its own.
    assert files(agent) == ["journal", "output-above", "output-large", "output-limited", "output-wrapped"]


async def test_what_never_started_is_as_before(make_agent: MakeAgent) -> None:
    agent = make_agent()
    missing, nobody = spec("no-such-program"), spec("true", user="nobody-here")
    async with agent.client() as client:
        await client.run(spec("mkfifo", "go"))
        problems = {}
        for exec_id, command in (("missing", missing), ("nobody", nobody)):
            with problem() as found:
                await client.start(command, exec_id=exec_id)
            problems[exec_id] = found[0]
        gate = spec(shell="read x < go")
        await client.start(gate, wait=0, exec_id="gate")
        waited = await client.start(spec("true", queue_timeout=0.1), exec_id="waited")
        buried = await client.signal("buried", cancel=True)
        await client.run(spec(shell="echo > go", concurrent=True))
        await client.wait("gate")
        listed = await client.list()
    for _ in range(2):
        agent.kill()
        agent.start()
        async with agent.client() as client:
            assert await client.list() == listed
            for exec_id, command in (("missing", missing), ("nobody", nobody)):
                for call in (client.start(command, exec_id=exec_id), client.stream(command, exec_id)):
                    with problem() as found:
                        await call
                    assert found[0] == problems[exec_id]
            assert await client.wait("waited") == waited.exec
            assert await client.wait("buried") == buried
            response = await client.start(spec("touch", "ran"), exec_id="buried")
            assert response.exec.result.ended == exec_pb2.EXEC_END_NOT_STARTED
    assert not (agent.work / "ran").exists()


async def test_input_of_commands_that_ran_is_closed_wherever_it_goes_on(make_agent: MakeAgent) -> None:
    agent = make_agent()
    commands = {
        "pipe": spec("cat", stdin_mode=exec_pb2.STDIN_MODE_PIPE, concurrent=True),
        "terminal": spec("cat", tty=exec_pb2.Tty()),
    }
    async with agent.client() as client:
        for exec_id, command in commands.items():
            await client.start(command, wait=0, exec_id=exec_id)
            assert (await write(client, exec_id, b"taken\n")).offset == 6
    agent.kill()
    agent.start()
    async with agent.client() as client:
        for exec_id in commands:
            for offset in (0, 2, 6):
                with problem() as found:
                    await write(client, exec_id, b"more", offset=offset)
                assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STDIN_CLOSED")
            for _ in range(2):
                assert (await write(client, exec_id, offset=6, end=True)).closed
            assert (await client.wait(exec_id)).result.ended == RESTARTED


async def test_commands_that_ran_end_with_what_they_had_written(make_agent: MakeAgent) -> None:
    agent = make_agent()
    content = blocks(1 * MIB)
    (agent.work / "in").write_bytes(content)
    commands = {
        "small": spec(shell="printf so; printf far >&2; exec sleep 1000", concurrent=True),
        "large": spec(shell="cat in; printf END; exec sleep 1000", concurrent=True),
        "wrapped": spec(shell="cat in; printf END; exec sleep 1000", concurrent=True, retained_limit_bytes=128 * KIB),
        "silent": spec("sleep", "1000", concurrent=True),
    }
    ends = [("small", b"so"), ("small", b"far"), ("large", b"END"), ("wrapped", b"END")]
    async with agent.client() as client:
        for exec_id, command in commands.items():
            await client.start(command, wait=0, exec_id=exec_id)
        for exec_id, end in ends:
            await client.until_output(exec_id, end)
        running = {found.exec_id: found for found in await client.list()}
        assert running["wrapped"].output_bytes == MIB + 3
        agent.kill()
    for found in running.values():
        await_end(found.pid)
    agent.start()
    async with agent.client() as client:
        small = await client.read("small")
        assert (small.stdout, small.stderr) == (b"so", b"far")
        assert (await client.read("large", 100)).stdout == (content + b"END")[100:]
        wrapped = await client.read("wrapped")
        assert wrapped.gaps == [(0, MIB + 3 - 128 * KIB)]
        assert wrapped.stdout == (content + b"END")[-128 * KIB :]
        for exec_id, command in commands.items():
            response = await client.start(command, exec_id=exec_id)
            result = response.exec.result
            assert (result.ended, result.exit_code) == (RESTARTED, -1)
            assert "restarted" in result.message
            assert result.start_time == running[exec_id].start_time
            assert response.exec.pid == running[exec_id].pid
            assert response.exec.create_time == running[exec_id].create_time
            assert result.output_bytes == running[exec_id].output_bytes
            assert await client.wait(exec_id) == response.exec
        before = await client.list()
    agent.kill()
    agent.start()
    async with agent.client() as client:
        assert await client.list() == before, "the second time they have ended already"


async def test_a_follower_comes_back_at_its_offset(make_agent: MakeAgent) -> None:
    agent = make_agent()
    command = spec(shell="echo one; echo two; exec sleep 1000")
    async with agent.client() as client:
        call = client.exec_call(command, "follow")
        output = Output()
        while output.everything != b"one\ntwo\n":
            output.take(await call.read())
        agent.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    agent.start()
    async with agent.client() as client:
        again = await client.stream(command, "follow", offset=len(output.everything))
        assert again.everything == b""
        assert again.result is not None
        assert again.result.ended == RESTARTED
        assert (await client.stream(command, "follow", offset=4)).stdout == b"two\n"


async def test_a_killed_agent_runs_nothing_twice(make_agent: MakeAgent) -> None:
    agent = make_agent()
    log = agent.work / "log"
    finished, running, queued, buried = (new_id() for _ in range(4))
    tree = spec(shell=f"echo ran >> {log}; setsid sleep 1000 & echo $!; exec sleep 1001")
    once = spec(shell=f"echo ran >> {log}")
    async with agent.client() as client:
        await client.run(once, finished)
        leader = (await client.start(tree, wait=0, exec_id=running)).exec.pid
        child = int((await client.until_output(running, b"\n")).split()[0])
        await client.start(spec(shell=f"echo queued >> {log}"), wait=0, exec_id=queued)
        await client.signal(buried, cancel=True)
        assert lives(child)
        agent.kill()
    for pid in (leader, child):
        await_end(pid)
    agent.start()
    async with agent.client() as client:
        assert (await client.start(tree, exec_id=running)).exec.result.ended == RESTARTED
        assert (await client.start(once, exec_id=finished)).exec.result.ended == exec_pb2.EXEC_END_EXITED
        assert (await client.start(once, exec_id=buried)).exec.result.ended == exec_pb2.EXEC_END_NOT_STARTED
        with problem() as found:
            await client.start(spec("true"), exec_id=running)
        assert found[0].code == grpc.StatusCode.ALREADY_EXISTS
        # What had not been started may be, once its caller asks again.
        await client.run(spec(shell=f"echo queued >> {log}"), queued)
        assert log.read_text() == "ran\nran\nqueued\n"


async def test_late_output_of_children_is_kept_too(make_agent: MakeAgent) -> None:
    agent = make_agent()
    async with agent.client() as client:
        await client.run(spec("mkfifo", "go"))
        child = "(read x < go; printf late; printf done > done; exec sleep 1000) & printf now; printf $! > pid"
        await client.run(spec(shell=child), "parent")
        await client.run(spec(shell="echo > go; while [ ! -s done ]; do sleep 0.01; done"))
        while (await client.read("parent")).everything != b"nowlate":
            await asyncio.sleep(0.005)
    pid = int((agent.work / "pid").read_text())
    agent.kill()
    agent.start()
    async with agent.client() as client:
        assert (await client.read("parent")).everything == b"nowlate"
        assert (await client.wait("parent")).result.output_bytes == 7
    assert lives(pid), "what a command left behind lives on"
    os.kill(pid, signal.SIGKILL)


# Numbered lines, at a pace that a kill falls among; each run leaves a mark.
COUNTER = "echo {id} >> ran; i=0; while [ $i -lt 4000 ]; do echo line $i of {id}; i=$((i+1)); done"


def expected(exec_id: str) -> bytes:
    return b"".join(f"line {number} of {exec_id}\n".encode() for number in range(4000))


async def follow_through(agent: AgentProcess, exec_id: str, retained: int) -> tuple[exec_pb2.ExecResult, Output]:
    """As the SDK does: start, and after each loss of the agent attach again at the offset reached."""
    command = spec(shell=COUNTER.format(id=exec_id), concurrent=True, retained_limit_bytes=retained)
    output = Output()
    while True:
        reached = len(output.everything) + sum(size for _, size in output.gaps)
        try:
            async with agent.client() as client:
                async for event in client.exec_call(command, exec_id, offset=reached):
                    output.take(event)
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE, error
            await asyncio.sleep(0.01)
        if output.result is not None:
            return output.result, output


@pytest.mark.parametrize("seed", [1, 2])
async def test_an_agent_killed_again_and_again_never_shows_a_wrong_byte(make_agent: MakeAgent, seed: int) -> None:
    agent = make_agent()
    rng = random.Random(seed)
    done = asyncio.Event()

    async def kill_at_times() -> None:
        for _ in range(KILL_ROUNDS):
            await asyncio.sleep(rng.uniform(0.02, 0.25))  # the moment of the kill is what varies
            await asyncio.to_thread(agent.kill)
            await asyncio.to_thread(agent.start)
        done.set()

    async def run_on(number: int) -> dict[str, tuple[exec_pb2.ExecResult, Output]]:
        results = {}
        last = False
        while not last:
            last = done.is_set()  # nothing disturbs that one
            exec_id = f"{number}-{len(results)}"
            results[exec_id] = await follow_through(agent, exec_id, 64 * KIB if number else 0)
        return results

    killer = asyncio.create_task(kill_at_times())
    everything = await asyncio.gather(*(run_on(number) for number in range(3)))
    await killer
    marks = (agent.work / "ran").read_text().split()
    assert len(marks) == len(set(marks)), "nothing ran twice"
    ends = set()
    async with agent.client() as client:
        for results in everything:
            for exec_id, (result, output) in results.items():
                ends.add(result.ended)
                text, produced = expected(exec_id), result.output_bytes
                pieces, place = [], 0
                for offset, size in output.gaps:
                    pieces.append(text[place:offset])
                    place = offset + size
                pieces.append(text[place:produced])
                assert output.everything == b"".join(pieces)
                if result.ended == exec_pb2.EXEC_END_EXITED:
                    assert produced == len(text)
                again = await client.read(exec_id)
                kept = sum(size for _, size in again.gaps)
                assert again.everything == text[kept:produced]
                assert again.result == result
    assert ends == {exec_pb2.EXEC_END_EXITED, RESTARTED}, "both kinds were met"
