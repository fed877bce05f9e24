"""Commands with a terminal: its size, its keys, its signals and its end."""

from __future__ import annotations

import asyncio
import os

import grpc
import pytest
from orchard.exec.v1 import exec_pb2, exec_service_pb2

from services.exec_agent import terminal
from tests.integration.exec_agent.conftest import (
    Client,
    agent_here,
    await_end,
    lives,
    new_id,
    problem,
    spec,
)
from tests.integration.exec_agent.terminals import BASH, READY, SHELL, attach, resize, tty


async def test_the_command_has_a_terminal_and_a_session_of_its_own(client: Client) -> None:
    script = (
        "import os, sys;"
        "print([os.isatty(n) for n in range(3)], os.getsid(0) == os.getpid() == os.tcgetpgrp(0));"
        "print(os.get_terminal_size().lines, os.get_terminal_size().columns, os.environ['TERM']);"
        "open('/dev/tty', 'w').write('controlled\\n');"
        "print(os.ttyname(0) == os.ttyname(2), sorted(os.listdir('/proc/self/fd'))[:3]);"
        "print('err', file=sys.stderr)"
    )
    output = await client.run(tty("/usr/bin/python3", "-uc", script))
    assert output.stdout.decode().split("\r\n") == [
        "[True, True, True] True",
        "33 101 xterm-256color",
        "controlled",
        "True ['0', '1', '2']",
        "err",
        "",
    ]
    assert output.stderr == b""


async def test_the_kind_of_terminal_is_told_unless_the_command_says_so(client: Client) -> None:
    assert (await client.run(tty(*("sh", "-c", "echo $TERM"), term="vt100"))).stdout == b"vt100\r\n"
    own = await client.run(tty(*("sh", "-c", "echo $TERM"), term="vt100", env={"TERM": "dumb"}))
    assert own.stdout == b"dumb\r\n"
    plain = await client.run(spec(*("sh", "-c", "stty size"), tty=exec_pb2.Tty()))
    assert plain.stdout == b"24 80\r\n"


async def test_a_dialogue_goes_through_one_stream(client: Client) -> None:
    async with attach(client, new_id(), tty(*SHELL)) as shell:
        assert shell.started.exec.state == exec_pb2.EXEC_STATE_RUNNING
        await shell.until(READY)
        await shell.write(b"echo $((6 * 7)) | cat\n")
        await shell.until(b"\r\n42\r\n")
        await shell.write(b"exit 9\n")
        result = await shell.exit()
    assert (result.ended, result.exit_code) == (exec_pb2.EXEC_END_EXITED, 9)


async def test_a_new_size_is_told_to_the_programs_inside(client: Client) -> None:
    script = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.01; done"
    async with attach(client, new_id(), tty("sh", "-c", script)) as shell:
        await shell.until(b"ready")
        await shell.resize(50, 120)
        await shell.until(b"50 120")
        await resize(client, shell.exec_id, 60, 130)
        await shell.until(b"60 130")
        await client.signal(shell.exec_id, signal=9)
        await shell.exit()
    assert (await resize(client, shell.exec_id, 10, 10)).state == exec_pb2.EXEC_STATE_ENDED


@pytest.mark.parametrize(("key", "signal"), [(b"\x03", 2), (b"\x1c", 3)])
async def test_a_key_that_interrupts_ends_the_foreground_alone(client: Client, key: bytes, signal: int) -> None:
    async with attach(client, new_id(), tty(*BASH)) as shell:
        await shell.until(READY)
        await shell.write(b"sh -c 'echo run''ning; exec sleep 1000'\n")
        await shell.until(b"running")
        await shell.write(key)
        await shell.until(READY, after=shell.output.index(b"running"))
        await shell.write(b"echo code=$?\n")
        await shell.until(b"code=%d\r\n" % (128 + signal))
        await shell.write(b"exit\n")
        await shell.exit()


async def test_a_job_is_stopped_by_its_key_and_goes_on(client: Client) -> None:
    async with attach(client, new_id(), tty(*BASH)) as shell:
        await shell.until(READY)
        await shell.write(b"sh -c 'echo run''ning; read line; echo got-$line'\n")
        await shell.until(b"running")
        await shell.write(b"\x1a")
        await shell.until(b"Stopped")
        await shell.until(READY, after=shell.output.index(b"Stopped"))
        prompt = len(shell.output)
        await shell.write(b"fg\n")
        await shell.until(b"read line", after=prompt)
        await shell.write(b"word\n")
        await shell.until(b"got-word")
        await shell.write(b"exit\n")
        await shell.exit()


@pytest.mark.parametrize("typed", [b"line\n", b"line\r", b"", b"two\nlines", b"unfinished", b"flushed\x04"])
async def test_the_end_of_input_is_its_character(client: Client, typed: bytes) -> None:
    async with attach(client, new_id(), tty("sh", "-c", "cat; echo code=$?; stty size")) as shell:
        await shell.write(typed, end=True)
        await shell.until(b"code=0")
        result = await shell.exit()
    assert result.exit_code == 0
    assert shell.output.endswith(b"33 101\r\n"), "the terminal outlives its input"


