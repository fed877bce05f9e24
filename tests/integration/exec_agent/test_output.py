"""Output is the command's bytes: all of them, in order, for every reader, in bounded memory."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import grpc
import pytest
from orchard.exec.v1 import exec_pb2

from tests.integration.exec_agent.conftest import AgentProcess, Client, Output, new_id, problem, spec

KIB, MIB = 1 << 10, 1 << 20
PYTHON = "/usr/bin/python3"


def blocks(size: int, seed: int = 1) -> bytes:
    """Bytes that no wrong order or loss leaves equal."""
    return hashlib.shake_128(seed.to_bytes(4, "little")).digest(size)


async def test_binary_and_invalid_utf8_pass_untouched(client: Client, work: Path) -> None:
    content = bytes(range(256)) * 40 + b"\xff\xfe\xc3\x28\r\n\0end without a newline"
    (work / "in").write_bytes(content)
    assert (await client.run(spec("cat", f"{work}/in"))).stdout == content
    assert (await client.stream(spec("cat", f"{work}/in"))).stdout == content


async def test_no_newline_is_invented(client: Client) -> None:
    assert (await client.run(spec("printf", "x"))).stdout == b"x"
    assert (await client.run(spec("printf", "x\n\n"))).stdout == b"x\n\n"
    assert (await client.run(spec("true"))).everything == b""


async def test_a_character_split_over_two_writes_arrives_whole(client: Client) -> None:
    script = "import os, time\nfor b in '\u20ac\U0001f600'.encode(): os.write(1, bytes([b])); time.sleep(0.01)"
    output = await client.stream(spec(PYTHON, "-c", script))
    assert output.stdout.decode() == "\u20ac\U0001f600"


async def test_a_million_lines(client: Client) -> None:
    output = await client.stream(spec("seq", "1000000"))
    assert output.stdout == b"".join(b"%d\n" % n for n in range(1, 1_000_001))
    assert output.gaps == []


async def test_large_output_on_both_streams_is_exact(client: Client, work: Path) -> None:
    out, err = blocks(5 * MIB, 1), blocks(3 * MIB, 2)
    (work / "out").write_bytes(out)
    (work / "err").write_bytes(err)
    output = await client.stream(spec(shell=f"cat {work}/out & cat {work}/err >&2; wait"))
    assert output.stdout == out
    assert output.stderr == err
    assert output.result is not None
    assert output.result.output_bytes == 8 * MIB
    assert output.result.dropped_bytes == 0


async def test_output_inline_ends_at_its_limit(client: Client, work: Path) -> None:
    content = blocks(600 * KIB)
    (work / "in").write_bytes(content)
    exec_id = new_id()
    response = await client.start(spec("cat", f"{work}/in"), exec_id=exec_id)
    inline = b"".join(chunk.data for chunk in response.output)
    assert not response.output_complete
    assert inline == content[: 512 * KIB]
    assert (await client.read(exec_id, len(inline))).stdout == content[512 * KIB :]
    assert (await client.run(spec("head", "-c", str(512 * KIB), f"{work}/in"))).stdout == content[: 512 * KIB]


async def test_readers_late_early_and_at_any_offset(client: Client, work: Path) -> None:
    content = blocks(3 * MIB)
    (work / "in").write_bytes(content)
    exec_id = new_id()
    command = spec(shell=f"cat {work}/in; read x < {work}/go; printf end")
    await client.run(spec("mkfifo", f"{work}/go"))
    call = client.exec_call(command, exec_id)
    early = Output()
    async for event in call:
        early.take(event)
        if len(early.stdout) == 3 * MIB:
            break
    assert early.stdout == content
    now = await client.read(exec_id, no_follow=True)
    assert now.stdout == content
    assert now.result is None, "it has not ended"
    follower = asyncio.create_task(client.read(exec_id, 3 * MIB - 10))
    ahead = asyncio.create_task(client.read(exec_id, 3 * MIB + 2))
    await client.run(spec(shell=f"echo > {work}/go", concurrent=True))
    assert (await follower).stdout == content[-10:] + b"end"
    assert (await ahead).stdout == b"d"
    async for event in call:
        early.take(event)
    assert early.stdout == content + b"end"
    for offset in (0, 1, 64 * KIB, 2 * MIB + 12345, 3 * MIB + 3):
        late = await client.read(exec_id, offset)
        assert late.stdout == (content + b"end")[offset:]
        assert late.result is not None
    with problem() as found:
        await client.read(exec_id, 3 * MIB + 4)
    assert found[0].code == grpc.StatusCode.OUT_OF_RANGE


async def test_exec_attaches_again_and_runs_once(client: Client, work: Path) -> None:
    exec_id = new_id()
    command = spec(shell=f"echo ran >> {work}/log; echo one; read x < {work}/go; echo two")
    await client.run(spec("mkfifo", f"{work}/go"))
    call = client.exec_call(command, exec_id)
    async for event in call:
        if event.WhichOneof("event") == "chunk":
            break
    call.cancel()
    again = asyncio.create_task(client.stream(command, exec_id, offset=4))
    await client.run(spec(shell=f"echo > {work}/go", concurrent=True))
    output = await again
    assert output.stdout == b"two\n"
    assert (await client.stream(command, exec_id)).stdout == b"one\ntwo\n"
    assert (work / "log").read_text() == "ran\n"


async def test_twenty_readers_get_the_same(client: Client, work: Path) -> None:
    content = blocks(2 * MIB)
    (work / "in").write_bytes(content)
    exec_id = new_id()
    await client.start(spec(shell=f"cat {work}/in; sleep 0.2; cat {work}/in"), wait=0, exec_id=exec_id)
    for output in await asyncio.gather(*(client.read(exec_id, offset * 1000) for offset in range(20))):
        assert output.stdout == (content * 2)[output.begin :]
        assert output.gaps == []


async def test_a_reader_that_dies_disturbs_no_other(client: Client) -> None:
    exec_id = new_id()
    await client.start(spec("head", "-c", str(12 * MIB), "/dev/zero"), wait=0, exec_id=exec_id)
    dead = [client.read_call(exec_id) for _ in range(5)]
    for call in dead:
        await call.read()
    survivor = asyncio.create_task(client.read(exec_id))
    for call in dead:
        call.cancel()
    output = await survivor
    assert len(output.stdout) == 12 * MIB
    assert output.gaps == []


async def test_what_is_not_retained_is_an_explicit_gap(client: Client, work: Path) -> None:
    content = blocks(1 * MIB)
    (work / "in").write_bytes(content)
    exec_id = new_id()
    response = await client.start(spec("cat", f"{work}/in", retained_limit_bytes=128 * KIB), exec_id=exec_id)
    assert response.exec.result.output_bytes == 1 * MIB
    assert response.exec.result.dropped_bytes == 1 * MIB - 128 * KIB
    assert not response.output_complete
    assert len(response.output) == 0
    late = await client.read(exec_id)
    assert late.gaps == [(0, 1 * MIB - 128 * KIB)]
    assert late.stdout == content[-128 * KIB :]
    middle = await client.read(exec_id, 1 * MIB - 1000)
    assert (middle.gaps, middle.stdout) == ([], content[-1000:])


async def test_a_slow_reader_slows_its_command_and_loses_nothing(client: Client, work: Path) -> None:
    content = blocks(24 * MIB)
    (work / "in").write_bytes(content)
    exec_id = new_id()
    # 24 MiB do not fit into the ring and what the stream buffers: the command has to wait for its reader.
    call = client.exec_call(spec("cat", f"{work}/in", retained_limit_bytes=512 * KIB), exec_id)
    output = Output()
    output.take(await call.read())
    other = await client.run(spec("true", concurrent=True))
    assert other.result is not None
    assert other.result.exit_code == 0, "another command is not slowed"
    held = await client.wait(exec_id, 0.3)
    assert held.state == exec_pb2.EXEC_STATE_RUNNING
    assert held.output_bytes < 20 * MIB
    while (event := await call.read()) is not grpc.aio.EOF:
        output.take(event)
    assert output.gaps == []
    assert output.stdout == content


async def test_a_reader_that_keeps_up_slows_nothing_however_little_is_retained(client: Client) -> None:
    size = 24 * MIB
    command = spec("head", "-c", str(size), "/dev/zero", retained_limit_bytes=64 * KIB)
    output = await client.stream(command)  # half a minute for each stall would be far past the call's deadline
    assert (len(output.stdout), output.gaps) == (size, [])


async def test_a_command_without_readers_is_never_slowed(client: Client) -> None:
    response = await client.start(spec("head", "-c", str(100 * MIB), "/dev/zero", retained_limit_bytes=64 * KIB))
    assert response.exec.result.output_bytes == 100 * MIB


@pytest.mark.parametrize("wait", [0.0, 60.0])
@pytest.mark.parametrize("queued", [False, True])
async def test_whoever_reads_on_finds_all_however_much_is_written_before(
    client: Client, work: Path, wait: float, queued: bool
) -> None:
    content, exec_id = blocks(8 * MIB), new_id()
    (work / "in").write_bytes(content)
    if queued:
        await client.start(spec(shell=f"until [ -e {work}/go ]; do sleep 0.05; done"), wait=0)
    command = spec("cat", f"{work}/in", retained_limit_bytes=256 * KIB)
    starting = asyncio.ensure_future(client.start(command, wait, exec_id, reads_on=True))
    if queued:
        while (await client.list())[0].exec_id != exec_id:
            pass
        (work / "go").touch()
    response = await starting
    # There is more than an answer takes: it does not wait for an end that waits for its reader.
    assert response.exec.state != exec_pb2.EXEC_STATE_ENDED
    if wait:
        assert (await client.wait(exec_id, 0.3)).output_bytes <= 256 * KIB
    found = await client.read(exec_id)
    assert (found.gaps, found.stdout == content) == ([], True)
    assert found.result is not None
    assert (found.result.exit_code, found.result.dropped_bytes) == (0, len(content) - 256 * KIB)


async def test_whoever_reads_on_finds_all_though_others_who_would_have_are_gone(client: Client, work: Path) -> None:
    """As where a start is repeated: the gateway of the one before is cut off only then."""
    content, exec_id = blocks(8 * MIB), new_id()
    (work / "in").write_bytes(content)
    # So much that the next read may overwrite some; no read of it is a full one, which would make the next ones larger.
    parts = (60 * KIB, 60 * KIB, 60 * KIB, 10 * KIB, 4 * KIB)
    little = "; ".join(
        f"head -c {size}; until [ -e {work}/{part} ]; do sleep 0.05; done" for part, size in enumerate(parts)
    )
    command = spec(shell=f"{{ {little}; cat; }} <{work}/in", retained_limit_bytes=256 * KIB)
    calls = [client.start_call(command, 60, exec_id, reads_on=True) for _ in range(9)]
    for part in range(len(parts)):
        while (await client.wait(exec_id, 0)).output_bytes < sum(parts[: part + 1]):
            await asyncio.sleep(0.01)
        if part < len(parts) - 1:
            (work / str(part)).touch()
    stays = calls.pop(4)
    for call in calls:
        call.cancel()
    for _ in range(20):  # behind them on the connection
        await client.list()
    (work / str(len(parts) - 1)).touch()
    assert (await stays).exec.state == exec_pb2.EXEC_STATE_RUNNING
    found = await client.read(exec_id)
    assert (found.gaps, found.stdout == content) == ([], True)


async def test_a_command_waits_not_for_ever_for_a_reader_that_never_comes(client: Client) -> None:
    command = spec("head", "-c", str(8 * MIB), "/dev/zero", retained_limit_bytes=256 * KIB, concurrent=True)
    left, cut = new_id(), new_id()
    assert (await client.start(command, 60, left, reads_on=True)).exec.state == exec_pb2.EXEC_STATE_RUNNING
    # One that is cut off might be a gateway that was killed, whose client comes back.
    never = spec(shell=f"sleep 0.3; head -c {8 * MIB} /dev/zero", retained_limit_bytes=256 * KIB, concurrent=True)
    call = client.start_call(never, 60, cut, reads_on=True)
    await call.wait_for_connection()
    while not any(one.exec_id == cut for one in await client.list()):
        pass
    call.cancel()
    for exec_id in (cut, left):
        ended = await client.wait(exec_id)
        assert (ended.state, ended.output_bytes) == (exec_pb2.EXEC_STATE_ENDED, 8 * MIB)


@pytest.mark.parametrize("seconds", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("how", ["exec", "read"])
async def test_a_reader_that_is_cut_off_and_comes_back_finds_all(
    client: Client, work: Path, how: str, seconds: float
) -> None:
    """As where a gateway is killed: what was on its way is lost with it, and the command writes on meanwhile."""
    content, exec_id = blocks(300 * MIB), new_id()
    (work / "in").write_bytes(content)
    command = spec("cat", f"{work}/in", concurrent=True)
    if how == "exec":
        call = client.exec_call(command, exec_id)
    else:
        await client.start(command, 0, exec_id, reads_on=True)
        call = client.read_call(exec_id, 0)
    found = bytearray()
    async for event in call:
        if event.HasField("chunk"):
            assert event.chunk.offset == len(found)
            found += event.chunk.data
            if len(found) > 50 * MIB:
                break
    call.cancel()
    await asyncio.sleep(seconds)
    async for event in client.read_call(exec_id, len(found)):
        assert not event.HasField("gap"), (event.gap.offset, event.gap.size)
        if event.HasField("chunk"):
            found += event.chunk.data
    assert found == content


async def test_a_command_waits_not_for_ever_for_a_reader_that_does_not_come_back(client: Client) -> None:
    exec_id = new_id()
    size = 200 * MIB
    call = client.exec_call(spec("head", "-c", str(size), "/dev/zero"), exec_id)
    async for event in call:
        if event.HasField("chunk"):
            break
    call.cancel()
    ended = await client.wait(exec_id)
    assert (ended.state, ended.output_bytes) == (exec_pb2.EXEC_STATE_ENDED, size)


async def test_a_short_command_is_answered_whole_to_whoever_would_read_on(client: Client) -> None:
    response = await client.start(spec("seq", "1000"), reads_on=True)
    assert response.output_complete
    assert b"".join(chunk.data for chunk in response.output) == b"".join(b"%d\n" % n for n in range(1, 1001))


async def test_output_limit_ends_a_command(client: Client) -> None:
    exec_id = new_id()
    response = await client.start(spec("yes", output_limit_bytes=100_001), exec_id=exec_id)
    result = response.exec.result
    assert (result.ended, result.exit_code) == (exec_pb2.EXEC_END_OUTPUT_LIMIT, -1)
    assert "100,001" in result.message
    output = await client.read(exec_id)
    assert output.stdout == (b"y\n" * 50_001)[:100_001]


@pytest.mark.parametrize("beyond", [-1, 0])
async def test_what_fits_its_output_limit_is_a_result(client: Client, beyond: int) -> None:
    response = await client.start(spec("head", "-c", str(100_000 + beyond), "/dev/zero", output_limit_bytes=100_000))
    result = response.exec.result
    assert (result.ended, result.exit_code) == (exec_pb2.EXEC_END_EXITED, 0)
    assert (result.output_bytes, result.dropped_bytes) == (100_000 + beyond, 0)


@pytest.mark.parametrize("beyond", [1, 100, 64 * KIB])
async def test_output_that_was_cut_is_no_result_however_fast_the_command_ends(client: Client, beyond: int) -> None:
    for _ in range(10):
        command = spec("head", "-c", str(1000 + beyond), "/dev/zero", output_limit_bytes=1000)
        result = (await client.start(command)).exec.result
        assert (result.ended, result.exit_code, result.output_bytes) == (exec_pb2.EXEC_END_OUTPUT_LIMIT, -1, 1000)


async def test_memory_stays_flat(client: Client, shared_agent: AgentProcess) -> None:
    def resident() -> int:
        status = Path(f"/proc/{shared_agent.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) * KIB

    async def consume(size: int) -> None:
        total = 0
        async for event in client.exec_call(spec("head", "-c", str(size), "/dev/zero"), new_id()):
            total += len(event.chunk.data)
        assert total == size

    await consume(80 * MIB)
    before = resident()
    await consume(240 * MIB)
    assert resident() - before < 80 * MIB, "it grows with what is written"


@pytest.mark.parametrize("wait", [0, 30])
async def test_a_background_child_does_not_block_and_its_output_is_kept(
    client: Client, work: Path, wait: float
) -> None:
    exec_id = new_id()
    await client.run(spec("mkfifo", f"{work}/go"))
    await client.start(
        spec(shell=f"(read x < {work}/go; echo late; echo done > {work}/done) & echo now"), exec_id=exec_id, wait=wait
    )
    ended = await client.wait(exec_id)
    assert ended.result.ended == exec_pb2.EXEC_END_EXITED, "it waits for its child"
    assert (await client.read(exec_id)).stdout == b"now\n"
    await client.run(spec(shell=f"echo > {work}/go; while [ ! -s {work}/done ]; do sleep 0.01; done"))
    assert (await client.read(exec_id)).stdout == b"now\nlate\n"
