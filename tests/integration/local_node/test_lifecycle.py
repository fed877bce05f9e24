import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import timestamp_pb2
from orchard.node.v1 import node_service_pb2
from orchard.sandbox.v1 import sandbox_pb2

from tests.integration.local_node.harness import (
    FAILED,
    GONE,
    PATIENCE,
    RUNNING,
    STARTING,
    STOPPING,
    NodeProcess,
    gone,
)


async def test_watchers_see_every_phase_with_growing_revisions(node: NodeProcess) -> None:
    async with node.watch() as events:
        first = await asyncio.wait_for(anext(aiter(events)), PATIENCE)
        assert first.HasField("synced")
        sandbox = await node.create("alpha")
        phases, revisions = [], []
        async with asyncio.timeout(PATIENCE):
            async for event in events:
                if not event.HasField("sandbox"):
                    continue
                phases.append(event.sandbox.phase)
                revisions.append(event.sandbox.revision)
                if event.sandbox.phase == RUNNING:
                    break
            deleting = asyncio.create_task(node.delete(sandbox.uid))
            async for event in events:
                if event.HasField("sandbox"):
                    phases.append(event.sandbox.phase)
                    revisions.append(event.sandbox.revision)
                    if event.sandbox.phase == GONE:
                        break
            await deleting
    assert phases == [STARTING, RUNNING, STOPPING, GONE]
    assert revisions == sorted(set(revisions))


async def test_a_quiet_watch_has_bookmarks(node: NodeProcess) -> None:
    async with asyncio.timeout(PATIENCE), node.watch() as events:
        kinds = []
        async for event in events:
            kinds.append(event.WhichOneof("event"))
            if kinds[-1] == "bookmark":
                break
    assert kinds == ["synced", "bookmark"]


async def test_no_change_falls_between_snapshot_and_stream(node: NodeProcess) -> None:
    """Watches that begin at any moment of twenty creates end with all twenty running."""

    async def watch_all(wanted: int) -> set[str]:
        seen: set[str] = set()
        async with node.watch() as events:
            async for event in events:
                if event.HasField("sandbox") and event.sandbox.phase == RUNNING:
                    seen.add(event.sandbox.uid)
                    if len(seen) == wanted:
                        return seen
        raise AssertionError

    async with asyncio.timeout(PATIENCE):
        async with asyncio.TaskGroup() as group:
            watches = []
            created = []
            for number in range(20):
                created.append(group.create_task(node.create(f"box-{number}")))
                watches.append(group.create_task(watch_all(20)))
                await created[-1]
        uids = {task.result().uid for task in created}
        assert all(watch.result() == uids for watch in watches)
        await asyncio.gather(*(node.delete(uid) for uid in uids))


async def test_a_repeated_create_is_the_same_sandbox(node: NodeProcess) -> None:
    first = await node.create("alpha", request_id="one")
    again = await node.create("alpha", request_id="one")
    assert again.uid == first.uid
    for fields in ({"request_id": "two"}, {"request_id": "one", "spec_hash": "other"}):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await node.create("alpha", **fields)
        assert error.value.code() == grpc.StatusCode.ALREADY_EXISTS
    other = await node.create("alpha", tenant="u", request_id="one")
    assert other.uid != first.uid
    await node.delete(first.uid)
    fresh = await node.create("alpha", request_id="one")
    assert fresh.uid != first.uid


async def test_a_delete_during_the_start_wins(node: NodeProcess) -> None:
    for number in range(5):
        sandbox = await node.create(f"box-{number}")
        await node.delete(sandbox.uid)
        assert sandbox.uid not in await node.snapshot()
    assert not list((node.data / "node" / "sandboxes").iterdir())


