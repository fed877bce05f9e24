"""A machine where the launcher could not be built: sandboxes are as safe and as whole, and the gap is told."""

import asyncio
from collections.abc import Callable

import grpc
import pytest
from google.protobuf import duration_pb2
from orchard.exec.v1 import exec_pb2
from orchard.sandbox.v1 import sandbox_pb2

from services.exec_agent.launcher import GAP
from tests.integration.local_node.harness import PATIENCE, RUNNING, NodeProcess, gone
from tests.integration.local_node.test_kept_output import Execs
from tests.integration.local_node.test_limits import needs_root

# Two children that left the session, one of them forked twice as daemons do; both ignore TERM.
TREE = """
trap '' TERM
setsid sh -c 'trap "" TERM; echo ready; exec sleep 1111' &
(setsid sh -c 'trap "" TERM; (sh -c "exec sleep 1112" &); sleep 0.1' &)
sleep 1113
"""
SLEEPERS = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f; echo; done 2>/dev/null | grep -cx 'sleep 111[1-3] '"
ORPHANS = "for i in 1 2 3 4 5; do (setsid sh -c 'sleep 0.01' &); done; sleep 0.3"
# Of what belongs to another process, only its command line, name and state may be seen.
LOOK = "for n in exe mem environ fd/0 cwd root maps; do head -c 1 /proc/1/$n >/dev/null 2>&1 && echo $n; done; true"


@pytest.fixture
async def without(make_node: Callable[..., NodeProcess], level: str) -> NodeProcess:
    node = make_node(level, ORCHARD_LAUNCHER_FILE="/nowhere/launcher")
    await node.start()
    return node


async def test_commands_run_and_whole_trees_are_ended(without: NodeProcess) -> None:
    assert GAP in (await without.describe()).gaps
    box = await without.box()
    execs = Execs(box)
    assert (await box.ok("echo hello; id -u")).split() == ["hello", "0"]
    await execs.start("tree", TREE, wait=0, concurrent=True, kill_grace=duration_pb2.Duration(nanos=100_000_000))
    await execs.until("tree", b"ready")
    async with asyncio.timeout(PATIENCE):
        while (await box.run(SLEEPERS, concurrent=True)).output.strip() != "3":
            await asyncio.sleep(0.01)
    assert (await execs.cancel("tree")).ended == exec_pb2.EXEC_END_KILLED
    # The end is told after a bounded time, also where a busy machine has not caught the last of them by then.
    async with asyncio.timeout(PATIENCE):
        while (await box.run(SLEEPERS)).output.strip() != "0":
            await asyncio.sleep(0.01)


async def test_kill_everything_inside_leaves_a_working_sandbox(without: NodeProcess) -> None:
    box = await without.box()
    first, init = box.agent_pid, box.init_pid
    with pytest.raises(grpc.aio.AioRpcError):
        await box.run("kill -9 -1; sleep 30")
    await gone(first)
    await box.healthy()
    assert (await box.ok("echo alive")).strip() == "alive"
    assert box.init_pid == init
    assert (await without.snapshot())[box.uid].phase == RUNNING


async def test_the_first_process_reaps_and_lets_nobody_look_into_it(without: NodeProcess) -> None:
    box = await without.box()
    await box.ok(ORPHANS)
    assert (await box.ok(LOOK)) == ""
    await box.run("kill -TERM 1; kill -INT 1; kill -KILL 1; kill -STOP 1")
    async with asyncio.timeout(PATIENCE):
        while "Z" in (await box.ok("cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //' | cut -c1 | sort -u")).split():
            await asyncio.sleep(0.01)
    assert (await box.ok("cat /proc/1/cmdline | tr '\\0' ' '")).split()[1] == "init"


async def test_it_ends_with_the_lifeline(without: NodeProcess) -> None:
    box = await without.box()
    pids = (box.init_pid, box.agent_pid)
    await without.kill()
    without.cut_lifeline()
    for pid in pids:
        await asyncio.wait_for(gone(pid), PATIENCE)


@needs_root
async def test_its_commands_are_inside_the_limits(make_node: Callable[..., NodeProcess]) -> None:
    node = make_node(ORCHARD_LAUNCHER_FILE="/nowhere/launcher")
    await node.start()
    box = await node.box(resources=sandbox_pb2.Resources(memory_bytes=128 << 20))
    ended = await box.run("exec /usr/bin/python3 -c 'x = bytearray(300 << 20)'")
    assert ended.end == exec_pb2.EXEC_END_OUT_OF_MEMORY
    assert (await box.ok("echo alive")).strip() == "alive"
