"""Commands with a terminal, and clients that are attached to them."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import grpc
import pytest
from orchard.exec.v1 import exec_pb2, exec_service_pb2

from services.common.peer_status import peer_status
from services.exec_agent import servicer_attach, terminal
from tests.integration.exec_agent.conftest import (
    BACKSTOP,
    SANDBOX,
    Client,
    agent_here,
    await_end,
    lives,
    new_id,
    problem,
    spec,
)
from tests.support.attached import Attached

SIZE = exec_pb2.WindowSize(rows=33, columns=101)
READY = b"ready> "
SHELL = ("sh", "-c", "PS1='ready> ' exec sh -i")
BASH = ("env", "PS1=ready> ", "bash", "--norc", "--noprofile", "-i")


def tty(*argv: str, term: str = "", **fields: Any) -> exec_pb2.ExecSpec:
    return spec(*argv, tty=exec_pb2.Tty(size=SIZE, term=term), **fields)


def attach(client: Client, exec_id: str, command: exec_pb2.ExecSpec | None = None, *, offset: int = 0) -> Attached:
    return Attached(client.stub, client.metadata, SANDBOX, exec_id, command, offset=offset)


async def resize(client: Client, exec_id: str, rows: int, columns: int) -> exec_pb2.Exec:
    size = exec_pb2.WindowSize(rows=rows, columns=columns)
    request = exec_service_pb2.ResizePtyRequest(sandbox_id=SANDBOX, exec_id=exec_id, size=size)
    return (await client.stub.ResizePty(request, metadata=client.metadata, timeout=BACKSTOP)).exec


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


async def test_a_lost_connection_loses_no_byte(client: Client) -> None:
    exec_id, command = new_id(), tty(*SHELL)
    seen, offset, sent = b"", 0, 0
    for number in range(20):
        async with attach(client, exec_id, command, offset=offset) as shell:
            if number == 0:
                await shell.until(READY)
            assert shell.sent == sent
            await shell.write(b"echo n=$((%d))\n" % number)
            if number % 3:
                await shell.until(b"n=%d\r\n" % number)
            else:
                # Cut with the answer on its way; the input has arrived once the agent says so.
                while shell.sent != (await stdin_offset(client, exec_id)):
                    pass
            seen, offset, sent = seen + shell.output, offset + len(shell.output), shell.sent
    async with attach(client, exec_id, offset=offset) as shell:
        await shell.write(b"exit\n")
        assert (await shell.exit()).exit_code == 0
    seen += shell.output
    assert seen == (await client.read(exec_id)).everything
    assert [seen.count(b"n=%d\r" % number) for number in range(20)] == [1] * 20


async def stdin_offset(client: Client, exec_id: str) -> int:
    request = exec_service_pb2.GetStdinRequest(sandbox_id=SANDBOX, exec_id=exec_id)
    return (await client.stub.GetStdin(request, metadata=client.metadata, timeout=BACKSTOP)).state.offset


async def test_input_is_repeated_and_skipped_and_a_hole_ends_the_stream(client: Client) -> None:
    exec_id = new_id()
    async with attach(client, exec_id, spec("cat", stdin_mode=exec_pb2.STDIN_MODE_PIPE)) as cat:
        await cat.send(stdin=exec_service_pb2.StdinChunk(offset=0, data=b"abc"))
        await cat.send(stdin=exec_service_pb2.StdinChunk(offset=1, data=b"bcdef"))
        await cat.until(b"abcdef")
        with problem() as found:
            await cat.send(stdin=exec_service_pb2.StdinChunk(offset=7, data=b"later"))
            await failing(cat)
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.OUT_OF_RANGE, "STDIN_OFFSET_AHEAD")
    async with attach(client, exec_id) as cat:
        assert cat.started.stdin.offset == 6
        await cat.write(b"!", end=True)
        assert (await cat.exit()).exit_code == 0
        assert cat.output == b"abcdef!"
        assert cat.stdin[-1].closed


async def failing(attached: Attached) -> None:
    while await attached.step():
        pass
    async for _ in attached.call:
        pass


async def test_input_is_acknowledged_and_a_closed_one_is_told(client: Client) -> None:
    async with attach(client, new_id(), spec("sh", "-c", "wc -c; sleep 1000", stdin_mode=1)) as wc:
        for _ in range(16):
            await wc.write(bytes(64 << 10))
        while not wc.stdin or wc.stdin[-1].written < 900 << 10:
            assert await wc.step()
        await wc.write(b"", end=True)
        await wc.until(b"1048576\n")
        while not wc.stdin[-1].closed:
            assert await wc.step()
        # What comes too late is told of, and does no harm.
        await wc.write(b"too late")
        await wc.send(signal=exec_service_pb2.AttachSignal(signal=15))
        assert (await wc.exit()).signal == 15


async def test_both_streams_of_a_command_without_a_terminal_come_apart(client: Client) -> None:
    command = spec("sh", "-c", "cat; echo err >&2", stdin_mode=exec_pb2.STDIN_MODE_PIPE)
    async with attach(client, new_id(), command) as both:
        await both.write(b"\xff\x00bytes", end=True)
        await both.exit()
    output = await client.read(both.exec_id)
    assert (output.stdout, output.stderr) == (b"\xff\x00bytes", b"err\n")
    assert both.output == output.everything


async def test_a_client_that_goes_ends_nothing(client: Client) -> None:
    exec_id = new_id()
    async with attach(client, exec_id, tty(*SHELL)) as shell:
        await shell.until(READY)
    async with attach(client, exec_id, offset=len(shell.output)) as again:
        await again.write(b"echo still-$((1))\n")
        await again.until(b"still-1")
        await again.write(b"exit\n")
        await again.exit()


async def test_a_command_that_nobody_is_attached_to_is_an_orphan(client: Client) -> None:
    exec_id = new_id()
    async with attach(client, exec_id, tty(*SHELL, orphan_timeout=0.5)) as shell:
        await shell.until(READY)
    async with asyncio.timeout(BACKSTOP):
        # Listing is no call for the exec; waiting would be one.
        while (found := await listed(client, exec_id)).state != exec_pb2.EXEC_STATE_ENDED:
            await asyncio.sleep(0.01)
    assert found.result.ended == exec_pb2.EXEC_END_ORPHANED


async def listed(client: Client, exec_id: str) -> exec_pb2.Exec:
    return next(one for one in await client.list() if one.exec_id == exec_id)


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


async def test_what_is_said_before_the_end_of_input_was_heard_of_is_no_error(client: Client) -> None:
    """A message is half taken when the command closes its input, and more of them are on the way behind it."""
    closes = "trap 'exec <&-; echo closed' USR1; echo ready; while :; do sleep 0.05 </dev/null; done"
    async with attach(client, new_id(), spec("sh", "-c", closes, stdin_mode=exec_pb2.STDIN_MODE_PIPE)) as writer:
        await writer.until(b"ready")
        for _ in range(12):
            await writer.write(bytes(64 << 10))
        await client.signal(writer.exec_id, signal=signal.SIGUSR1)
        await writer.until(b"closed")
        await writer.write(b"more", end=True)
        while not writer.stdin or not writer.stdin[-1].closed:
            assert await writer.step()
        assert writer.stdin[-1].offset < writer.sent
        await client.signal(writer.exec_id, signal=9)
        assert (await writer.exit()).signal == 9


async def test_the_agent_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_attach, "KEEPALIVE_SECONDS", 0.01)
    async with agent_here() as client, attach(client, new_id(), tty("sleep", "1000")) as quiet:
        while quiet.keepalives < 3:
            assert await quiet.step()
        await quiet.send(keepalive=exec_service_pb2.Keepalive())
        await client.signal(quiet.exec_id, signal=9)
        await quiet.exit()


async def test_a_client_that_falls_silent_ends_its_stream_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_attach, "KEEPALIVE_SECONDS", 0.01)
    monkeypatch.setattr(servicer_attach, "CLIENT_SILENCE_SECONDS", 0.05)
    async with agent_here() as client:
        exec_id = new_id()
        async with attach(client, exec_id, tty("sleep", "1000")) as silent:
            with problem() as found:
                await failing(silent)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "STREAM_IDLE")
        assert (await client.wait(exec_id, 0)).state == exec_pb2.EXEC_STATE_RUNNING
        # One that has said all it had to, and says so, may listen for as long as it likes.
        for silence in (0.05, 1.0, 10.0):  # it has to say so before it counts as silent
            monkeypatch.setattr(servicer_attach, "CLIENT_SILENCE_SECONDS", silence)
            monkeypatch.setattr(servicer_attach, "KEEPALIVE_SECONDS", silence / 5)
            if await may_listen(client, exec_id):
                break
        else:
            pytest.fail("it was silent")
        await client.signal(exec_id, signal=9)


async def may_listen(client: Client, exec_id: str) -> bool:
    """Whether a client that says nothing after its end hears of keepalives for four times the longest silence."""
    try:
        async with attach(client, exec_id) as listening:
            await listening.call.done_writing()
            while listening.keepalives < 20:
                assert await listening.step()
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return False
    return True


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


async def test_bad_messages_are_named(client: Client) -> None:
    bad: dict[str, exec_service_pb2.AttachRequest] = {
        "resize.rows": exec_service_pb2.AttachRequest(resize=exec_pb2.WindowSize(rows=0, columns=1)),
        "signal.signal": exec_service_pb2.AttachRequest(signal=exec_service_pb2.AttachSignal(signal=65)),
        "payload": exec_service_pb2.AttachRequest(start=exec_service_pb2.AttachStart(exec_id="x")),
        "stdin.offset": exec_service_pb2.AttachRequest(stdin=exec_service_pb2.StdinChunk(offset=-1, data=b"x")),
    }
    exec_id, command = new_id(), tty("sleep", "1000")
    for field, message in bad.items():
        async with attach(client, exec_id, command) as attached:
            with problem() as found, peer_status(attached.call):
                await attached.call.write(message)
                await failing(attached)
            assert found[0].fields == (field,)
    await client.signal(exec_id, signal=9)
    with problem() as found:
        async with attach(client, "not an id", command):
            pass
    assert found[0].fields == ("start.exec_id",)
    with problem() as found:
        async with attach(client, "never-started"):
            pass
    assert found[0].reason == "EXEC_NOT_FOUND"
    with problem() as found:
        plain = new_id()
        await client.start(spec("sleep", "1000", concurrent=True), wait=0, exec_id=plain)
        await resize(client, plain, 10, 10)
    assert found[0].reason == "NO_TTY"
    await client.signal(plain, signal=9)


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
