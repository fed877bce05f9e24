"""What an agent accepted and had not started goes on under the next one: once, in its order, with its input."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from orchard.exec.v1 import agent_service_pb2, exec_pb2, exec_service_pb2

from tests.integration.exec_agent.conftest import (
    SANDBOX,
    AgentProcess,
    Client,
    agent_here,
    new_id,
    problem,
    short_folder,
    spec,
)
from tests.integration.exec_agent.test_restarts import files
from tests.integration.exec_agent.test_stdin import PIPE, stdin, write

T = TypeVar("T")
MakeAgent = Callable[..., AgentProcess]
QUEUED, ENDED = exec_pb2.EXEC_STATE_QUEUED, exec_pb2.EXEC_STATE_ENDED
EXITED, NOT_STARTED = exec_pb2.EXEC_END_EXITED, exec_pb2.EXEC_END_NOT_STARTED
RESTARTED = exec_pb2.EXEC_END_AGENT_RESTARTED
BINARY = bytes(range(256)) * 40
LONG = "echo long >> log; : " + "x" * 200_000

COMMANDS = {
    "argv": spec("sh", "-c", "echo argv >> log; printf '%s' \"$0\"", "\u00fc \u2192 '\""),
    "shell": spec(shell="echo shell >> log; printf out; printf err >&2; exit 7", merge_stderr=True),
    "long": spec(shell=LONG),
    "environment": spec(shell='echo environment >> log; printf %s "$A$FROM_CONFIG"', env={"A": "own-\u00e9-value "}),
    "folder": spec(shell="pwd; echo folder >> ../log", cwd="below"),
    "inline": spec(shell="echo inline >> log; cat", stdin=BINARY),
    "limited": spec(shell="echo limited >> log; yes", output_limit_bytes=70_001),
    "missing": spec("no-such-program"),
    "unwritten": spec(shell="echo unwritten >> log; cat", stdin_mode=PIPE),
    "written": spec(shell="echo written >> log; cat", stdin_mode=PIPE),
    "closed": spec(shell="echo closed >> log; cat", stdin_mode=PIPE),
    "empty": spec(shell="echo empty >> log; cat", stdin_mode=PIPE),
}
OUTPUT = {
    "argv": "\u00fc \u2192 '\"".encode(),
    "shell": b"outerr",
    "long": b"",
    "environment": "own-\u00e9-value yes".encode(),
    "inline": BINARY,
    "unwritten": BINARY + b"end",
    "written": BINARY + b"end",
    "closed": BINARY,
    "empty": b"",
}


async def hold(client: Client, exec_id: str = "gate") -> None:
    """A serial command that runs, so that others wait."""
    await client.start(spec(shell="echo up; exec sleep 1000", no_timeout=True), wait=0, exec_id=exec_id)
    await client.until_output(exec_id, b"up")


async def accept(client: Client) -> dict[str, exec_pb2.Exec]:
    """Everything waits; of some the input is there, of one a part, and of two its end."""
    accepted = {}
    for exec_id, command in COMMANDS.items():
        accepted[exec_id] = (await client.start(command, wait=0, exec_id=exec_id)).exec
        assert accepted[exec_id].state == QUEUED
    assert (await write(client, "written", BINARY[:100], BINARY[100:], end=False)).offset == len(BINARY)
    assert (await write(client, "closed", BINARY, end=True)).closed
    assert (await write(client, "empty", end=True)).closed
    return accepted


async def finish(client: Client) -> None:
    """Give those their input that wait for it; each ran once, in its order, as it was told."""
    assert (await stdin(client, "unwritten")).offset == 0
    await write(client, "unwritten", BINARY + b"end", end=True)
    state = await stdin(client, "written")
    assert (state.offset, state.closed) == (len(BINARY), False)
    # A call that broke is repeated as it was.
    await write(client, "written", BINARY + b"end", end=True)
    for exec_id in ("closed", "empty"):
        assert (await write(client, exec_id, *([BINARY] if exec_id == "closed" else []), end=True)).closed
    for exec_id in COMMANDS:
        found = await client.wait(exec_id)
        assert found.state == ENDED, exec_id
        output = await client.read(exec_id)
        assert output.everything == OUTPUT.get(exec_id, output.everything), exec_id
        if exec_id not in ("limited", "missing"):
            assert (found.result.ended, found.result.exit_code) == (EXITED, 7 if exec_id == "shell" else 0), exec_id
    assert (await client.wait("limited")).result.ended == exec_pb2.EXEC_END_OUTPUT_LIMIT
    assert (await client.read("folder")).stdout.endswith(b"/work/below\n")
    with problem() as found:
        await client.start(COMMANDS["missing"], exec_id="missing")
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "COMMAND_NOT_FOUND")


def ran(agent: AgentProcess) -> list[str]:
    return (agent.work / "log").read_text().split()


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_what_waits_goes_on_as_it_was_accepted(make_agent: MakeAgent, how: str) -> None:
    agent = make_agent()
    (agent.work / "below").mkdir()
    async with agent.client() as client:
        await hold(client)
        accepted = await accept(client)
        order = [found.exec_id for found in await client.list()]
    agent.kill() if how == "killed" else agent.stop()
    agent.start()
    async with agent.client() as client:
        listed = {found.exec_id: found for found in await client.list()}
        assert list(listed) == order
        for exec_id, before in accepted.items():
            assert (listed[exec_id].create_time, listed[exec_id].command) == (before.create_time, before.command)
            with problem() as found:
                await client.start(spec("true"), exec_id=exec_id)
            assert found[0].reason == "EXEC_ID_REUSED"
        assert (await client.wait("gate")).result.ended == RESTARTED
        await finish(client)
        assert ran(agent) == [name for name in COMMANDS if name != "missing"]
        # They are as any other from here on.
        results = await client.list()
    agent.kill()
    agent.start()
    async with agent.client() as client:
        assert await client.list() == results
        assert ran(agent) == [name for name in COMMANDS if name != "missing"]
    assert not [name for name in files(agent) if name.startswith("queued-")]


async def test_what_still_waits_goes_on_under_every_next_agent(make_agent: MakeAgent) -> None:
    agent = make_agent()
    (agent.work / "below").mkdir()
    async with agent.client() as client:
        await hold(client)
        for number in range(3):
            await client.start(spec(shell="echo up; exec sleep 1000"), wait=0, exec_id=f"next-{number}")
        await accept(client)
    for number in range(3):
        agent.kill()
        agent.start()
        async with agent.client() as client:
            await client.until_output(f"next-{number}", b"up")
            states = {found.exec_id: found.state for found in await client.list()}
            assert {states[exec_id] for exec_id in COMMANDS} == {QUEUED}
    async with agent.client() as client:
        await client.signal("next-2", cancel=True)
        await finish(client)
        assert [(await client.wait(f"next-{n}")).result.ended for n in range(2)] == [RESTARTED, RESTARTED]
    assert ran(agent) == [name for name in COMMANDS if name != "missing"]


async def test_what_ran_is_never_run_again(make_agent: MakeAgent) -> None:
    """Serial, concurrent and with a terminal: whether it waited before or not."""
    agent = make_agent()
    shell = "echo {} >> log; echo up; exec cat"
    async with agent.client() as client:
        await hold(client)
        commands = {
            "serial": spec(shell=shell.format("serial"), stdin_mode=PIPE),
            "concurrent": spec(shell=shell.format("concurrent"), stdin_mode=PIPE, concurrent=True),
            "terminal": spec(shell=shell.format("terminal"), tty=exec_pb2.Tty()),
        }
        for exec_id, command in commands.items():
            await client.start(command, wait=0, exec_id=exec_id)
            await write(client, exec_id, b"taken\n")
        await client.signal("gate", cancel=True)
        for exec_id in commands:
            await client.until_output(exec_id, b"taken")
    agent.kill()
    agent.start()
    async with agent.client() as client:
        for exec_id, command in commands.items():
            assert (await client.start(command, exec_id=exec_id)).exec.result.ended == RESTARTED
            assert (await client.wait(exec_id)).result.ended == RESTARTED
        assert sorted(ran(agent)) == sorted(commands)


async def test_what_was_cancelled_in_the_queue_stays_so(make_agent: MakeAgent) -> None:
    agent = make_agent()
    command = spec(shell="touch ran")
    async with agent.client() as client:
        await hold(client)
        for exec_id in ("before", "after", "last"):
            await client.start(command, wait=0, exec_id=exec_id)
        await client.start(spec(shell="touch ran", queue_timeout=0.05), exec_id="late")
        await client.signal("before", cancel=True)
    agent.kill()
    (agent.folder / "state" / "queued-stale.new").write_bytes(b"Q 1 ")
    agent.start()
    async with agent.client() as client:
        await client.wait("last")
        (agent.work / "ran").unlink()
        assert (await client.start(command, exec_id="before")).exec.result.ended == NOT_STARTED
        assert (await client.wait("late")).result.ended == NOT_STARTED
        await hold(client, "again")
        await client.start(command, wait=0, exec_id="then")
    agent.kill()
    agent.start()
    async with agent.client() as client:
        assert (await client.wait("then")).result.ended == EXITED
        assert (await client.wait("before")).result.ended == NOT_STARTED
        assert (await client.wait("late")).result.ended == NOT_STARTED


async def test_a_queue_timeout_goes_on_under_the_next_agent(make_agent: MakeAgent) -> None:
    agent = make_agent()
    async with agent.client() as client:
        await hold(client)
        await client.start(spec(shell="exec sleep 1000"), wait=0, exec_id="first")
        await client.start(spec(shell="touch ran", queue_timeout=1.0), wait=0, exec_id="late")
        agent.kill()
    agent.start()
    async with agent.client() as client:
        result = (await client.wait("late")).result
        assert result.ended == NOT_STARTED
        assert "queue timeout of 1 s" in result.message
        # It begins once nothing is left of what ran under the agent before, and the time of the other may be over then.
        while (first := await client.wait("first", 0)).state == exec_pb2.EXEC_STATE_QUEUED:
            pass
        assert first.state == exec_pb2.EXEC_STATE_RUNNING
    assert not (agent.work / "ran").exists()


async def test_what_nobody_comes_back_for_ends_as_an_orphan_of_the_queue(make_agent: MakeAgent) -> None:
    agent = make_agent()
    async with agent.client() as client:
        await hold(client)
        await client.start(spec(shell="exec sleep 1000"), wait=0, exec_id="first")
        await client.start(spec(shell="touch ran", orphan_timeout=0.5), wait=0, exec_id="orphan")
        agent.kill()
    agent.start()
    async with agent.client() as client:
        while (found := {one.exec_id: one for one in await client.list()}["orphan"]).state != ENDED:
            pass
        assert found.result.ended == NOT_STARTED
    assert not (agent.work / "ran").exists()


async def attached(exec_id: str, data: bytes, offset: int) -> AsyncIterator[exec_service_pb2.AttachRequest]:
    start = exec_service_pb2.AttachStart(exec_id=exec_id)
    yield exec_service_pb2.AttachRequest(sandbox_id=SANDBOX, start=start)
    yield exec_service_pb2.AttachRequest(stdin=exec_service_pb2.StdinChunk(offset=offset, data=data, end=True))


async def test_what_was_typed_into_a_queued_command_is_there(make_agent: MakeAgent) -> None:
    agent = make_agent()
    async with agent.client() as client:
        await hold(client)
        await client.start(spec("cat", stdin_mode=PIPE), wait=0, exec_id="typed")
        call = client.stub.Attach(attached("typed", b"typed", 0), metadata=client.metadata, timeout=110)
        while not (await call.read()).stdin.closed:
            pass
        agent.kill()
    agent.start()
    async with agent.client() as client:
        call = client.stub.Attach(attached("typed", b"typed", 0), metadata=client.metadata, timeout=110)
        answers = [answer async for answer in call]
        assert answers[0].started.stdin.offset == 5
        assert answers[0].started.stdin.closed
        assert b"".join(answer.output.data for answer in answers) == b"typed"
        assert answers[-1].exit.ended == EXITED


async def test_commands_that_wait_go_on_when_the_secret_environment_is_there(make_agent: MakeAgent) -> None:
    agent = make_agent(ORCHARD_EXPECTS_SECRET_ENV="1")
    secret = "a-" + os.urandom(8).hex()
    command, fed = spec(shell="printf %s $KEY"), spec(shell='printf "%s %s" $KEY $(cat)', stdin_mode=PIPE)

    async def deliver(client: Client) -> None:
        request = agent_service_pb2.SetSecretEnvRequest(sandbox_id=SANDBOX, secret_env={"KEY": secret})
        await client.agent.SetSecretEnv(request, metadata=client.metadata, timeout=110)

    async with agent.client() as client:
        await deliver(client)
        await hold(client)
        await client.start(command, wait=0, exec_id="plain")
        await client.start(fed, wait=0, exec_id="fed")
        await client.start(command, wait=0, exec_id="unwanted")
        await write(client, "fed", b"input")
    agent.kill()
    for path in (agent.folder / "state").iterdir():
        assert secret.encode() not in path.read_bytes(), path
    agent.start()
    async with agent.client() as client:
        # Each call says so, as the gateway of any of them can deliver it.
        calls = (
            lambda: client.wait("plain"),
            lambda: client.read("plain"),
            lambda: client.start(command, exec_id="plain"),
            lambda: client.stream(command, "plain"),
            lambda: write(client, "fed", b"input", end=True),
            lambda: stdin(client, "fed"),
        )
        for call in calls:
            with problem() as found:
                await call()
            assert (found[0].code, found[0].reason, found[0].retry) == (
                grpc.StatusCode.UNAVAILABLE,
                "SECRET_ENV_PENDING",
                True,
            )
        assert (await client.wait("gate")).result.ended == RESTARTED
        assert (await client.signal("unwanted", cancel=True)).result.ended == NOT_STARTED
        await deliver(client)
        assert (await client.wait("plain")).result.ended == EXITED
        assert (await client.read("plain")).stdout == secret.encode()
        await write(client, "fed", b"input", end=True)
        assert (await client.read("fed")).stdout == f"{secret} input".encode()


async def test_the_next_waits_for_what_still_runs_of_the_last_agent(make_agent: MakeAgent, tmp_path: Path) -> None:
    """One at a time: also where the command that was killed with its agent takes its time to go."""
    agent = make_agent()
    async with agent.client() as client:
        running = (await client.start(spec(shell="exec sleep 1000"), wait=0, exec_id="running")).exec.pid
        await client.start(spec(shell="touch ran"), wait=0, exec_id="next")
    # Its reaper cannot end it while it is stopped.
    reaper = int(Path(f"/proc/{running}/stat").read_text().rpartition(") ")[2].split()[1])
    os.kill(reaper, signal.SIGSTOP)
    try:
        agent.kill()
        agent.start()
        async with agent.client() as client:
            assert (await client.wait("next", 0)).state == QUEUED
            assert not (agent.work / "ran").exists()
            assert (await client.run(spec("true", concurrent=True), new_id())).result is not None
            os.kill(reaper, signal.SIGCONT)
            assert (await client.wait("next")).result.ended == EXITED
    finally:
        os.kill(reaper, signal.SIGCONT)


async def test_a_full_disk_refuses_what_it_cannot_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    real, full = os.write, [False]
    with short_folder() as folder:

        def write_file(descriptor: int, data: bytes) -> int:
            if full[0] and Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(folder):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, data)

        monkeypatch.setattr(os, "write", write_file)
        async with agent_here(folder) as client:
            await hold(client)
            await client.start(COMMANDS["written"], wait=0, exec_id="fed")
            await client.start(spec(shell="touch unwanted"), wait=0, exec_id="unwanted")
            full[0] = True
            for call in (
                client.start(COMMANDS["argv"], wait=0, exec_id="plain"),
                client.stream(COMMANDS["argv"], "plain"),
                write(client, "fed", BINARY),
                write(client, "fed", end=True),
            ):
                with problem() as found:
                    await call
                assert (found[0].code, found[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_SPACE")
            assert [found.exec_id for found in await client.list()] == ["unwanted", "fed", "gate"]
            assert (await stdin(client, "fed")) == exec_pb2.StdinState()
            assert (await client.signal("unwanted", cancel=True)).result.ended == NOT_STARTED
            full[0] = False
            await write(client, "fed", BINARY, end=True)
            await client.start(COMMANDS["argv"], wait=0, exec_id="plain")
        async with agent_here(folder) as client:
            # Its end could not be noted, which must not bring it back.
            assert (await client.wait("unwanted")).result.ended == NOT_STARTED
            for exec_id in ("fed", "plain"):
                assert (await client.wait(exec_id)).result.ended == EXITED
            assert (await client.read("fed")).everything == BINARY
        assert not (folder / "unwanted").exists()
