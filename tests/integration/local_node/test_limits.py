"""Limits by control groups. They need root (or a delegated group); where there are none, GetNode says so."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from orchard.exec.v1 import exec_pb2
from orchard.sandbox.v1 import sandbox_pb2

from tests.integration.local_node.harness import FAILED, PATIENCE, RUNNING, NodeProcess

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="making control groups needs root: run the suite as root")
# bash would try for half a minute; this says at once that it may not.
FORK = """/usr/bin/python3 -c 'import os, signal
children = []
try:
    for _ in range(200):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        children.append(pid)
except BlockingIOError:
    print("refused after", len(children))
for pid in children:
    os.kill(pid, 9)
'"""
EAT = "/usr/bin/python3 -c 'x = bytearray(300 << 20); print(len(x))'"


@needs_root
async def test_memory_ends_commands_and_not_the_sandbox(node: NodeProcess) -> None:
    box = await node.box(resources=sandbox_pb2.Resources(memory_bytes=64 << 20))
    for _ in range(2):
        ended = await box.run(f"exec {EAT}")
        assert ended.end == exec_pb2.EXEC_END_OUT_OF_MEMORY
    assert (await box.ok("echo alive")).strip() == "alive"
    assert (await node.snapshot())[box.uid].phase == RUNNING
    free = await node.box()
    await free.ok(EAT)


@needs_root
async def test_a_fork_bomb_stays_inside(node: NodeProcess) -> None:
    box = await node.box(resources=sandbox_pb2.Resources(pids=32))
    assert (await box.ok(FORK)).startswith("refused after")
    other = await node.box()
    assert (await other.ok("echo alive")).strip() == "alive"
    await node.delete(box.uid)


@needs_root
async def test_an_init_that_the_kernel_killed_for_memory_is_told_apart(node: NodeProcess) -> None:
    """The kernel's own line is written by us: to run a shared machine out of memory is not a test."""
    named, other = await node.box(), await node.box()
    Path("/dev/kmsg").write_text(f"Out of memory: Killed process {named.init_pid} (3) total-vm:1kB, anon-rss:1kB\n")
    expected = {
        named.uid: sandbox_pb2.SANDBOX_REASON_OOM,
        other.uid: sandbox_pb2.SANDBOX_REASON_DELETED_EXTERNALLY,
    }
    for box in (named, other):
        os.kill(box.init_pid, signal.SIGKILL)
    reasons = {}
    async with asyncio.timeout(PATIENCE), node.watch() as events:
        async for event in events:
            if event.HasField("sandbox") and event.sandbox.phase == FAILED:
                reasons[event.sandbox.uid] = event.sandbox.reason
                if len(reasons) == 2:
                    break
    assert reasons == expected


@needs_root
async def test_cpu_is_shared_out(node: NodeProcess) -> None:
    box = await node.box(resources=sandbox_pb2.Resources(cpu=0.1))
    started = time.monotonic()
    await box.ok("/usr/bin/python3 -c 'import time\nwhile time.process_time() < 0.3: pass'")
    assert time.monotonic() - started > 1.5


@needs_root
async def test_the_agent_is_outside_of_the_limits(node: NodeProcess) -> None:
    box = await node.box(resources=sandbox_pb2.Resources(memory_bytes=64 << 20))
    inside = Path(f"/proc/{box.agent_pid}/cgroup").read_text()
    assert box.uid not in inside
    assert "orchard" not in await box.ok(
        "cat /proc/self/cgroup | grep -v memory | grep -v pids | grep -v cpu: | head -0; true"
    )


async def test_what_is_not_limited_is_said(leveled: NodeProcess, level: str) -> None:
    answer = await leveled.describe()
    assert answer.user_ids == level
    assert answer.limits in ("cgroup-v1", "cgroup-v2", "rlimits")
    if level == "shifted":
        assert answer.limits != "rlimits"
    if answer.limits == "rlimits":
        assert any("not limited" in gap for gap in answer.gaps)
        box = await leveled.box(resources=sandbox_pb2.Resources(pids=40))
        assert (await box.ok(FORK)).startswith("refused after")
    assert any("disk" in gap for gap in answer.gaps)
