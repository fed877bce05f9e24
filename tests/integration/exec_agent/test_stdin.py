"""What is written to a command while it runs."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from orchard.exec.v1 import exec_pb2, exec_service_pb2

from services.common.errors import FailedPreconditionError
from services.common.peer_status import peer_status
from services.exec_agent.stdin import BUFFER_BYTES, Stdin
from tests.integration.exec_agent.conftest import BACKSTOP, SANDBOX, Client, new_id, problem, spec

PIPE = exec_pb2.STDIN_MODE_PIPE
MIB = 1 << 20


def requests(
    exec_id: str, pieces: Sequence[bytes], offset: int = 0, *, end: bool = False
) -> Iterator[exec_service_pb2.WriteStdinRequest]:
    start = exec_service_pb2.WriteStdinStart(exec_id=exec_id, offset=offset)
    yield exec_service_pb2.WriteStdinRequest(sandbox_id=SANDBOX, start=start)
    for piece in pieces:
        yield exec_service_pb2.WriteStdinRequest(data=piece)
    if end:
        yield exec_service_pb2.WriteStdinRequest(end=True)


async def write(
    client: Client, exec_id: str, *pieces: bytes, offset: int = 0, end: bool = False
) -> exec_pb2.StdinState:
    call = client.stub.WriteStdin(
        requests(exec_id, pieces, offset, end=end), metadata=client.metadata, timeout=BACKSTOP
    )
    with peer_status(call):
        return (await call).state


async def stdin(client: Client, exec_id: str) -> exec_pb2.StdinState:
    request = exec_service_pb2.GetStdinRequest(sandbox_id=SANDBOX, exec_id=exec_id)
    return (await client.stub.GetStdin(request, metadata=client.metadata, timeout=BACKSTOP)).state


async def started(client: Client, *argv: str, **fields: object) -> str:
    exec_id = new_id()
    await client.start(spec(*argv, stdin_mode=PIPE, **fields), wait=0, exec_id=exec_id)
    return exec_id


async def test_fifty_mebibytes_arrive_byte_for_byte(client: Client) -> None:
    block = os.urandom(MIB)
    exec_id = await started(client, "sha256sum")
    state = await write(client, exec_id, *[block] * 50, end=True)
    assert (state.offset, state.closed) == (50 * MIB, True)
    await client.wait(exec_id)
    assert (await client.read(exec_id)).stdout.split()[0].decode() == hashlib.sha256(block * 50).hexdigest()


async def test_what_was_taken_is_skipped_and_a_hole_is_refused(client: Client) -> None:
    exec_id = await started(client, "cat")
    assert (await write(client, exec_id, b"abc", b"def")).offset == 6
    assert (await write(client, exec_id, b"abc", b"def")).offset == 6
    assert (await write(client, exec_id, b"efgh", offset=4)).offset == 8
    with problem() as found:
        await write(client, exec_id, b"later", offset=9)
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.OUT_OF_RANGE, "STDIN_OFFSET_AHEAD")
    assert "from 8 on" in found[0].message
    state = await stdin(client, exec_id)
    assert (state.offset, state.closed) == (8, False)
    await write(client, exec_id, b"gh", offset=6, end=True)
    await write(client, exec_id, b"gh", offset=6, end=True)
    await client.wait(exec_id)
    assert (await client.read(exec_id)).stdout == b"abcdefgh"


async def test_a_stream_without_an_end_leaves_the_input_open(client: Client) -> None:
    exec_id = await started(client, "cat")
    await write(client, exec_id, b"one ")
    assert await client.until_output(exec_id, b"one ") == b"one "
    await write(client, exec_id, b"two", offset=4)
    assert await client.until_output(exec_id, b"two") == b"one two"
    await write(client, exec_id, offset=7, end=True)
    assert (await client.wait(exec_id)).result.exit_code == 0


async def test_nothing_more_is_taken_of_a_write_behind_which_another_begins(client: Client, work: Path) -> None:
    """A client that has given the first one up asks where to go on; the agent may not have heard of that yet."""
    exec_id = await started(client, "sh", "-c", f"until test -e {work}/go; do sleep 0.01; done; exec cat")
    given_up = asyncio.ensure_future(write(client, exec_id, *[bytes(MIB)] * 2, end=True))
    while (await stdin(client, exec_id)).offset < BUFFER_BYTES:
        pass
    offset = (await write(client, exec_id)).offset
    (work / "go").touch()
    assert (await asyncio.wait_for(given_up, BACKSTOP)).offset == offset
    await write(client, exec_id, b"the second", offset=offset, end=True)
    await client.wait(exec_id)
    assert (await client.read(exec_id)).stdout == bytes(offset) + b"the second"


async def test_a_command_that_never_reads_holds_up_nobody_else(client: Client) -> None:
    exec_id = await started(client, "sleep", "1000", concurrent=True)
    writing = asyncio.ensure_future(write(client, exec_id, *[bytes(MIB)] * 4))
    while (await stdin(client, exec_id)).offset < BUFFER_BYTES:
        pass
    for _ in range(3):
        assert (await client.run(spec("echo", "alive", concurrent=True))).stdout == b"alive\n"
    state = await stdin(client, exec_id)
    assert state.offset - state.written <= BUFFER_BYTES
    assert not writing.done()
    await client.signal(exec_id, signal=9)
    with problem() as found:
        await writing
    assert found[0].reason == "STDIN_CLOSED"


async def test_writing_to_what_has_closed_its_input_is_an_error(client: Client) -> None:
    exec_id = await started(client, "sh", "-c", "exec <&-; echo closed; exec sleep 1000", concurrent=True)
    await client.until_output(exec_id, b"closed\n")
    with problem() as found:
        offset = 0
        while True:  # until its reaper has let go of the pipe too
            offset = (await write(client, exec_id, b"too late", offset=offset)).offset
    assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STDIN_CLOSED")
    assert (await stdin(client, exec_id)).closed
    await client.signal(exec_id, signal=9)


async def test_writing_to_what_has_ended_is_an_error(client: Client) -> None:
    exec_id = await started(client, "true")
    await client.wait(exec_id)
    with problem() as found:
        await write(client, exec_id, b"x")
    assert found[0].reason == "STDIN_CLOSED"
    assert (await stdin(client, exec_id)).closed
    # What was taken before may be repeated, and so may the end.
    assert (await write(client, exec_id, end=True)).closed


async def test_nothing_follows_the_end(client: Client) -> None:
    exec_id = await started(client, "sleep", "1000", concurrent=True)
    await write(client, exec_id, b"all", end=True)
    with problem() as found:
        await write(client, exec_id, b"more", offset=3)
    assert found[0].reason == "STDIN_CLOSED"
    await client.signal(exec_id, signal=9)


async def test_a_queued_command_takes_its_input_before_it_runs(client: Client) -> None:
    first, second = new_id(), new_id()
    await client.start(spec("sleep", "1000"), wait=0, exec_id=first)
    await client.start(spec("cat", stdin_mode=PIPE), wait=0, exec_id=second)
    state = await write(client, second, b"early", end=True)
    assert (state.offset, state.written) == (5, 0)
    await client.signal(first, signal=9)
    await client.wait(second)
    assert (await client.read(second)).stdout == b"early"


async def test_a_child_that_lives_on_reads_what_was_taken(client: Client, work: Path) -> None:
    child = "{ until [ -e go ]; do sleep 0.01; done; cat <&3 >got; touch all; }"
    script = f"exec 3<&0; {child} & until [ -e end ]; do sleep 0.01; done"
    exec_id = await started(client, "sh", "-c", script, cwd=str(work))
    data = os.urandom(128 << 10)  # more than a pipe holds
    await write(client, exec_id, data)
    (work / "end").touch()
    assert (await client.wait(exec_id)).result.exit_code == 0
    (work / "go").touch()
    await client.run(spec(shell="until [ -e all ]; do sleep 0.01; done", cwd=str(work)))
    assert hashlib.sha256((work / "got").read_bytes()).digest() == hashlib.sha256(data).digest()


async def test_a_command_without_open_input_takes_none(client: Client) -> None:
    exec_id = new_id()
    await client.start(spec("sleep", "1000", concurrent=True), wait=0, exec_id=exec_id)
    for call in (lambda: write(client, exec_id, b"x"), lambda: stdin(client, exec_id)):
        with problem() as found:
            await call()
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STDIN_NOT_OPEN")
    await client.signal(exec_id, signal=9)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stdin_mode": PIPE, "stdin": b"x"}, "spec.stdin"),
        ({"stdin_mode": PIPE, "tty": exec_pb2.Tty()}, "spec.stdin_mode"),
        ({"stdin_mode": 7}, "spec.stdin_mode"),
        ({"tty": exec_pb2.Tty(), "stdin": b"x"}, "spec.stdin"),
        ({"tty": exec_pb2.Tty(), "merge_stderr": True}, "spec.merge_stderr"),
        ({"tty": exec_pb2.Tty(term="a b")}, "spec.tty.term"),
        ({"tty": exec_pb2.Tty(size=exec_pb2.WindowSize(rows=0, columns=80))}, "spec.tty.size.rows"),
        ({"tty": exec_pb2.Tty(size=exec_pb2.WindowSize(rows=1, columns=65_536))}, "spec.tty.size.columns"),
    ],
)
async def test_what_cannot_go_together_is_named(client: Client, fields: dict[str, object], named: str) -> None:
    with problem() as found:
        await client.start(spec("true", **fields))
    assert found[0].fields == (named,)


async def test_bad_messages_are_named(client: Client) -> None:
    exec_id = await started(client, "sleep", "1000", concurrent=True)
    start = exec_service_pb2.WriteStdinStart(exec_id=exec_id)
    first = exec_service_pb2.WriteStdinRequest(sandbox_id=SANDBOX, start=start)
    wrong = {
        "start": [exec_service_pb2.WriteStdinRequest(sandbox_id=SANDBOX, data=b"x")],
        "data": [first, first],
        "end": [first, exec_service_pb2.WriteStdinRequest(end=True), exec_service_pb2.WriteStdinRequest(data=b"x")],
    }
    for field, messages in wrong.items():
        call = client.stub.WriteStdin(iter(messages), metadata=client.metadata, timeout=BACKSTOP)
        with problem() as found, peer_status(call):
            await call
        assert found[0].fields == (field,)
    await client.signal(exec_id, signal=9)


async def test_a_call_ends_where_the_command_reads_slowly_for_long() -> None:
    """However steadily: a call that only takes is silent, and the platform ends what is silent."""
    read, end = os.pipe()
    stdin = Stdin()
    stdin.open(end)
    data = os.urandom(MIB)
    taking = asyncio.ensure_future(stdin.take(0, data, patience=0.5))
    got = b""
    try:
        while not taking.done():
            await asyncio.sleep(0.05)  # how slowly it reads: all of it would take ten seconds
            got += os.read(read, 4096)
        assert not await taking
        going_on = asyncio.ensure_future(stdin.take(stdin.offset, data[stdin.offset :], patience=BACKSTOP))
        while len(got) < MIB:
            got += await asyncio.to_thread(os.read, read, MIB)
        assert await going_on
        assert got == data
    finally:
        taking.cancel()
        stdin.close()
        os.close(read)


async def test_a_call_ends_where_the_command_reads_nothing_for_long() -> None:
    read, end = os.pipe()
    stdin = Stdin()
    stdin.open(end)
    try:
        assert not await stdin.take(0, bytes(MIB), patience=0.01)
        assert stdin.offset - stdin.written == BUFFER_BYTES
        # It goes on from there as soon as something is read.
        going_on = asyncio.ensure_future(stdin.take(0, bytes(MIB), patience=BACKSTOP))
        taken = 0
        while taken < MIB:
            taken += len(await asyncio.to_thread(os.read, read, MIB))
        assert await going_on
        os.close(read)
        with pytest.raises(FailedPreconditionError):
            await stdin.take(MIB, b"x")
        assert stdin.closed
        assert stdin.descriptor < 0
    finally:
        stdin.close()
