"""How commands end, and that what the platform ends is ended with everything below it."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from orchard.exec.v1 import exec_pb2, exec_service_pb2

from tests.integration.exec_agent.conftest import Client, await_end, lives, new_id, problem, spec
from tests.support.wire import reason_of

# Children that left the session, that forked twice, that ignore TERM: each writes its pid and would sleep for ever.
TREE = """
trap '' TERM
sleep 1000 & echo $!
setsid sleep 1000 & echo $!
setsid setsid sh -c 'echo $$; exec sleep 1000' &
(setsid sh -c 'trap "" TERM HUP; (sh -c "echo \\$\\$; exec sleep 1000" &) ; sleep 0.2' &)
sh -c 'trap "" TERM INT HUP; echo $$; while :; do sleep 1000; done'
"""
TREE_SIZE = 5


async def pids_of(client: Client, exec_id: str, count: int) -> list[int]:
    call = client.read_call(exec_id)
    seen = b""
    async for event in call:
        seen += event.chunk.data
        if seen.count(b"\n") >= count:
            break
    call.cancel()
    return [int(pid) for pid in seen.split()]


# Timeouts of the commands of one test: a busy machine may not have come to what a command does before its end.
PATIENCE = (0.3, 3.0, 30.0)


async def timed_out(
    client: Client, shell: str, expected: bytes, **fields: Any
) -> tuple[float, exec_service_pb2.StartExecResponse]:
    """The timeout of a command that had one and had written this before, and how it ended."""
    for timeout in PATIENCE:
        begin = time.monotonic()
        response = await client.start(spec(shell=shell, timeout=timeout, **fields))
        assert response.exec.result.ended == exec_pb2.EXEC_END_TIMED_OUT
        assert time.monotonic() - begin >= timeout
        if b"".join(chunk.data for chunk in response.output).startswith(expected):
            return timeout, response
    raise AssertionError(f"it never wrote {expected!r}")


async def test_a_timeout_is_reported_with_the_partial_output(client: Client) -> None:
    timeout, response = await timed_out(client, "echo partial; sleep 1000", b"partial\n")
    result = response.exec.result
    assert (result.exit_code, result.signal) == (-1, signal.SIGTERM)
    assert f"{timeout:g} s" in result.message
    assert response.output[0].data == b"partial\n"


async def test_a_command_that_ignores_term_is_killed_after_its_grace(client: Client) -> None:
    ignoring = "trap '' TERM; echo x; while :; do sleep 1000; done"
    timeout, response = await timed_out(client, ignoring, b"x\n", kill_grace=0.3)
    result = response.exec.result
    assert result.signal == signal.SIGKILL
    took = result.end_time.ToNanoseconds() - result.start_time.ToNanoseconds()
    assert took >= (timeout + 0.3) * 1e9
    assert response.output[0].data == b"x\n"


async def test_a_command_may_use_its_grace(client: Client) -> None:
    waiting = "trap 'echo bye; exit 3' TERM; echo ready; sleep 1000 & wait"
    _timeout, response = await timed_out(client, waiting, b"ready\n", kill_grace=60.0)
    assert (response.exec.result.exit_code, response.exec.result.signal) == (-1, 0)
    assert b"".join(chunk.data for chunk in response.output) == b"ready\nbye\n"


async def test_the_timeout_starts_with_the_command(client: Client, work: Path) -> None:
    await client.run(spec("mkfifo", f"{work}/go"))
    for timeout in PATIENCE:
        first, second = new_id(), new_id()
        await client.start(spec(shell=f"read x < {work}/go"), wait=0, exec_id=first)
        await client.start(spec(shell="echo ran", timeout=timeout, queue_timeout=500), wait=0, exec_id=second)
        await client.wait(second, timeout + 0.1)
        await client.run(spec(shell=f"echo > {work}/go", concurrent=True))
        if (await client.wait(second)).result.ended == exec_pb2.EXEC_END_EXITED:
            break  # else it may be the machine that was too slow for it
    else:
        pytest.fail("the time in the queue counts")


@pytest.mark.parametrize("way", ["timeout", "cancel", "kill"])
async def test_the_whole_tree_goes_and_nothing_else(client: Client, way: str) -> None:
    other = new_id()
    bystander = (await client.start(spec("sleep", "1000", concurrent=True), wait=0, exec_id=other)).exec.pid
    for timeout in (1.0, 10.0, 60.0) if way == "timeout" else (500,):
        command = spec(shell=TREE, timeout=timeout, kill_grace=0.2, concurrent=True)
        exec_id = new_id()
        leader = (await client.start(command, wait=0, exec_id=exec_id)).exec.pid
        pids = await pids_of(client, exec_id, TREE_SIZE)
        if len(pids) == TREE_SIZE:
            break  # else it ended before all were there
    assert len(pids) == TREE_SIZE
    if way == "cancel":
        await client.signal(exec_id, cancel=True)
    elif way == "kill":
        await client.signal(exec_id, signal=signal.SIGKILL)
    result = (await client.wait(exec_id)).result
    assert result.ended == (exec_pb2.EXEC_END_TIMED_OUT if way == "timeout" else exec_pb2.EXEC_END_KILLED)
    for pid in (*pids, leader):
        await_end(pid)
    assert lives(bystander)
    await client.signal(other, cancel=True)
    assert (await client.wait(other)).result.ended == exec_pb2.EXEC_END_KILLED


async def test_forks_cannot_outrun_a_kill(client: Client, work: Path) -> None:
    exec_id = new_id()
    # Each process forks its successor and ends: a walk over the process list sees only the past.
    script = (
        "import os, sys\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        while True:\n"
        "            if os.fork() > 0: os._exit(0)\n"
        "print('running', flush=True)\n"
        "import time; time.sleep(1000)\n"
    )
    marker = f"orchard-runner-{exec_id}"
    pattern = f"[o]{marker[1:]}"  # which does not find itself
    await client.start(
        spec("/usr/bin/python3", "-c", script, marker, concurrent=True, kill_grace=0.0), wait=0, exec_id=exec_id
    )
    await client.until_output(exec_id, b"running")
    await client.signal(exec_id, cancel=True)
    ended = await client.wait(exec_id)
    assert ended.result.ended == exec_pb2.EXEC_END_KILLED
    # The end is told after a bounded time, also where a busy machine has not caught the last of them by then.
    look = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -x '{pattern}'"
    async with asyncio.timeout(110):
        while (await client.run(spec(shell=look))).stdout:
            pass


async def test_signals_reach_the_tree_or_the_leader_alone(client: Client) -> None:
    exec_id = new_id()
    shell = (
        "trap 'echo parent' USR1; bash -c 'trap \"echo child\" USR1; echo ready; while :; do sleep 0.02; done' & "
        "while :; do sleep 0.02; done"
    )
    await client.start(spec(shell=shell, concurrent=True), wait=0, exec_id=exec_id)
    await client.until_output(exec_id, b"ready")
    await client.signal(exec_id, signal=signal.SIGUSR1, target="SIGNAL_TARGET_LEADER")
    assert b"child" not in await client.until_output(exec_id, b"parent")
    await client.signal(exec_id, signal=signal.SIGSTOP, target="SIGNAL_TARGET_LEADER")
    await client.signal(exec_id, signal=signal.SIGUSR1)
    await client.until_output(exec_id, b"child")
    await client.signal(exec_id, signal=signal.SIGCONT)
    await client.signal(exec_id, signal=signal.SIGKILL)
    result = (await client.wait(exec_id)).result
    assert (result.ended, result.signal) == (exec_pb2.EXEC_END_KILLED, signal.SIGKILL)


async def test_a_signal_that_the_platform_did_not_send(client: Client) -> None:
    result = (await client.start(spec(shell="kill -SEGV $$"))).exec.result
    assert (result.ended, result.signal, result.exit_code) == (
        exec_pb2.EXEC_END_SIGNALLED,
        signal.SIGSEGV,
        -1,
    )
    assert "Segmentation" in result.message


async def test_a_caught_signal_is_an_exit(client: Client) -> None:
    exec_id = new_id()
    await client.start(
        spec(shell="trap 'exit 9' INT; echo up; while :; do sleep 0.01; done", concurrent=True), wait=0, exec_id=exec_id
    )
    await client.until_output(exec_id, b"up")
    await client.signal(exec_id, signal=signal.SIGINT)
    result = (await client.wait(exec_id)).result
    assert (result.ended, result.exit_code) == (exec_pb2.EXEC_END_EXITED, 9)
    assert (await client.signal(exec_id, signal=signal.SIGINT)).result == result, "an ended exec is given as it is"
    assert (await client.signal(exec_id, cancel=True)).result == result


async def test_background_children_outlive_a_normal_end(client: Client) -> None:
    output = await client.run(spec(shell="setsid sleep 1000 & echo $!", timeout=110))
    pid = int(output.stdout)
    assert lives(pid)
    await client.run(spec(shell=f"kill {pid}"))
    await_end(pid)


async def test_zombies_are_reaped(client: Client) -> None:
    # Orphans of a command, while it runs and after it ended, leave no zombie.
    exec_id = new_id()
    shell = "for i in 1 2 3; do (sh -c 'echo $$' & ); done; setsid sh -c 'sleep 0.1; echo $$' & sleep 0.05"
    await client.start(spec(shell=shell), exec_id=exec_id)
    pids = await pids_of(client, exec_id, 3)
    end = time.monotonic() + 110
    for pid in pids:
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < end
            await asyncio.sleep(0.005)


async def test_leaving_a_call_ends_nothing(client: Client, work: Path) -> None:
    await client.run(spec("mkfifo", f"{work}/go"))
    exec_id = new_id()
    call = client.exec_call(spec(shell=f"echo up; read x < {work}/go; echo finished", concurrent=True), exec_id)
    async for event in call:
        if event.WhichOneof("event") == "chunk":
            break
    call.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # a deadline of the call is not the command's
        await client.stub.WaitExec(_wait(exec_id, 30), metadata=client.metadata, timeout=0.2)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await client.run(spec(shell=f"echo > {work}/go", concurrent=True))
    assert (await client.read(exec_id)).stdout == b"up\nfinished\n"


def _wait(exec_id: str, seconds: float):  # type: ignore[no-untyped-def]
    from orchard.exec.v1 import exec_service_pb2

    from tests.integration.exec_agent.conftest import SANDBOX, duration

    return exec_service_pb2.WaitExecRequest(sandbox_id=SANDBOX, exec_id=exec_id, wait=duration(seconds))


@pytest.mark.parametrize("kind", ["read", "exec", "wait"])
async def test_an_orphan_is_ended_when_its_last_call_has_ended(client: Client, kind: str) -> None:
    for orphan_timeout in PATIENCE:
        found = await orphaned(client, kind, orphan_timeout)
        if found is not None:
            assert found.result.ended == exec_pb2.EXEC_END_ORPHANED
            return
    pytest.fail("it ended although a call was open")


async def orphaned(client: Client, kind: str, orphan_timeout: float) -> exec_pb2.Exec | None:
    """How a command ended whose last call has; None: it ended before, which it may do between two calls."""
    exec_id = new_id()
    command = spec(shell="echo up; sleep 1000", orphan_timeout=orphan_timeout, concurrent=True)
    if kind == "exec":
        call = client.exec_call(command, exec_id)
    else:
        await client.start(command, wait=0, exec_id=exec_id)
        call = client.read_call(exec_id)
    async for event in call:
        if event.WhichOneof("event") == "chunk":
            break
    longer = 2.5 * orphan_timeout
    waiting = asyncio.create_task(client.wait(exec_id, longer)) if kind == "wait" else asyncio.sleep(longer)
    if kind == "wait":
        await asyncio.sleep(0.1 * orphan_timeout)  # for the wait to arrive
        call.cancel()
    await waiting  # longer than the orphan timeout, but a call is open
    state = await client.wait(exec_id, 0)
    call.cancel()
    if state.state == exec_pb2.EXEC_STATE_ENDED:
        return None
    begin = time.monotonic()
    while True:
        # Listing is no call for the exec; waiting would be one.
        found = next(e for e in await _list(client) if e.exec_id == exec_id)
        if found.state == exec_pb2.EXEC_STATE_ENDED:
            return found
        assert time.monotonic() - begin < 110
        await asyncio.sleep(0.01)


async def _list(client: Client):  # type: ignore[no-untyped-def]
    from orchard.exec.v1 import exec_service_pb2

    response = await client.stub.ListExecs(
        exec_service_pb2.ListExecsRequest(sandbox_id="box", page_size=1000), metadata=client.metadata, timeout=110
    )
    return response.execs


async def test_an_orphan_whose_reader_left_in_the_middle_of_a_flood(client: Client) -> None:
    exec_id = new_id()
    call = client.exec_call(spec("cat", "/dev/zero", orphan_timeout=0.3, concurrent=True, kill_grace=1.0), exec_id)
    for _ in range(20):
        await call.read()
    call.cancel()
    begin = time.monotonic()
    while True:
        found = next(e for e in await _list(client) if e.exec_id == exec_id)
        if found.state == exec_pb2.EXEC_STATE_ENDED:
            break
        assert time.monotonic() - begin < 110
        await asyncio.sleep(0.01)
    assert found.result.ended == exec_pb2.EXEC_END_ORPHANED


@pytest.mark.parametrize("fields", [{}, {"signal": 65}, {"signal": -1}, {"signal": 9, "cancel": True}])
async def test_bad_signals_name_the_field(client: Client, fields: dict[str, object]) -> None:
    with problem() as found:
        await client.signal(new_id(), **fields)
    assert found[0].fields == ("signal",)


async def test_a_repeated_signal_is_sent_once(client: Client) -> None:
    exec_id = new_id()
    shell = "trap 'echo one' USR1; trap 'echo two' USR2; echo ready; while :; do sleep 0.02; done"
    await client.start(spec(shell=shell, concurrent=True), wait=0, exec_id=exec_id)
    await client.until_output(exec_id, b"ready")
    sent = {"signal": signal.SIGUSR1, "target": "SIGNAL_TARGET_LEADER", "request_id": "first"}
    await client.signal(exec_id, **sent)
    await client.until_output(exec_id, b"one")
    await client.signal(exec_id, **sent)
    # Whatever the repeat has sent comes before this one.
    await client.signal(exec_id, signal=signal.SIGUSR2, target="SIGNAL_TARGET_LEADER")
    assert (await client.until_output(exec_id, b"two")).count(b"one") == 1
    # Another id is another signal, and so is none.
    await client.signal(exec_id, **(sent | {"request_id": "second"}))
    await client.until_output(exec_id, b"one\ntwo\none\n")
    await client.signal(exec_id, **(sent | {"request_id": ""}))
    await client.until_output(exec_id, b"one\ntwo\none\none\n")
    for other in ({"signal": signal.SIGUSR2}, {"target": "SIGNAL_TARGET_TREE"}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.signal(exec_id, **(sent | other))
        assert (caught.value.code(), reason_of(caught.value)) == (
            grpc.StatusCode.ALREADY_EXISTS,
            "SIGNAL_REQUEST_REUSED",
        )
    await client.signal(exec_id, cancel=True)
    await client.wait(exec_id)
    # Ended, it is answered as it is.
    assert (await client.signal(exec_id, **sent)).state == exec_pb2.EXEC_STATE_ENDED


async def test_a_signals_request_id_is_checked(client: Client) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.signal(new_id(), signal=signal.SIGUSR1, request_id="with space")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "request_id" in (caught.value.details() or "")


async def test_many_signals_of_one_command_are_remembered_up_to_a_bound(client: Client) -> None:
    exec_id = new_id()
    await client.start(spec(shell="trap : USR1; echo ready; sleep 1000", concurrent=True), wait=0, exec_id=exec_id)
    await client.until_output(exec_id, b"ready")
    for number in range(65):
        await client.signal(exec_id, signal=signal.SIGWINCH, request_id=f"r-{number}")
    # Forgotten, the first may be of another signal; the second may not.
    await client.signal(exec_id, signal=signal.SIGURG, request_id="r-0")
    with pytest.raises(grpc.aio.AioRpcError):
        await client.signal(exec_id, signal=signal.SIGURG, request_id="r-2")
    await client.signal(exec_id, cancel=True)
    await client.wait(exec_id)