async def test_update_moves_the_deadline(node: NodeProcess) -> None:
    sandbox = await node.create("alpha")
    until = timestamp_pb2.Timestamp(seconds=2_000_000_000)
    answer = await node.stub.UpdateSandbox(
        node_service_pb2.UpdateSandboxRequest(uid=sandbox.uid, expire_time=until), timeout=PATIENCE
    )
    assert answer.sandbox.expire_time == until
    assert answer.sandbox.revision > sandbox.revision
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await node.stub.UpdateSandbox(node_service_pb2.UpdateSandboxRequest(uid="none", expire_time=until))
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"network": sandbox_pb2.Network(mode=sandbox_pb2.NETWORK_MODE_OPEN)}, "spec.network.mode"),
        ({"network": sandbox_pb2.Network(mode=sandbox_pb2.NETWORK_MODE_DNS_ONLY)}, "spec.network.mode"),
        ({"resources": sandbox_pb2.Resources(gpu=1)}, "spec.resources.gpu"),
        ({"image_pull_secret": "a"}, "spec.image_pull_secret"),
        ({"node_selector": {"a": "b"}}, "spec.node_selector"),
        ({"runtime_class": "gvisor"}, "spec.runtime_class"),
        ({"resources": sandbox_pb2.Resources(disk_bytes=1 << 30)}, "spec.resources.disk_bytes"),
        ({"resources": sandbox_pb2.Resources(memory_bytes=1)}, "spec.resources.memory_bytes"),
        ({"working_directory": "relative"}, "spec.working_directory"),
        ({"env": {"A B": "x"}}, "spec.env"),
        ({"sandbox_id": "Not/An/Id"}, "sandbox_id"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(node: NodeProcess, fields: dict, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await node.create(**fields)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in error.value.details()


async def test_an_unknown_image_is_not_found(node: NodeProcess) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await node.create(image="never:imported")
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    assert "orchard image import" in error.value.details()


async def test_an_agent_that_is_killed_is_replaced(leveled: NodeProcess) -> None:
    box = await leveled.box()
    await box.ok("echo kept > /root/file")
    first = box.agent_pid
    os.kill(first, signal.SIGKILL)
    await gone(first)
    await box.healthy()
    assert box.agent_pid != first
    assert (await box.ok("cat /root/file")).strip() == "kept"


async def test_kill_everything_inside_leaves_a_working_sandbox(leveled: NodeProcess) -> None:
    box = await leveled.box()
    first = box.agent_pid
    with pytest.raises(grpc.aio.AioRpcError):
        await box.run("kill -9 -1; sleep 30")
    await gone(first)
    await box.healthy()
    assert (await box.ok("echo alive")).strip() == "alive"
    assert (await leveled.snapshot())[box.uid].phase == RUNNING


async def test_an_agent_that_keeps_dying_fails_its_sandbox(node: NodeProcess) -> None:
    box = await node.box()
    init = box.init_pid
    async with asyncio.timeout(PATIENCE):
        while (await node.snapshot())[box.uid].phase == RUNNING:
            pid = box.agent_pid
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            await gone(pid)
    failed = (await node.snapshot())[box.uid]
    assert failed.phase == FAILED
    assert failed.reason == sandbox_pb2.SANDBOX_REASON_AGENT_START
    await gone(init)
    await node.delete(box.uid)


async def test_a_sandbox_whose_init_is_killed_has_failed(node: NodeProcess) -> None:
    box = await node.box()
    os.kill(box.init_pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE), node.watch() as events:
        async for event in events:
            if event.HasField("sandbox") and event.sandbox.phase == FAILED:
                assert event.sandbox.reason == sandbox_pb2.SANDBOX_REASON_DELETED_EXTERNALLY
                break
    await node.delete(box.uid)


async def test_a_zygote_that_is_killed_is_replaced(leveled: NodeProcess) -> None:
    box = await leveled.box()
    zygote = _zygote_of(leveled)
    os.kill(zygote, signal.SIGKILL)
    await gone(zygote)
    assert (await box.ok("echo alive")).strip() == "alive"
    other = await leveled.box()
    assert (await other.ok("echo also")).strip() == "also"
    # An agent whose parent was the first zygote is still reaped, so its sandbox can go.
    await leveled.delete(box.uid)
    await leveled.delete(other.uid)


async def test_a_zygote_that_dies_with_a_fresh_agent_costs_no_sandbox(leveled: NodeProcess) -> None:
    box = await leveled.box()
    zygote, before = _zygote_of(leveled), _sockets(leveled)
    os.kill(zygote, signal.SIGSTOP)
    os.kill(box.agent_pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        # A pair is made for the answer; one of it is left once the request was sent.
        while "joining a fresh one" not in leveled.log() or len(_sockets(leveled) - before) != 1:
            await asyncio.sleep(0.01)
    os.kill(zygote, signal.SIGKILL)
    await box.healthy()
    assert (await box.ok("echo alive")).strip() == "alive"
    told, *_again = [line for line in leveled.log().splitlines() if "joining a fresh one" in line and box.uid in line]
    # Nobody wrote down why; what is known is said.
    assert "nothing in the kernel's log; it was killed" in told
    await leveled.delete(box.uid)


async def test_an_agent_that_ends_with_its_sandbox_is_not_missed(leveled: NodeProcess) -> None:
    """The kernel ends it before the first process, which ends it: a fresh one would have nothing to join."""
    boxes = [await leveled.box() for _ in range(12)]
    for box in boxes:
        os.kill(box.init_pid, signal.SIGKILL)
    await asyncio.gather(*(gone(box.agent_pid) for box in boxes))
    for box in boxes:
        await leveled.delete(box.uid)
    uids = {box.uid for box in boxes}
    assert not [line for line in leveled.log().splitlines() if "agent ended" in line and any(u in line for u in uids)]


async def test_a_sandbox_whose_end_hangs_in_the_kernel_has_failed(node: NodeProcess) -> None:
    """Its first process has no agent any more, and waits for a process that does not go, as one in I/O to a file
    system that does not answer. Nothing would ever be answered there.
    """
    box = await node.box()
    seconds = f"86399.{secrets.randbelow(10**9):09}"
    await box.ok(f"sleep {seconds} >/dev/null 2>&1 &")
    with _kept_from_ending(_process_of(f"sleep {seconds}")):
        os.kill(box.init_pid, signal.SIGKILL)
        failed = await node.until(box.uid, FAILED)
        assert failed.reason == sandbox_pb2.SANDBOX_REASON_AGENT_START
        assert "does not end" in failed.message
        assert Path(f"/proc/{box.init_pid}").exists()
    await gone(box.init_pid)
    await node.delete(box.uid)


@contextlib.contextmanager
def _kept_from_ending(pid: int) -> Iterator[None]:
    """What is traced stays, dead, until its tracer has seen it."""
    libc = ctypes.CDLL(None, use_errno=True)
    seize, wait_for_all = 0x4206, 0x40000000  # PTRACE_SEIZE, __WALL
    assert libc.ptrace(seize, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, wait_for_all)


def _process_of(command: str) -> int:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() == command:
                return int(entry.name)
    raise AssertionError(f"no process runs {command}")


def _zygote_of(node: NodeProcess) -> int:
    found = []
    for pid in _descendants(node.process.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if _name(pid) == "orchard-agent" and _pid_inside(pid) == pid:
                found.append(pid)
    (zygote,) = found
    return zygote


def _sockets(node: NodeProcess) -> set[str]:
    links = set()
    for entry in Path(f"/proc/{node.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed
            links.add(str(entry.readlink()))
    return {link for link in links if link.startswith("socket:")}


def _descendants(pid: int) -> list[int]:
    found = []
    pending = [pid]
    while pending:
        parent = pending.pop()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            below = [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
            found += below
            pending += below
    return found


def _pid_inside(pid: int) -> int:
    """Its id in its own pid namespace."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("NSpid:")[2].split("\n")[0].split()[-1])


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def test_sandboxes_outlive_the_daemon(leveled: NodeProcess) -> None:
    box = await leveled.box()
    deleted = await leveled.box()
    init, agent = box.init_pid, box.agent_pid
    before = (await leveled.snapshot())[box.uid]
    await leveled.kill()
    assert (await box.ok("echo meanwhile")).strip() == "meanwhile"
    await leveled.start()
    after = (await leveled.snapshot())[box.uid]
    assert after.phase == RUNNING
    assert (box.init_pid, box.agent_pid) == (init, agent)
    await leveled.delete(deleted.uid)
    newer = await leveled.create("later")
    assert newer.revision > before.revision
    assert (await box.ok("echo still")).strip() == "still"
    # The daemon that took it over also replaces its agent.
    os.kill(agent, signal.SIGKILL)
    await gone(agent)
    await box.healthy()
    await leveled.delete(box.uid)
    assert not box.folder.exists()


async def test_a_daemon_that_stops_in_order_leaves_its_sandboxes(node: NodeProcess) -> None:
    box = await node.box()
    async with node.watch() as events:
        await asyncio.wait_for(anext(aiter(events)), PATIENCE)
        code = await node.stop()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in events:
                pass
    assert code == 0
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert (await box.ok("echo alive")).strip() == "alive"
    await node.start()
    assert (await node.snapshot())[box.uid].phase == RUNNING


async def test_all_sandboxes_end_with_the_lifeline(leveled: NodeProcess) -> None:
    boxes = [await leveled.box() for _ in range(3)]
    pids = [pid for box in boxes for pid in (box.init_pid, box.agent_pid)]
    await leveled.kill()
    leveled.cut_lifeline()
    for pid in pids:
        await gone(pid)
    os.close(leveled.lifeline_read)
    leveled.lifeline_read, leveled.lifeline_write = os.pipe()
    await leveled.start()
    for box in boxes:
        sandbox = (await leveled.snapshot())[box.uid]
        assert (sandbox.phase, sandbox.reason) == (FAILED, sandbox_pb2.SANDBOX_REASON_HOST_RESTART)
        await leveled.delete(box.uid)
        assert not box.folder.exists()


async def test_nothing_is_left_of_a_platform_that_ends(node: NodeProcess) -> None:
    boxes = [await node.box() for _ in range(3)]
    pids = [pid for box in boxes for pid in (box.init_pid, box.agent_pid)]
    groups = {path.parent for box in boxes for path in Path("/sys/fs/cgroup").glob(f"*/orchard-*/{box.uid}")}
    assert groups or os.geteuid() != 0
    node.cut_lifeline()
    assert await asyncio.to_thread(node.process.wait, PATIENCE) == 0
    for pid in pids:
        await gone(pid)
    assert not [path for path in groups if path.exists()]


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.05])
async def test_half_made_sandboxes_are_made_again(node: NodeProcess, delay: float) -> None:
    """The daemon is killed at some moment of ten starts."""
    created = [await node.create(f"box-{number}") for number in range(10)]
    # Not a wait for something: the moment of the kill is what varies.
    await asyncio.sleep(delay)
    await node.kill()
    await node.start()
    snapshot = await node.snapshot()
    assert {sandbox.uid for sandbox in created} == set(snapshot)
    for sandbox in snapshot.values():
        box = node.box_of(await node.until(sandbox.uid, RUNNING))
        await box.healthy()
        assert (await box.ok("echo whole")).strip() == "whole"
    await asyncio.gather(*(node.delete(uid) for uid in snapshot))
    assert not list((node.data / "node" / "sandboxes").iterdir())
    async with asyncio.timeout(PATIENCE):
        while _inits_of(node):
            await asyncio.sleep(0.01)


def _inits_of(node: NodeProcess) -> list[tuple[int, str]]:
    """Processes that hold the lifeline, the daemon and the zygote apart."""
    own = {node.process.pid, *_descendants(node.process.pid), os.getpid()}
    inode = os.fstat(node.lifeline_read).st_ino
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) not in own:
            with contextlib.suppress(OSError):
                if any(descriptor.stat().st_ino == inode for descriptor in (process / "fd").iterdir()):
                    found.append((int(process.name), (process / "status").read_text()[:300]))
    return found


async def test_a_hundred_at_once(node: NodeProcess) -> None:
    created = await asyncio.gather(*(node.create(f"box-{number}") for number in range(100)))
    wanted = {sandbox.uid for sandbox in created}
    running: set[str] = set()
    async with asyncio.timeout(PATIENCE), node.watch() as events:
        async for event in events:
            if event.HasField("sandbox"):
                assert event.sandbox.phase != FAILED, event.sandbox.message
                if event.sandbox.phase == RUNNING:
                    running.add(event.sandbox.uid)
                    if running == wanted:
                        break
    assert (await node.describe()).running_sandboxes == 100
    await asyncio.gather(*(node.delete(uid) for uid in wanted))
    assert not list((node.data / "node" / "sandboxes").iterdir())
    assert not list((node.run / "a").iterdir())
    assert await node.snapshot() == {}
