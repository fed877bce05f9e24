"""What running a command means, on every runtime: once, in its turn, to its end, with its bytes.

Import the tests, and define the fixture `subject` of the runtime suite, which has trees, terminals, input and ports.
Commands are those of busybox and of any Linux: images differ.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import orchard
import pytest
from orchard.exec.v1 import exec_pb2, exec_service_pb2

from services.common.peer_status import peer_status
from tests.support.runtime_suite import BACKSTOP, Subject
from tests.support.streams import serving
from tests.support.wire import Wire, fields_of, reason_of, seconds

KIBIBYTE, MEBIBYTE = 1 << 10, 1 << 20
EXITED, KILLED = exec_pb2.EXEC_END_EXITED, exec_pb2.EXEC_END_KILLED
NOT_STARTED = exec_pb2.EXEC_END_NOT_STARTED
ENDED, RUNNING, QUEUED = exec_pb2.EXEC_STATE_ENDED, exec_pb2.EXEC_STATE_RUNNING, exec_pb2.EXEC_STATE_QUEUED


@dataclass
class Read:
    """What a stream of output told."""

    data: bytes = b""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    result: exec_pb2.ExecResult | None = None

    def take(self, event: Any) -> None:
        self.data += event.chunk.data
        if event.HasField("gap"):
            self.gaps.append((event.gap.offset, event.gap.size))
        if event.HasField("result"):
            self.result = event.result


def new_id() -> str:
    return f"e-{secrets.token_hex(6)}"


async def start(
    wire: Wire, sandbox: str, *argv: str, exec_id: str = "", wait: float = 60, **spec: Any
) -> exec_service_pb2.StartExecResponse:
    """A command without a shell."""
    command = exec_pb2.ExecSpec(argv=exec_pb2.Argv(args=argv), **spec)
    request = exec_service_pb2.StartExecRequest(
        sandbox_id=sandbox, exec_id=exec_id or new_id(), spec=command, wait=seconds(wait)
    )
    response: exec_service_pb2.StartExecResponse = await wire.call(wire.execs.StartExec, request)
    return response


def streamed(wire: Wire, sandbox: str, exec_id: str, shell: str, *, offset: int = 0, **spec: Any) -> Any:
    """The call that starts, follows and ends."""
    command = exec_pb2.ExecSpec(shell=shell, **spec)
    request = exec_service_pb2.ExecRequest(sandbox_id=sandbox, exec_id=exec_id, spec=command, offset=offset)
    return wire.execs.Exec(request, metadata=wire.metadata, timeout=BACKSTOP)


async def whole(call: Any) -> Read:
    found = Read()
    async for event in call:
        found.take(event)
    return found


async def read(wire: Wire, sandbox: str, exec_id: str, offset: int = 0) -> Read:
    request = exec_service_pb2.ReadOutputRequest(sandbox_id=sandbox, exec_id=exec_id, offset=offset)
    return await whole(wire.execs.ReadOutput(request, metadata=wire.metadata, timeout=BACKSTOP))


async def wait(wire: Wire, sandbox: str, exec_id: str, patience: float = BACKSTOP) -> exec_pb2.Exec:
    request = exec_service_pb2.WaitExecRequest(sandbox_id=sandbox, exec_id=exec_id, wait=seconds(patience))
    found: exec_pb2.Exec = (await wire.call(wire.execs.WaitExec, request, timeout=BACKSTOP + 30)).exec
    return found


async def signal(wire: Wire, sandbox: str, exec_id: str, **fields: Any) -> exec_pb2.Exec:
    request = exec_service_pb2.SignalExecRequest(sandbox_id=sandbox, exec_id=exec_id, **fields)
    found: exec_pb2.Exec = (await wire.call(wire.execs.SignalExec, request)).exec
    return found


async def test_an_id_is_one_run_and_its_output_is_taken_up_where_it_was(subject: Subject) -> None:
    sandbox, wire, exec_id = await subject.ready(), subject.wire, new_id()
    shell = "echo ran >>/tmp/runs; echo one; until [ -e /tmp/go ]; do sleep 0.05; done; echo two; cat /tmp/runs"
    call = streamed(wire, sandbox, exec_id, shell)
    async for event in call:
        if event.HasField("chunk"):
            break
    call.cancel()
    repeats = await asyncio.gather(*(wire.run(sandbox, shell, exec_id=exec_id, wait=0) for _ in range(5)))
    assert len({reply.exec.pid for reply in repeats}) == 1
    assert {reply.exec.state for reply in repeats} == {RUNNING}, "whoever leaves ends nothing"
    again = asyncio.ensure_future(whole(streamed(wire, sandbox, exec_id, shell, offset=len("one\n"))))
    await wire.output(sandbox, "touch /tmp/go", concurrent=True)
    assert (await again).data == b"two\nran\n"
    found = await read(wire, sandbox, exec_id)
    assert (found.data, found.gaps) == (b"one\ntwo\nran\n", [])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.run(sandbox, "echo something else", exec_id=exec_id)
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.ALREADY_EXISTS, "EXEC_ID_REUSED")
    await wire.delete(sandbox)


async def test_commands_have_their_turn_in_the_order_in_which_they_came(subject: Subject) -> None:
    sandbox, wire = await subject.ready(), subject.wire
    first, left = new_id(), new_id()
    await wire.run(sandbox, "until [ -e /tmp/open ]; do sleep 0.05; done", exec_id=first, wait=0)
    names = [new_id() for _ in range(6)]
    for number, name in enumerate(names):
        reply = await wire.run(sandbox, f"echo {number} >>/tmp/turns", exec_id=name, wait=0)
        assert reply.exec.state == QUEUED
    # One that is cancelled in the queue, one that would wait no longer, and one that needs no turn.
    await wire.run(sandbox, "echo left >>/tmp/turns", exec_id=left, wait=0)
    assert (await signal(wire, sandbox, left, cancel=True)).result.ended == NOT_STARTED
    late = (await wire.run(sandbox, "echo late >>/tmp/turns", queue_timeout=seconds(0.2))).exec.result
    assert (late.ended, late.HasField("start_time")) == (NOT_STARTED, False)
    assert await wire.output(sandbox, "cat /tmp/turns 2>/dev/null || echo none", concurrent=True) == b"none\n"
    await wire.output(sandbox, "touch /tmp/open", concurrent=True)
    for name in names:
        assert (await wait(wire, sandbox, name)).result.exit_code == 0
    assert (await wire.output(sandbox, "cat /tmp/turns")).split() == [b"%d" % number for number in range(6)]
    await wire.delete(sandbox)


async def test_a_child_in_the_background_holds_nothing_up_and_its_output_is_kept(subject: Subject) -> None:
    sandbox, wire, exec_id = await subject.ready(), subject.wire, new_id()
    child = "(until [ -e /tmp/go ]; do sleep 0.05; done; echo late; touch /tmp/done) & echo now"
    result = (await wire.run(sandbox, child, exec_id=exec_id)).exec.result
    assert (result.ended, result.exit_code) == (EXITED, 0)
    assert (await read(wire, sandbox, exec_id)).data == b"now\n"
    await wire.output(sandbox, "touch /tmp/go; until [ -e /tmp/done ]; do sleep 0.05; done")
    assert (await read(wire, sandbox, exec_id)).data == b"now\nlate\n"
    await wire.delete(sandbox)


async def test_what_is_kept_no_longer_is_a_gap_that_says_how_much(subject: Subject) -> None:
    sandbox, wire, exec_id = await subject.ready(), subject.wire, new_id()
    shell = "head -c 1048576 /dev/zero | tr '\\0' x"
    result = (await wire.run(sandbox, shell, exec_id=exec_id, retained_limit_bytes=128 * KIBIBYTE)).exec.result
    dropped = MEBIBYTE - 128 * KIBIBYTE
    assert (result.output_bytes, result.dropped_bytes) == (MEBIBYTE, dropped)
    found = await read(wire, sandbox, exec_id)
    assert (found.gaps, found.data) == ([(0, dropped)], b"x" * (128 * KIBIBYTE))
    await wire.delete(sandbox)


async def test_long_arguments_texts_and_inputs_arrive_whole(subject: Subject) -> None:
    """A mebibyte of arguments, 200 KB of shell, 50 MiB of input; of one that no kernel takes its place is told."""
    sandbox, wire, exec_id = await subject.ready(), subject.wire, new_id()
    count = 'n=0; for a in "$@"; do n=$((n+${#a})); done; echo $# $n'
    reply = await start(wire, sandbox, "sh", "-c", count, "sh", *["a" * (64 * KIBIBYTE)] * 15)
    assert b"".join(chunk.data for chunk in reply.output) == b"15 %d\n" % (15 * 64 * KIBIBYTE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await start(wire, sandbox, "echo", "x" * (128 * KIBIBYTE))
    assert (caught.value.code(), fields_of(caught.value)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        ["spec.argv.args[1]"],
    )
    assert await wire.output(sandbox, f"x='{'y' * 200_000}'; echo ${{#x}}") == b"200000\n"
    block = secrets.token_bytes(MEBIBYTE)
    await start(wire, sandbox, "sha256sum", exec_id=exec_id, wait=0, stdin_mode=exec_pb2.STDIN_MODE_PIPE)

    def parts() -> Iterator[Any]:
        begun = exec_service_pb2.WriteStdinStart(exec_id=exec_id)
        yield exec_service_pb2.WriteStdinRequest(sandbox_id=sandbox, start=begun)
        for _ in range(50):
            yield exec_service_pb2.WriteStdinRequest(data=block[: MEBIBYTE // 2])
            yield exec_service_pb2.WriteStdinRequest(data=block[MEBIBYTE // 2 :])
        yield exec_service_pb2.WriteStdinRequest(end=True)

    call = wire.execs.WriteStdin(parts(), metadata=wire.metadata, timeout=BACKSTOP)
    with peer_status(call):
        assert (await call).state.offset == 50 * MEBIBYTE
    assert (await wait(wire, sandbox, exec_id)).result.exit_code == 0
    assert (await read(wire, sandbox, exec_id)).data.split()[0].decode() == hashlib.sha256(block * 50).hexdigest()
    await wire.delete(sandbox)


async def test_a_directory_that_is_missing_is_an_error_and_never_the_root(subject: Subject) -> None:
    sandbox, wire = await subject.ready(), subject.wire
    await wire.output(sandbox, "echo >/tmp/file")
    for cwd, reason in (("/nowhere", "CWD_NOT_FOUND"), ("/tmp/file", "CWD_NOT_A_DIRECTORY")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wire.run(sandbox, "echo >/tmp/ran", cwd=cwd)
        assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
        assert cwd in str(caught.value.details())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await start(wire, sandbox, "no-such-program")
    assert reason_of(caught.value) == "COMMAND_NOT_FOUND"
    assert await wire.output(sandbox, "test -e /tmp/ran || echo nothing ran; pwd", cwd="/tmp") == b"nothing ran\n/tmp\n"
    await wire.delete(sandbox)


async def test_a_cancel_ends_a_command_before_it_came_while_it_runs_and_when_nobody_asks(subject: Subject) -> None:
    sandbox, wire = await subject.ready(), subject.wire
    unborn, running, orphan = new_id(), new_id(), new_id()
    assert (await signal(wire, sandbox, unborn, cancel=True)).state == ENDED
    assert (await wire.run(sandbox, "echo >/tmp/ran", exec_id=unborn)).exec.result.ended == NOT_STARTED
    tree = "setsid sleep 98767 & sleep 98767"
    await wire.run(sandbox, tree, exec_id=running, wait=0, concurrent=True)
    await signal(wire, sandbox, running, cancel=True)
    assert (await wait(wire, sandbox, running)).result.ended == KILLED
    call = streamed(wire, sandbox, orphan, "echo up; sleep 98767", orphan_timeout=seconds(1), concurrent=True)
    async for event in call:
        if event.HasField("chunk"):
            break
    call.cancel()
    request = exec_service_pb2.ListExecsRequest(sandbox_id=sandbox, page_size=1000)
    async with asyncio.timeout(BACKSTOP):
        # A list is no call for it: to wait would be one.
        while True:
            listed = (await wire.call(wire.execs.ListExecs, request)).execs
            (found,) = (one for one in listed if one.exec_id == orphan)
            if found.state == ENDED:
                break
            await asyncio.sleep(0.1)
    assert found.result.ended == exec_pb2.EXEC_END_ORPHANED
    left = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep 9876[7]' || true"
    async with asyncio.timeout(BACKSTOP):
        # The end is told after a bounded time, also where a busy machine has not caught the last of them by then.
        while await wire.output(sandbox, left) != b"0\n":
            pass
    assert await wire.output(sandbox, "test -e /tmp/ran || echo nothing ran") == b"nothing ran\n"
    await wire.delete(sandbox)


async def test_a_timeout_is_told_with_what_was_written_and_a_calls_deadline_is_none(subject: Subject) -> None:
    sandbox, wire, slow = await subject.ready(), subject.wire, new_id()
    reply = await wire.run(sandbox, "echo partial; sleep 1000", timeout=seconds(3), kill_grace=seconds(0.5))
    result = reply.exec.result
    assert (result.ended, result.exit_code) == (exec_pb2.EXEC_END_TIMED_OUT, -1)
    assert b"".join(chunk.data for chunk in reply.output) == b"partial\n"
    for code in (124, 143):
        own = (await wire.run(sandbox, f"exit {code}")).exec.result
        assert (own.ended, own.exit_code) == (EXITED, code)
    await wire.run(sandbox, "until [ -e /tmp/go ]; do sleep 0.05; done; echo went", exec_id=slow, wait=0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        request = exec_service_pb2.WaitExecRequest(sandbox_id=sandbox, exec_id=slow, wait=seconds(60))
        await wire.call(wire.execs.WaitExec, request, timeout=0.3)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await wire.output(sandbox, "touch /tmp/go", concurrent=True)
    found = await read(wire, sandbox, slow)
    assert found.result is not None
    assert (found.data, found.result.ended) == (b"went\n", EXITED)
    await wire.delete(sandbox)


async def test_signals_and_masks_are_as_a_program_expects_them(subject: Subject) -> None:
    sandbox, wire = await subject.ready(), subject.wire
    assert (
        await wire.output(sandbox, "grep -E 'Sig(Blk|Ign)' /proc/self/status | cut -f2 | sort -u") == b"0" * 16 + b"\n"
    )
    piped = await wire.run(sandbox, "yes | head -n 1")
    assert [(chunk.stream, chunk.data) for chunk in piped.output] == [(exec_pb2.OUTPUT_STREAM_STDOUT, b"y\n")]
    assert (await wire.output(sandbox, "umask")).strip() in {b"0022", b"022"}
    await wire.delete(sandbox)


async def test_an_agent_that_was_killed_knows_what_ran_and_runs_none_of_it_again(subject: Subject) -> None:
    sandbox, wire = await subject.ready(), subject.wire
    finished, cut = new_id(), new_id()
    await wire.run(sandbox, "echo finished | tee -a /tmp/runs", exec_id=finished)
    await wire.run(sandbox, "echo cut >>/tmp/runs; sleep 1000", exec_id=cut, wait=0, concurrent=True)
    await subject.output(sandbox, "until grep -q cut /tmp/runs; do sleep 0.05; done")
    try:
        await wire.run(sandbox, "kill -9 -1")
    except grpc.aio.AioRpcError as error:
        assert error.code() == grpc.StatusCode.UNAVAILABLE, error.details()
    assert await subject.output(sandbox, "echo again") == b"again\n"
    found = await read(wire, sandbox, finished)
    assert found.result is not None
    assert (found.data, found.result.ended, found.result.exit_code) == (b"finished\n", EXITED, 0)
    ended = (await wait(wire, sandbox, cut)).result.ended
    # By the signal, where the agent was still there to see it.
    assert ended in (exec_pb2.EXEC_END_AGENT_RESTARTED, exec_pb2.EXEC_END_SIGNALLED)
    for exec_id, shell in ((finished, "echo finished | tee -a /tmp/runs"), (cut, "echo cut >>/tmp/runs; sleep 1000")):
        concurrent = exec_id == cut
        assert (await wire.run(sandbox, shell, exec_id=exec_id, concurrent=concurrent)).exec.state == ENDED
    assert await subject.output(sandbox, "cat /tmp/runs") == b"finished\ncut\n"
    await wire.delete(sandbox)


# Sends its input to a port of loopback, ends its side, and writes what comes back.
ASK = """
if command -v python3 >/dev/null; then
    exec python3 -c "
