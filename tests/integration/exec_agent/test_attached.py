"""Clients that are attached to a command: its input, its output and its end in one stream, over lost connections."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest
from orchard.exec.v1 import exec_pb2, exec_service_pb2

from services.common.peer_status import peer_status
from services.exec_agent import servicer_attach
from tests.integration.exec_agent.conftest import (
    BACKSTOP,
    SANDBOX,
    Client,
    agent_here,
    new_id,
    problem,
    spec,
)
from tests.integration.exec_agent.terminals import READY, SHELL, attach, failing, resize, tty


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
