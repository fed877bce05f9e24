"""What a client writes to its commands, and their terminals."""

from __future__ import annotations

import asyncio
import hashlib
import os

import orchard
import pytest
from orchard import AsyncSandbox, AsyncSandboxClient, Sandbox, Terminal

from tests.integration.client.proxy import Proxy

MIB = 1 << 20


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_program_is_talked_to(sandbox: Sandbox) -> None:
    with sandbox.start("while read line; do echo got-$line; done; echo end", stdin=True) as process:
        output = process.output()
        for word in ("one", "zwei ä"):
            process.write(f"{word}\n")
            assert next(output).data == f"got-{word}\n".encode()
        process.write(b"")
        process.close_stdin()
        process.close_stdin()
        assert process.wait().stdout.endswith("end\n")


def test_long_input_arrives_byte_for_byte(sandbox: Sandbox) -> None:
    data = os.urandom(50 * MIB)
    assert sandbox.exec("sha256sum", input=data).stdout.split()[0] == digest(data)


def test_long_input_goes_in_while_output_comes_out(sandbox: Sandbox) -> None:
    """More both ways than all buffers between hold."""
    data = os.urandom(24 * MIB)
    stream = sandbox.exec_stream(["cat"], input=data)
    assert digest(b"".join(chunk.data for chunk in stream)) == digest(data)
    assert stream.result.ok


def test_long_input_need_not_be_read(sandbox: Sandbox) -> None:
    assert sandbox.exec("head -c 3 >/dev/null; exit 7", input=bytes(4 * MIB)).exit_code == 7
    assert sandbox.exec("true", input=bytes(4 * MIB)).ok


def test_what_is_written_too_late_is_an_error(sandbox: Sandbox) -> None:
    process = sandbox.start("exec <&-; echo closed; sleep 1000", stdin=True)
    assert next(process.output()).data == b"closed\n"
    with pytest.raises(orchard.StdinClosed):
        while True:  # until its reaper has let go of the pipe too
            process.write(b"too late")
    process.kill()
    process.wait()
    with pytest.raises(orchard.StdinClosed):
        process.write(b"much too late")
    process.close_stdin()


def test_another_client_goes_on_where_the_first_one_was(sandbox: Sandbox) -> None:
    first = sandbox.start(["cat"], stdin=True)
    first.write(b"one ")
    second = sandbox.process(first.exec_id)
    second.write(b"two")
    second.close_stdin()
    assert first.wait().stdout == "one two"


def test_what_cannot_be_meant_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(orchard.InvalidArgument, match="stdin"):
        sandbox.exec("cat", stdin=True)
    with pytest.raises(orchard.InvalidArgument, match="stdin"):
        sandbox.start("cat", stdin=True, input=b"x")
    with pytest.raises(orchard.InvalidArgument, match="input"):
        sandbox.start("cat", input=bytes(MIB))
    with pytest.raises(orchard.InvalidArgument, match="tty"):
        sandbox.start("cat", tty="xterm")  # type: ignore[arg-type]
    process = sandbox.start("sleep 1000")
    with pytest.raises(orchard.FailedPrecondition) as caught:
        process.write(b"x")
    assert caught.value.reason == "STDIN_NOT_OPEN"
    with pytest.raises(orchard.FailedPrecondition) as caught:
        process.resize(10, 10)
    assert caught.value.reason == "NO_TTY"
    process.kill()


def test_a_terminal_is_typed_into_and_resized(sandbox: Sandbox) -> None:
    script = "trap 'stty size' WINCH; read line; echo $line on $TERM; while :; do sleep 0.01; done"
    with sandbox.start(script, tty=Terminal(rows=30, columns=90, term="vt220")) as process:
        output = process.output()
        process.write("word\r")
        seen = b""
        while b"word on vt220" not in seen:
            seen += next(output).data
        process.resize(40, 100)
        while b"40 100" not in seen:
            seen += next(output).data
    assert sandbox.exec("stty size; tty", tty=True).stdout.startswith("24 80\r\n/dev/")


async def test_each_byte_arrives_once_though_connections_break(
    shaky: AsyncSandboxClient, asandbox: AsyncSandbox, proxy: Proxy
) -> None:
    data = os.urandom(6 * MIB)
    process = await shaky.attach(asandbox.sandbox_id).start(["cat"], stdin=True)
    seen = asandbox.process(process.exec_id)

    async def write() -> None:
        for begin in range(0, len(data), 3 * MIB):
            await process.write(data[begin : begin + 3 * MIB])
        await process.close_stdin()

    writing = asyncio.create_task(write())
    for passed in range(MIB, 6 * MIB, MIB):
        while not writing.done() and (await seen.info()).output_size < passed:
            pass
        proxy.cut()
    await writing
    assert digest((await process.wait()).stdout_bytes) == digest(data)


async def test_writes_that_are_asked_for_together_keep_their_order(asandbox: AsyncSandbox) -> None:
    process = await asandbox.start(["cat"], stdin=True)
    await asyncio.gather(*(process.write(f"{number}\n") for number in range(50)))
    await process.close_stdin()
    assert (await process.wait()).stdout == "".join(f"{number}\n" for number in range(50))


async def test_what_is_written_after_a_write_that_was_cancelled_arrives(asandbox: AsyncSandbox) -> None:
    """Nobody knows how much of the first was taken; the second is not taken for a repeat of it."""
    go_on = "/tmp/written-after-a-cancelled-write"
    command = f"head -c 300000 >/dev/null; until test -e {go_on}; do sleep 0.02; done; cat"
    process = await asandbox.start(command, stdin=True, concurrent=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await process.write(bytes(MIB))
    await asandbox.write_file(go_on, b"")
    await process.write(b"the second")
    await process.close_stdin()
    assert (await process.wait()).stdout_bytes.endswith(b"the second")
