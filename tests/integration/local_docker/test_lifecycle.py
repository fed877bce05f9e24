"""Containers that end, engines that come and go, daemons that are killed: the right state and reason each time."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from orchard.sandbox.v1 import sandbox_pb2

from services.local.docker.setup import remove_left
from tests.integration.local_node.harness import FAILED, GONE, PATIENCE, RUNNING, STARTING, NodeProcess
from tests.support.engine import BUSYBOX, TestEngine

EXTERNALLY = sandbox_pb2.SANDBOX_REASON_DELETED_EXTERNALLY
HOST_RESTART = sandbox_pb2.SANDBOX_REASON_HOST_RESTART


async def failure(node: NodeProcess, uid: str) -> tuple[int, str]:
    """Reason and message, once it has failed."""
    async with asyncio.timeout(PATIENCE), node.watch() as events:
        async for event in events:
            if event.HasField("sandbox") and event.sandbox.uid == uid and event.sandbox.phase == FAILED:
                return event.sandbox.reason, event.sandbox.message
    raise AssertionError("the watch ended")


def container_of(engine: TestEngine, uid: str) -> str:
    (found,) = engine.containers(f"label=dev.orchard.uid={uid}")
    return found


def folders(node: NodeProcess) -> list[Path]:
    return list((node.data / "docker" / "sandboxes").iterdir())


async def test_a_delete_leaves_nothing_and_may_be_repeated(node: NodeProcess, engine: TestEngine) -> None:
    box = await node.box(image=BUSYBOX)
    assert engine.docker("volume", "ls", "--quiet").stdout.split()
    assert folders(node) and list((node.run / "d").iterdir())
    await asyncio.gather(*(node.delete(box.uid) for _ in range(3)))
    await node.delete(box.uid)
    assert engine.containers() == []
    assert engine.docker("volume", "ls", "--quiet").stdout == ""
    assert folders(node) == [] and list((node.run / "d").iterdir()) == []


@pytest.mark.parametrize(
    ("command", "word"),
    [(("rm", "--force"), "removed"), (("kill",), "exit code 137"), (("stop",), "ended from outside")],
)
async def test_what_is_done_to_its_container_by_hand_is_told(
    node: NodeProcess, engine: TestEngine, command: tuple[str, ...], word: str
) -> None:
    box, other = await node.box(image=BUSYBOX), await node.box(image=BUSYBOX)
    await asyncio.to_thread(engine.docker, *command, container_of(engine, box.uid))
    reason, message = await failure(node, box.uid)
    assert reason == EXTERNALLY and word in message
    assert (await node.snapshot())[other.uid].phase == RUNNING
    await node.delete(box.uid)


async def test_an_agent_that_is_killed_is_started_again(node: NodeProcess) -> None:
    box = await node.box(image=BUSYBOX)
    with suppress(grpc.aio.AioRpcError):  # from the agent that was killed
        await box.run("kill -9 -1")
    await box.healthy()
    assert (await box.ok("echo again")).strip() == "again"
    assert (await node.snapshot())[box.uid].phase == RUNNING


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_an_engine_that_is_restarted_ends_its_sandboxes(node: NodeProcess, engine: TestEngine, how: str) -> None:
    box = await node.box(image=BUSYBOX)
    (engine.stop if how == "stop" else engine.kill)()
    engine.start()
    assert (await failure(node, box.uid))[0] == HOST_RESTART
    fresh = await node.box(image=BUSYBOX)
    assert (await fresh.ok("echo fresh")).strip() == "fresh"
    await node.delete(box.uid)


async def test_an_engine_that_stands_still_costs_no_sandbox(node: NodeProcess, engine: TestEngine) -> None:
    box = await node.box(image=BUSYBOX)
    with engine.paused():
        assert (await box.ok("echo alive")).strip() == "alive"
        waiting = await node.create(image=BUSYBOX)
        assert (await node.snapshot())[waiting.uid].phase == STARTING
    await node.until(waiting.uid, RUNNING)
    assert (await node.snapshot())[box.uid].phase == RUNNING


async def test_an_engine_that_is_away_is_waited_for(node: NodeProcess, engine: TestEngine) -> None:
    engine.stop()
    waiting, hopeless = await node.create(image=BUSYBOX), await node.create(image=BUSYBOX, start_timeout={"seconds": 1})
    reason, message = await failure(node, hopeless.uid)
    assert reason == sandbox_pb2.SANDBOX_REASON_AGENT_START and "no engine answers" in message
    engine.start()
    await node.until(waiting.uid, RUNNING)


async def test_a_delete_cuts_a_start_short(node: NodeProcess, engine: TestEngine) -> None:
    engine.stop()
    sandbox = await node.create(image=BUSYBOX, start_timeout={"seconds": 3600})
    deleting = asyncio.create_task(node.delete(sandbox.uid))
    engine.start()
    while True:
        try:
            await deleting
        except Exception as error:  # the engine was away for its first attempt
            assert "cannot be removed" in str(error)
            deleting = asyncio.create_task(node.delete(sandbox.uid))
        else:
            break
    assert await node.snapshot() == {}


class TestRestarts:
    async def test_a_daemon_that_is_killed_finds_its_sandboxes_again(
        self, node: NodeProcess, engine: TestEngine
    ) -> None:
        box = await node.box(image=BUSYBOX)
        started = engine.inspect(container_of(engine, box.uid))["State"]["StartedAt"]
        await box.ok("echo kept > /tmp/mark")
        await node.kill()
        await node.start()
        found = (await node.snapshot())[box.uid]
        assert (found.phase, found.endpoint) == (RUNNING, box.sandbox.endpoint)
        assert (await box.ok("cat /tmp/mark")).strip() == "kept"
        assert engine.inspect(container_of(engine, box.uid))["State"]["StartedAt"] == started
        # And it is followed as before.
        await asyncio.to_thread(engine.docker, "rm", "--force", container_of(engine, box.uid))
        assert (await failure(node, box.uid))[0] == EXTERNALLY
        await node.delete(box.uid)

    async def test_what_happened_meanwhile_is_told(self, node: NodeProcess, engine: TestEngine) -> None:
        removed, stopped, lives = [await node.box(image=BUSYBOX) for _ in range(3)]
        await node.kill()
        engine.docker("rm", "--force", container_of(engine, removed.uid))
        engine.docker("kill", container_of(engine, stopped.uid))
        await node.start()
        found = await node.snapshot()
        assert (found[removed.uid].phase, found[removed.uid].reason) == (FAILED, EXTERNALLY)
        assert (found[stopped.uid].phase, found[stopped.uid].reason) == (FAILED, HOST_RESTART)
        assert found[lives.uid].phase == RUNNING

    async def test_a_start_that_was_under_way_goes_on(self, node: NodeProcess, engine: TestEngine) -> None:
        with engine.paused():
            sandbox = await node.create(image=BUSYBOX)
            await node.kill()
        await node.start()
        await node.until(sandbox.uid, RUNNING)
        assert len(engine.containers()) == 1

    async def test_without_its_journal_it_reads_the_labels(self, node: NodeProcess, engine: TestEngine) -> None:
        box = await node.box(image=BUSYBOX, labels={"team": "blue"}, env={"A": "b"})
        before = (await node.snapshot())[box.uid]
        await node.kill()
        for entry in (node.data / "docker" / "journal").iterdir():
            entry.unlink()
        await node.start()
        after = (await node.snapshot())[box.uid]
        for name in ("tenant", "sandbox_id", "request_id", "spec_hash", "spec", "phase", "endpoint"):
            assert getattr(after, name) == getattr(before, name), name
        assert after.revision > before.revision
        again = await node.create(box.sandbox.sandbox_id, request_id=box.sandbox.request_id, image=BUSYBOX)
        assert again.uid == box.uid
        await node.delete(box.uid)

    async def test_nobodys_container_goes_and_others_stay(
        self, make_node: Callable[..., NodeProcess], engine: TestEngine
    ) -> None:
        node, neighbour = make_node(), make_node()
        await node.start()
        await neighbour.start()
        box, other = await node.box(image=BUSYBOX), await neighbour.box(image=BUSYBOX)
        labels = engine.inspect(container_of(engine, box.uid))["Config"]["Labels"]
        await node.kill()
        ours = ("--label", f"dev.orchard.platform={labels['dev.orchard.platform']}", "--label", "dev.orchard.uid=lost")
        engine.docker("run", "--detach", "--network", "none", *ours, BUSYBOX, "sleep", "1000")
        plain = engine.docker("run", "--detach", "--network", "none", BUSYBOX, "sleep", "1000").stdout.strip()
        try:
            await node.start()
            assert set(engine.containers()) == {
                *(container_of(engine, box.uid), container_of(engine, other.uid), plain)
            }
        finally:
            engine.docker("rm", "--force", plain)

    async def test_with_other_keys_nothing_can_be_kept(self, node: NodeProcess, engine: TestEngine) -> None:
        await node.box(image=BUSYBOX)
        await node.kill()
        for entry in (node.data / "docker" / "journal").iterdir():
            entry.unlink()
        from services.common.tokens import generate_key, public_pem

        (node.home / "keys.pem").write_bytes(public_pem(generate_key()))
        await node.start()
        assert await node.snapshot() == {} and engine.containers() == []


class TestEndOfThePlatform:
    async def test_its_sandboxes_end_with_it(self, node: NodeProcess, engine: TestEngine) -> None:
        for _ in range(3):
            await node.box(image=BUSYBOX)
        node.cut_lifeline()
        assert node.process is not None
        assert await asyncio.to_thread(node.process.wait, PATIENCE) == 0
        assert engine.containers() == [] and folders(node) == []

    async def test_a_stop_of_the_daemon_alone_ends_none(self, node: NodeProcess, engine: TestEngine) -> None:
        box = await node.box(image=BUSYBOX)
        assert await node.stop() == 0
        assert len(engine.containers("status=running")) == 1
        await node.start()
        assert (await box.ok("echo alive")).strip() == "alive"

    async def test_when_all_was_killed_at_once_the_next_start_finds_them(
        self, node: NodeProcess, engine: TestEngine
    ) -> None:
        box = await node.box(image=BUSYBOX)
        await node.kill()
        os.close(node.lifeline_write)
        os.close(node.lifeline_read)
        node.lifeline_read, node.lifeline_write = os.pipe()
        for link in (node.run / "d").iterdir():  # the folder of sockets is made anew by every start
            link.unlink()
        await node.start()
        assert (await node.snapshot())[box.uid].phase == RUNNING
        assert (await box.ok("echo alive")).strip() == "alive"


async def test_the_supervisor_removes_what_a_killed_daemon_left(
    make_node: Callable[..., NodeProcess], engine: TestEngine
) -> None:
    node, neighbour = make_node(), make_node()
    await node.start()
    await neighbour.start()
    await node.box(image=BUSYBOX)
    other = await neighbour.box(image=BUSYBOX)
    await node.kill()
    await remove_left(node.data / "docker", engine.environment)
    assert engine.containers() == [container_of(engine, other.uid)]


async def test_a_watcher_sees_every_phase(node: NodeProcess) -> None:
    async with asyncio.timeout(PATIENCE), node.watch() as events:
        sandbox = await node.create(image=BUSYBOX)
        phases = []
        async for event in events:
            if event.HasField("sandbox"):
                phases.append(event.sandbox.phase)
                if event.sandbox.phase == RUNNING:
                    await node.delete(sandbox.uid)
                if event.sandbox.phase == GONE:
                    break
    assert phases[:2] == [STARTING, RUNNING] and phases[-1] == GONE


async def test_an_ordinary_user_of_the_engine_needs_no_root(
    make_node: Callable[..., NodeProcess], engine: TestEngine
) -> None:
    engine.folder.chmod(0o755)
    mode = engine.socket.stat().st_mode
    engine.socket.chmod(0o666)
    try:
        node = make_node(user=65533)
        await node.start()
        box = await node.box(image=BUSYBOX)
        assert (await box.ok("id -u")).strip() == "0"
        await node.delete(box.uid)
        assert list((node.data / "docker" / "sandboxes").iterdir()) == []
    finally:
        engine.socket.chmod(mode & 0o777)