@pytest.mark.parametrize("script", ["seq 100000", "trap '' HUP; sleep 1000 & echo $!; seq 100000"])
async def test_the_last_bytes_are_always_there(client: Client, script: str) -> None:
    """Also where a child goes on and has the terminal open."""
    wanted = b"".join(b"%d\r\n" % number for number in range(1, 100_001))
    for _ in range(5):
        exec_id = new_id()
        response = await client.start(tty("sh", "-c", script), exec_id=exec_id)
        assert response.exec.result.ended == exec_pb2.EXEC_END_EXITED
        output = (await client.read(exec_id)).stdout
        assert output.endswith(wanted)
        left, _, _ = output[: -len(wanted)].partition(b"\r")
        if left:
            await client.run(spec("kill", left.decode()))


async def test_the_exit_is_told_at_once_though_a_child_has_the_terminal(client: Client) -> None:
    async with attach(client, new_id(), tty("sh", "-c", "trap '' HUP; sleep 1000 & echo $!; exit 5")) as shell:
        assert (await shell.exit()).exit_code == 5
    child = int(shell.output)
    assert lives(child)
    await client.run(spec("kill", str(child)))


async def test_cancel_ends_a_shell_at_its_prompt_and_what_it_has_stopped(client: Client) -> None:
    async with attach(client, new_id(), tty(*BASH, kill_grace=600.0)) as shell:
        await shell.until(READY)
        await shell.write(b"sh -c 'echo p\"\"id=$$; exec sleep 1000'\n")
        await shell.until(b"pid=")
        await shell.until(b"\r\n", after=shell.output.index(b"pid="))
        await shell.write(b"\x1a")
        await shell.until(b"Stopped")
        await shell.until(READY, after=shell.output.index(b"Stopped"))
        await client.signal(shell.exec_id, cancel=True)
        result = await shell.exit()
    assert result.ended == exec_pb2.EXEC_END_KILLED
    await_end(int(shell.output.partition(b"pid=")[2].split()[0]))


async def test_a_signal_reaches_the_foreground_through_the_tree_and_the_shell_as_leader(client: Client) -> None:
    async with attach(client, new_id(), tty(*BASH)) as shell:
        await shell.until(READY)
        await shell.write(b"sh -c 'echo run''ning; exec sleep 1000'\n")
        await shell.until(b"running")
        # A shell at work heeds no TERM, its foreground does.
        await shell.send(signal=exec_service_pb2.AttachSignal(signal=15))
        await shell.until(READY, after=shell.output.index(b"running"))
        leader = exec_service_pb2.SIGNAL_TARGET_LEADER
        await shell.send(signal=exec_service_pb2.AttachSignal(signal=1, target=leader))
        result = await shell.exit()
    assert (result.ended, result.signal) == (exec_pb2.EXEC_END_KILLED, 1)


async def test_a_terminal_that_nobody_reads_stops_its_command_alone(client: Client) -> None:
    """The command does not read its terminal, and everything that is typed is far more than it holds."""
    async with attach(client, new_id(), tty("sh", "-c", "stty -echo raw; echo ready; sleep 1000")) as stuck:
        await stuck.until(b"ready")
        for _ in range(8):
            await stuck.write(bytes(64 << 10))
        assert (await client.run(spec("echo", "alive", concurrent=True))).stdout == b"alive\n"
        await client.signal(stuck.exec_id, signal=9)
        await stuck.exit()


async def test_without_terminals_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_MULTIPLEXER", "/nowhere/ptmx")
    async with agent_here() as client:
        with problem() as found:
            await client.start(tty("true"))
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PTY_UNAVAILABLE")
        assert "No such file" in found[0].message
        with problem() as found:
            async with attach(client, new_id(), tty("true")):
                pass
        assert found[0].reason == "PTY_UNAVAILABLE"
        assert (await client.run(spec("echo", "alive"))).stdout == b"alive\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="commands of another user need an agent of root")
async def test_the_terminal_belongs_to_the_commands_user(client: Client) -> None:
    output = await client.run(tty("sh", "-c", "stat -c %u $(tty); echo >$(tty) mine", user="65534:65534"))
    assert output.stdout.splitlines() == [b"65534", b"mine"]


async def test_many_terminals_at_once(client: Client) -> None:
    async def one(number: int) -> None:
        async with attach(client, new_id(), tty(*SHELL)) as shell:
            await shell.until(READY)
            for step in range(5):
                await shell.write(b"echo $((%d * 1000 + %d))\n" % (number + 1, step))
                await shell.until(b"%d\r\n" % ((number + 1) * 1000 + step))
            await shell.write(b"exit\n")
            await shell.exit()

    await asyncio.gather(*(one(number) for number in range(32)))