import socket, sys
with socket.create_connection(('127.0.0.1', {port})) as s:
    s.sendall(sys.stdin.buffer.read())
    s.shutdown(socket.SHUT_WR)
    while data := s.recv(65536):
        sys.stdout.buffer.write(data)"
fi
exec nc 127.0.0.1 {port}
"""


async def test_an_endpoint_of_the_platform_is_a_port_inside_without_a_network(subject: Subject) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 18):
            writer.write(data)
            await writer.drain()

    content = secrets.token_bytes(100_000)
    ask = f"({ASK.format(port=8080)}) | sha256sum"
    async with (
        serving(echo, port=subject.offered),
        orchard.AsyncSandboxClient(subject.endpoint, api_key=subject.api_key) as client,
        await client.create(subject.image or None, network="none") as sandbox,
        sandbox.expose("echo", 8080) as address,
    ):
        assert (address.host, address.port) == ("127.0.0.1", 8080)
        runs = (sandbox.exec(ask, input=content, concurrent=True, check=True) for _ in range(3))
        answers = [result.stdout.split()[0] for result in await asyncio.gather(*runs)]
        assert answers == [hashlib.sha256(content).hexdigest()] * 3
        with pytest.raises(orchard.NotFound, match="there are echo"):
            async with sandbox.expose("another"):
                pass
