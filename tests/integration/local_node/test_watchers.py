"""A consumer that moves from one real watcher to another, which stood still or was cut off meanwhile."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from services.common import watch_cache
from services.common.health import Health
from services.common.observed import Observed
from services.common.states import State
from services.common.watch_cache import WatchCache
from tests.integration.local_node.harness import PATIENCE, REPOSITORY, NodeProcess
from tests.support.health import SERVING, wait_health


class Line:
    """A Unix socket in front of another one, whose bytes can be held back."""

    def __init__(self, path: Path, target: str) -> None:
        self.path = path
        self._target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._passing: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._serve, self.path)
        try:
            yield
        finally:
            server.close()
            for task in self._passing:
                task.cancel()
            await asyncio.gather(*self._passing, return_exceptions=True)
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.sleep(0)  # in which they are closed

    def hold(self) -> None:
        """Let nothing through from now on."""
        self._flowing.clear()

    def release(self) -> None:
        """Let everything through, also what was held back."""
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        self._writers |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._passing.add(asyncio.ensure_future(self._pass(source, sink)))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


class Replicas:
    """Two watchers of one node, and a consumer of one of them at a time."""

    def __init__(self, node: NodeProcess, folder: Path) -> None:
        self.node = node
        self.folder = folder
        self.line = Line(folder / "line", node.address.removeprefix("unix:"))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.health = Health([watch_cache.DEPENDENCY])
        self.told: list[Observed] = []
        # Followed at each new connection, as the name of a service that has several addresses.
        self.cache = WatchCache(f"unix:{folder}/now", self.health, include_spec=False, on_change=self.told.append)

    async def start(self, name: str, node_address: str) -> None:
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "clients/python/src")]),
            "ORCHARD_LISTEN": f"unix:{self.folder}/{name}",
            "ORCHARD_NODE_ADDRESS": node_address,
            "ORCHARD_PUBLIC_KEYS_FILE": str(self.node.home / "keys.pem"),
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "services.watcher"], env=environment, stdout=log, stderr=log, cwd="/"
            )
        await wait_health(f"unix:{self.folder}/{name}", SERVING)

    def move_to(self, name: str) -> None:
        """Whoever connects from now on reaches this one."""
        (self.folder / "next").symlink_to(name)
        (self.folder / "next").rename(self.folder / "now")

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    async def live(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while not self.cache.live:
                await asyncio.sleep(0.01)

    async def ready(self, sandbox_id: str) -> None:
        found = await self.cache.wait("t", sandbox_id, lambda seen: seen.state is State.READY, PATIENCE)
        assert found is not None and found.state is State.READY, found

    def states(self) -> dict[str, State]:
        return {seen.sandbox_id: seen.state for seen in self.cache.living()}

    def ended(self) -> set[str]:
        """What the consumer was ever told to be gone."""
        return {seen.sandbox_id for seen in self.told if seen.state is State.DELETED}


@pytest.fixture
async def replicas(node: NodeProcess, tmp_path: Path) -> AsyncIterator[Replicas]:
    """`one` watches the node directly and is followed; `two` watches it through the line."""
    async with AsyncExitStack() as stack:
        replicas = Replicas(node, tmp_path)
        await stack.enter_async_context(replicas.line.open())
        for name, address in (("one", node.address), ("two", f"unix:{replicas.line.path}")):
            await replicas.start(name, address)
            stack.callback(replicas.kill, name)
        replicas.move_to("one")
        following = asyncio.ensure_future(replicas.cache.run())
        try:
            await replicas.live()
            yield replicas
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_one_that_was_cut_off_says_so_until_it_has_caught_up(replicas: Replicas) -> None:
    node = replicas.node
    kept, doomed = await node.create("kept"), await node.create("doomed")
    for name in ("kept", "doomed"):
        await replicas.ready(name)
    await wait_until_two_has(replicas, {"kept", "doomed"})
    replicas.line.hold()
    await node.create("new")
    await replicas.ready("new")
    await node.delete(doomed.uid)
    assert await replicas.cache.wait("t", "doomed", lambda seen: seen.state is State.DELETED, PATIENCE)
    replicas.move_to("two")
    replicas.kill("one")
    async with asyncio.timeout(PATIENCE):
        while "lags" not in replicas.health.wrong.get(watch_cache.DEPENDENCY, ""):
            await asyncio.sleep(0.01)
    assert not replicas.cache.live
    # It has not heard of the new one, and believes that the ended one lives: neither is taken from it.
    assert replicas.states() == {"kept": State.READY, "new": State.READY}
    replicas.line.release()
    await replicas.live()
    assert replicas.states() == {"kept": State.READY, "new": State.READY}
    assert replicas.ended() == {"doomed"}
    await node.delete(kept.uid)
    assert await replicas.cache.wait("t", "kept", lambda seen: seen.state is State.DELETED, PATIENCE)


async def test_one_that_stood_still_loses_nothing(replicas: Replicas) -> None:
    node = replicas.node
    await node.create("kept")
    await replicas.ready("kept")
    await wait_until_two_has(replicas, {"kept"})
    replicas.processes["two"].send_signal(signal.SIGSTOP)
    made = [f"new{number}" for number in range(5)]
    for name in made:
        await node.create(name)
    for name in made:
        await replicas.ready(name)
    replicas.move_to("two")
    replicas.kill("one")
    # Connected before it goes on, the consumer may well be served before the news of the node are read.
    async with asyncio.timeout(PATIENCE):
        while replicas.cache.live:
            await asyncio.sleep(0.01)
    replicas.processes["two"].send_signal(signal.SIGCONT)
    await replicas.live()
    assert replicas.states() == dict.fromkeys(["kept", *made], State.READY)
    assert replicas.ended() == set()


async def wait_until_two_has(replicas: Replicas, names: set[str]) -> None:
    """Wait until the second replica, too, has found these READY."""
    other = WatchCache(f"unix:{replicas.folder}/two", Health(), include_spec=False)
    following = asyncio.ensure_future(other.run())
    try:
        for name in names:
            assert await other.wait("t", name, lambda seen: seen.state is State.READY, PATIENCE)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
