"""Sandboxes made before anybody asks: one that is claimed is what the request says, and no other is left behind."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from orchard.sandbox.v1 import sandbox_pb2

from tests.integration.local_node.harness import PATIENCE, RUNNING, NodeProcess, gone

SETTINGS = {"ORCHARD_SPARE_SANDBOXES": "1", "ORCHARD_LOG_LEVEL": "debug"}


@pytest.fixture
async def sparing(make_node: Callable[..., NodeProcess]) -> NodeProcess:
    """A daemon that keeps one spare."""
    node = make_node(**SETTINGS)
    await node.start()
    return node


@pytest.fixture
async def leveled_sparing(make_node: Callable[..., NodeProcess], level: str) -> NodeProcess:
    """Likewise, of each level in turn."""
    node = make_node(level, **SETTINGS)
    await node.start()
    return node


async def spare(node: NodeProcess, number: int = 1) -> str:
    """The uid of the `number`th spare that the daemon made, once it has."""
    async with asyncio.timeout(PATIENCE):
        while len(found := re.findall(r"spare sandbox ready.*uid=(\w+)", (node.home / "log").read_text())) < number:
            await asyncio.sleep(0.01)
    return str(found[number - 1])


def folders(node: NodeProcess) -> dict[str, Path]:
    return {path.name: path for path in (node.data / "node" / "sandboxes").iterdir()}


def pids(node: NodeProcess, uid: str) -> list[int]:
    """Init and agent of a sandbox or a spare."""
    record: dict[str, Any] = json.loads((folders(node)[uid] / "processes.json").read_text())
    return [record["init"]["pid"], record["agent"]["pid"]]


async def test_a_claimed_spare_is_what_the_request_says(leveled_sparing: NodeProcess) -> None:
    node = leveled_sparing
    uid = await spare(node)
    before = pids(node, uid)
    box = await node.box(
        env={"GREETING": "hello", "LONG": "x" * 100_000},
        working_directory="/usr",
        start_argv=["sh", "-c", "echo begun > /tmp/begun"],
    )
    assert box.uid == uid
    assert [box.init_pid, box.agent_pid] == before
    assert (await box.ok('echo "$GREETING ${#LONG} $PWD"')).split() == ["hello", "100000", "/usr"]
    assert (await box.ok("until [ -s /tmp/begun ]; do sleep 0.01; done; cat /tmp/begun")).strip() == "begun"
    assert not list((box.folder / "state").glob("rehearsal*"))
    # Another takes its place.
    assert await spare(node, 2) != uid
    await node.delete(uid)
    assert uid not in folders(node)


@pytest.mark.skipif(os.geteuid() != 0, reason="making control groups needs root: run the suite as root")
async def test_limits_are_those_of_the_request(sparing: NodeProcess) -> None:
    uid = await spare(sparing)
    box = await sparing.box(resources=sandbox_pb2.Resources(memory_bytes=64 << 20, pids=77, cpu=0.5))
    assert box.uid == uid
    groups = [*Path("/sys/fs/cgroup").glob(f"*/orchard-*/{uid}"), *Path("/sys/fs/cgroup").glob(f"orchard-*/{uid}")]
    files = [group / name for group in groups for name in ("pids.max", "memory.limit_in_bytes", "memory.max")]
    assert {path.read_text().strip() for path in files if path.exists()} == {"77", str(64 << 20)}


@pytest.mark.parametrize(
    "fields",
    [
        {"resources": sandbox_pb2.Resources(shm_bytes=1 << 20)},
        {"network": sandbox_pb2.Network(mode=sandbox_pb2.NETWORK_MODE_HOST)},
    ],
)
async def test_a_request_that_a_spare_cannot_become_is_made_anew(sparing: NodeProcess, fields: dict) -> None:
    uid = await spare(sparing)
    box = await sparing.box(**fields)
    assert box.uid != uid
    assert (await box.ok("echo alive")).strip() == "alive"
    assert (await sparing.box()).uid == uid


@pytest.mark.parametrize("victim", ["init", "agent"])
async def test_a_spare_that_has_ended_is_made_anew(leveled_sparing: NodeProcess, victim: str) -> None:
    node = leveled_sparing
    uid = await spare(node)
    pid = pids(node, uid)[victim == "agent"]
    os.kill(pid, signal.SIGKILL)
    await gone(pid)
    box = await node.box()
    assert (await box.ok("echo alive")).strip() == "alive"
    await node.delete(box.uid)
    assert box.uid not in folders(node)


async def test_a_daemon_that_stops_leaves_no_spare(leveled_sparing: NodeProcess) -> None:
    node = leveled_sparing
    box = await node.box()
    left = pids(node, uid := await spare(node, 2 if box.uid == await spare(node) else 1))
    assert await node.stop() == 0
    for pid in left:
        await gone(pid)
    assert set(folders(node)) == {box.uid}
    await node.start()
    assert (await box.ok("echo alive")).strip() == "alive"
    assert uid not in await node.snapshot()


async def test_spares_of_a_daemon_that_was_killed_are_removed(leveled_sparing: NodeProcess) -> None:
    node = leveled_sparing
    uid = await spare(node)
    left = pids(node, uid)
    await node.kill()
    await node.start()
    for pid in left:
        await gone(pid)
    assert uid not in folders(node)
    assert (await node.box()).uid != uid


async def test_a_daemon_killed_while_a_spare_is_claimed_gives_the_sandbox(sparing: NodeProcess) -> None:
    uid = await spare(sparing)
    assert (await sparing.create("alpha")).uid == uid
    await sparing.kill()
    await sparing.start()
    sandbox = await sparing.until(uid, RUNNING)
    assert sandbox.sandbox_id == "alpha"
    box = sparing.box_of(sandbox)
    await box.healthy()
    assert (await box.ok("echo whole")).strip() == "whole"


async def test_spares_end_with_the_lifeline(sparing: NodeProcess) -> None:
    left = pids(sparing, await spare(sparing))
    sparing.cut_lifeline()
    for pid in left:
        await gone(pid)
    assert await asyncio.to_thread(sparing.process.wait, PATIENCE) == 0
    assert not folders(sparing)
