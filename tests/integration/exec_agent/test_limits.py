"""What is bounded: how long a slow reader holds a command up, how many commands are kept, how many may wait."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
from typing import Any

import grpc
import pytest
from orchard.exec.v1 import exec_pb2

from services.exec_agent import execution, process, pump, service
from tests.integration.exec_agent.conftest import Client, Output, agent_here, lives, new_id, problem, spec

MIB = 1 << 20


async def test_a_dead_reader_holds_a_command_up_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "STALL_SECONDS", 0.3)
    async with agent_here() as client:
        exec_id, size = new_id(), 64 * MIB
        command = spec("head", "-c", str(size), "/dev/zero", retained_limit_bytes=1 * MIB)
        call = client.exec_call(command, exec_id)
        output = Output()
        output.take(await call.read())
        ended = await client.wait(exec_id)
        assert ended.result.output_bytes == size
        late = await client.read(exec_id)
        assert late.gaps == [(0, size - 1 * MIB)]
        while (event := await call.read()) is not grpc.aio.EOF:
            output.take(event)
        assert sum(gap for _, gap in output.gaps) + len(output.everything) == size
        assert len(output.gaps) >= 1


async def test_a_stall_is_no_reason_to_pass_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "STALL_SECONDS", 3600.0)
    async with agent_here() as client:
        exec_id = new_id()
        call = client.exec_call(spec("cat", "/dev/zero", retained_limit_bytes=1 * MIB, timeout=1.0), exec_id)
        await call.read()
        assert (await client.wait(exec_id)).result.ended == exec_pb2.EXEC_END_TIMED_OUT
        call.cancel()


async def test_only_the_newest_are_kept_and_none_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "KEPT_COUNT", 3)
    async with agent_here() as client:
        ids = [new_id() for _ in range(5)]
        for exec_id in ids:
            await client.run(spec(shell="head -c 100000 /dev/zero | tr '\\0' x; echo $$ >> log"), exec_id)
        for exec_id in ids[2:]:
            assert len((await client.read(exec_id)).stdout) == 100_000
        for exec_id in ids[:2]:
            for call in (client.read(exec_id), client.wait(exec_id), client.signal(exec_id, cancel=True)):
                with problem() as found:
                    await call
                assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "EXEC_EXPIRED")
            with problem() as found:
                await client.start(spec("true"), exec_id=exec_id)
            assert found[0].reason == "EXEC_EXPIRED"
        assert (await client.run(spec(shell="wc -l < log"))).stdout == b"5\n"


@pytest.mark.parametrize("bound", ["number", "age"])
async def test_what_somebody_still_reads_is_kept_for_as_long(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(service, "_SWEEP_SECONDS", 0.01)
    async with agent_here() as client:
        exec_id, size = new_id(), 60 * MIB
        # More than is on its way to a reader that takes nothing.
        call = client.exec_call(spec("head", "-c", str(size), "/dev/zero"), exec_id)
        output = Output()
        output.take(await call.read())
        assert (await client.wait(exec_id)).result.output_bytes == size
        if bound == "number":
            monkeypatch.setattr(service, "KEPT_COUNT", 1)
        else:
            monkeypatch.setattr(service, "KEPT_SECONDS", 0.0)
        other = new_id()
        await client.run(spec("true"), other)
        await until_expired(client, other) if bound == "age" else await client.run(spec("true"))
        while (event := await call.read()) is not grpc.aio.EOF:
            output.take(event)
        assert (len(output.stdout), output.gaps) == (size, [])
        await client.run(spec("true"))
        await until_expired(client, exec_id)


async def until_expired(client: Client, exec_id: str) -> None:
    async with asyncio.timeout(110):
        while True:
            try:
                await client.wait(exec_id, 0)
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
                return
            await asyncio.sleep(0.01)


async def test_what_ended_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "KEPT_SECONDS", 0.05)
    monkeypatch.setattr(service, "_SWEEP_SECONDS", 0.02)
    async with agent_here() as client:
        exec_id = new_id()
        await client.run(spec("true"), exec_id)
        await until_expired(client, exec_id)


async def test_a_child_that_outlives_a_forgotten_command_can_still_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "KEPT_COUNT", 1)
    async with agent_here() as client:
        exec_id = new_id()
        shell = "(read x < go; head -c 1000000 /dev/zero; echo survived > done; sleep 1000) & echo $!"
        await client.run(spec("mkfifo", "go"))
        pid = int((await client.run(spec(shell=shell), exec_id)).stdout)
        for _ in range(3):
            await client.run(spec("true"))
        with problem():
            await client.wait(exec_id)
        waited = await client.run(spec(shell="echo > go; while [ ! -s done ]; do sleep 0.01; done; cat done"))
        assert waited.stdout == b"survived\n"
        assert lives(pid)
        await client.run(spec(shell=f"pkill -P {pid}; kill {pid}; true"))


async def test_the_queue_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "QUEUE_LIMIT", 3)
    async with agent_here() as client:
        first = new_id()
        await client.start(spec("sleep", "1000"), wait=0, exec_id=first)
        for _ in range(3):
            await client.start(spec("true"), wait=0)
        with problem() as found:
            await client.start(spec("true"), wait=0)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_EXECS")
        await client.signal(first, cancel=True)
        await client.wait(first)
        assert (await client.run(spec("true"))).result is not None


async def test_tombstones_are_bounded_and_still_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BURIED_COUNT", 3)
    async with agent_here() as client:
        kept = new_id()
        await client.run(spec("true"), kept)
        buried = [new_id() for _ in range(10)]
        for exec_id in buried:
            await client.signal(exec_id, cancel=True)
        assert (await client.wait(kept)).result.exit_code == 0, "they push out no real command"
        with problem() as found:
            await client.start(spec("true"), exec_id=buried[0])
        assert found[0].reason == "EXEC_EXPIRED"
        assert (await client.start(spec("true"), exec_id=buried[-1])).exec.result.ended == exec_pb2.EXEC_END_NOT_STARTED


async def test_without_descriptors_a_start_fails_and_the_agent_goes_on() -> None:
    async with agent_here() as client:
        await client.run(spec("true"))
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        held = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            with problem() as found:
                await client.start(spec("true"))
            assert (found[0].code, found[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_EXECS")
        finally:
            for descriptor in held:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert (await client.run(spec("echo", "on"))).stdout == b"on\n"


async def test_a_start_that_waits_for_others_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is ended when it does not answer, not when more is asked of it than it has had time for."""
    async with agent_here() as client:
        await client.run(spec("true"))
        monkeypatch.setattr(execution, "_START_PATIENCE_SECONDS", 0.05)
        monkeypatch.setattr(process, "_IN_FLIGHT_LIMIT", 0)
        waiting = asyncio.create_task(client.run(spec("echo", "late"), "waiting"))
        while not await client.list() or (await client.list())[0].exec_id != "waiting":
            await asyncio.sleep(0.005)
        assert (await client.wait("waiting", 0.3)).state == exec_pb2.EXEC_STATE_QUEUED
        monkeypatch.setattr(process, "_IN_FLIGHT_LIMIT", 64)
        monkeypatch.setattr(execution, "_START_PATIENCE_SECONDS", 30.0)
        assert (await client.run(spec("true", concurrent=True))).result is not None
        assert (await waiting).stdout == b"late\n"


@pytest.mark.parametrize("failures", [3, 1_000])
async def test_a_message_that_finds_no_descriptor_is_sent_again_for_a_while(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    real, left = process._send, [failures]

    def send(*arguments: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, "no descriptor is left")
        real(*arguments)

    monkeypatch.setattr(process, "_PATIENCE", 5)
    async with agent_here() as client:
        await client.run(spec("true"))
        monkeypatch.setattr(process, "_send", send)
        if failures < 5:
            assert (await client.run(spec("echo", "sent"))).stdout == b"sent\n"
            return
        with problem() as found:
            await client.start(spec("true"))
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "PROCESS_LIMIT")
        left[0] = 0
        assert (await client.run(spec("echo", "on"))).stdout == b"on\n"
