"""One at a time in arrival order, exactly once by id."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from orchard.exec.v1 import exec_pb2, exec_service_pb2

from tests.integration.exec_agent.conftest import SANDBOX, Client, Output, new_id, problem, spec

QUEUED, RUNNING, ENDED = exec_pb2.EXEC_STATE_QUEUED, exec_pb2.EXEC_STATE_RUNNING, exec_pb2.EXEC_STATE_ENDED


class Gate:
    """A serial command that holds the queue until it is opened."""

    def __init__(self, client: Client, work: Path) -> None:
        self._client = client
        self._fifo = work / "gate"
        self.exec_id = new_id()

    async def close(self) -> None:
        await self._client.run(spec("mkfifo", str(self._fifo), concurrent=True))
        await self._client.start(spec(shell=f"read x < {self._fifo}"), wait=0, exec_id=self.exec_id)

    async def open(self) -> None:
        await self._client.run(spec(shell=f"echo > {self._fifo}", concurrent=True))
        await self._client.wait(self.exec_id)


@pytest.fixture
async def gate(client: Client, work: Path) -> Gate:
    made = Gate(client, work)
    await made.close()
    return made


async def test_a_reader_that_came_while_it_was_queued_loses_nothing(client: Client, gate: Gate) -> None:
    size, output = 8 << 20, Output()
    # Each read of the pipe fills the ring: the command has to wait for its reader from the first one on.
    call = client.exec_call(spec("head", "-c", str(size), "/dev/zero", retained_limit_bytes=64 << 10), new_id())
    output.take(await call.read())
    await gate.open()
    while (event := await call.read()) is not grpc.aio.EOF:
        output.take(event)
    assert (len(output.stdout), output.gaps) == (size, [])


async def test_serial_commands_run_in_arrival_order(client: Client, gate: Gate, work: Path) -> None:
    ids = [new_id() for _ in range(10)]
    for number, exec_id in enumerate(ids):
        response = await client.start(spec(shell=f"echo {number} >> {work}/log"), wait=0, exec_id=exec_id)
        assert response.exec.state == QUEUED
        assert not response.exec.HasField("start_time")
    await gate.open()
    for exec_id in ids:
        assert (await client.wait(exec_id)).result.exit_code == 0
    assert (work / "log").read_text().split() == [str(n) for n in range(10)]


async def test_serial_commands_never_overlap(client: Client, work: Path) -> None:
    shell = f"mkdir {work}/lock && sleep 0.005 && rmdir {work}/lock"
    results = await asyncio.gather(*(client.run(spec(shell=shell)) for _ in range(30)))
    assert {output.result.exit_code for output in results if output.result} == {0}


async def test_concurrent_commands_pass_the_queue(client: Client, gate: Gate) -> None:
    assert (await client.run(spec("true", concurrent=True))).result is not None
    await gate.open()


async def test_a_queue_timeout_ends_it_unstarted(client: Client, gate: Gate, work: Path) -> None:
    exec_id = new_id()
    response = await client.start(spec(shell=f"touch {work}/ran", queue_timeout=0.1), exec_id=exec_id)
    assert response.exec.result.ended == exec_pb2.EXEC_END_NOT_STARTED
    assert "0.1 s" in response.exec.result.message
    assert not response.exec.result.HasField("start_time")
    default = await client.start(spec("true", timeout=0.1))
    assert default.exec.result.ended == exec_pb2.EXEC_END_NOT_STARTED
    await gate.open()
    assert not (work / "ran").exists()


async def test_cancel_in_the_queue(client: Client, gate: Gate, work: Path) -> None:
    first, second = new_id(), new_id()
    waiting = asyncio.create_task(client.stream(spec(shell=f"touch {work}/ran"), first))
    await client.start(spec("true"), wait=0, exec_id=second)
    while (await listed(client))[:2] != [second, first] and first not in await listed(client):
        await asyncio.sleep(0.005)
    with problem() as found:
        await client.signal(first, signal=15)
    assert found[0].reason == "EXEC_NOT_STARTED"
    assert (await client.signal(first, cancel=True)).result.ended == exec_pb2.EXEC_END_NOT_STARTED
    output = await waiting
    assert output.result is not None
    assert output.result.ended == exec_pb2.EXEC_END_NOT_STARTED
    await gate.open()
    assert (await client.wait(second)).result.exit_code == 0
    assert not (work / "ran").exists()


async def test_a_cancel_that_comes_before_its_command(client: Client, work: Path) -> None:
    exec_id = new_id()
    assert (await client.signal(exec_id, cancel=True)).state == ENDED
    response = await client.start(spec(shell=f"touch {work}/ran"), exec_id=exec_id)
    assert response.exec.result.ended == exec_pb2.EXEC_END_NOT_STARTED
    assert "before" in response.exec.result.message
    assert not (work / "ran").exists()


async def test_a_start_that_fails_in_the_queue_lets_the_next_run(client: Client, gate: Gate) -> None:
    failing = [new_id() for _ in range(50)]
    for exec_id in failing:
        await client.start(spec("no-such-program"), wait=0, exec_id=exec_id)
    following = asyncio.create_task(client.run(spec("true")))
    streaming = asyncio.create_task(client.stream(spec("no-such-program")))
    await gate.open()
    output = await following
    assert output.result is not None
    assert output.result.exit_code == 0
    with problem() as found:
        await streaming
    assert found[0].reason == "COMMAND_NOT_FOUND"
    with problem() as found:
        await client.start(spec("no-such-program"), exec_id=failing[0])
    assert found[0].reason == "COMMAND_NOT_FOUND"


async def test_a_repeat_starts_nothing(client: Client, work: Path) -> None:
    exec_id = new_id()
    command = spec(shell=f"echo x >> {work}/log; cat {work}/log", env={"A": "1", "B": "2", "C": "3"})
    responses = await asyncio.gather(*(client.start(command, exec_id=exec_id) for _ in range(20)))
    assert {response.output[0].data for response in responses} == {b"x\n"}
    assert len({response.exec.pid for response in responses}) == 1
    assert (await client.stream(command, exec_id)).stdout == b"x\n"
    assert (work / "log").read_text() == "x\n"


async def test_an_id_with_another_spec(client: Client) -> None:
    exec_id = new_id()
    await client.start(spec("true"), exec_id=exec_id)
    for other in (spec("false"), spec("true", env={"A": "b"}), spec(shell="true")):
        with problem() as found:
            await client.start(other, exec_id=exec_id)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.ALREADY_EXISTS, "EXEC_ID_REUSED")


async def test_unknown_execs(client: Client) -> None:
    for call in (client.wait(new_id(), 0), client.read(new_id()), client.signal(new_id(), signal=15)):
        with problem() as found:
            await call
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.NOT_FOUND, "EXEC_NOT_FOUND")


async def listed(client: Client) -> list[str]:
    request = exec_service_pb2.ListExecsRequest(sandbox_id=SANDBOX, page_size=1000)
    response = await client.stub.ListExecs(request, metadata=client.metadata, timeout=110)
    return [found.exec_id for found in response.execs]


async def test_lists_are_newest_first_in_pages(client: Client) -> None:
    ids = [new_id() for _ in range(7)]
    for exec_id in ids:
        await client.start(spec("true"), exec_id=exec_id)
    seen: list[str] = []
    token = ""
    while len(seen) < 7:
        request = exec_service_pb2.ListExecsRequest(sandbox_id=SANDBOX, page_size=3, page_token=token)
        response = await client.stub.ListExecs(request, metadata=client.metadata, timeout=110)
        assert len(response.execs) == 3
        seen += [found.exec_id for found in response.execs]
        token = response.next_page_token
        if len(seen) == 3:
            await client.start(spec("true"))  # a new one does not shift the pages
    assert seen[:7] == ids[::-1]
    for bad in ({"page_size": 1001}, {"page_size": -1}, {"page_token": "x"}):
        with problem() as found:
            request = exec_service_pb2.ListExecsRequest(sandbox_id=SANDBOX, **bad)  # type: ignore[arg-type]
            await client.stub.ListExecs(request, metadata=client.metadata, timeout=110)
        assert found[0].fields == (next(iter(bad)),)


async def test_waits_have_limits(client: Client) -> None:
    for wait in (-1.0, 61.0):
        with problem() as found:
            await client.start(spec("true"), wait=wait)
        assert found[0].fields == ("wait",)
    for wait in (-1.0, 601.0):
        with problem() as found:
            await client.wait(new_id(), wait)
        assert found[0].fields == ("wait",)
