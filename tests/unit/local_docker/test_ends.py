"""Ends of containers that are told of while a sandbox is made, and answers of an engine that come in pieces."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.local.docker import runtime as docker_runtime
from services.local.docker.container import UID_LABEL, Place
from services.local.docker.engine import Container, Engine, EngineAwayError, EngineError
from services.local.docker.images import Puller
from services.local.docker.runtime import DockerRuntime
from services.local.runtime.model import Reason, Request
from services.local.runtime.steps import StartError


class ScriptedEngine:
    """Has one container at a time: "c1", "c2", ... The first one's start breaks off where `breaks_off` is set."""

    def __init__(self, *, breaks_off: bool, slow_looks: bool) -> None:
        self.told: asyncio.Queue[str] = asyncio.Queue()
        self.asked, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.made = 0
        self.lives = False
        self._breaks_off = breaks_off
        self._looks = asyncio.Event()
        if not slow_looks:
            self._looks.set()

    async def create(self, *_: Any) -> str:
        """Make the next; what was told before is dealt with meanwhile."""
        if self.made:
            self.told.put_nowait(f"c{self.made}")  # late
        self.asked.set()
        await spin()
        await self.answers.wait()
        self.made += 1
        self.lives = True
        return f"c{self.made}"

    async def start(self, container: str) -> None:
        """Start one."""
        if self._breaks_off and container == "c1":
            self.told.put_nowait("c1")
            await spin()
            raise EngineAwayError("it broke off")
        self._looks.set()
        await spin()

    async def remove(self, _: str) -> bool:
        """Remove the one that there is."""
        there, self.lives = self.lives, False
        if there:
            self.told.put_nowait(f"c{self.made}")
        return there

    async def inspect(self, container: str) -> Container | None:
        """Look at one."""
        its = self.lives and container == f"c{self.made}"
        if container == "c1":
            its = False
            await self._looks.wait()
        return Container(container, container, {}, "running") if its else None

    async def containers(self, _: str) -> list[Container]:
        """None: all are made later."""
        return []

    async def log_of(self, *_: Any) -> str:
        """Nothing."""
        return ""

    @asynccontextmanager
    async def events(self, _: str) -> AsyncIterator[AsyncIterator[str]]:
        """What is told."""

        async def ends() -> AsyncIterator[str]:
            while True:
                yield await self.told.get()

        yield ends()


class EndingEngine(ScriptedEngine):
    """Its container ends; it turns newcomers away, and goes on answering us for a while before it goes itself."""

    def __init__(self, *, stops: bool) -> None:
        super().__init__(breaks_off=False, slow_looks=False)
        self.ended = False
        self._stops = stops
        self._turned_away = 0

    async def inspect(self, container: str) -> Container | None:
        """The one that there is, as it was ended by SIGTERM."""
        status = "exited" if self.ended else "running"
        return Container(container, container, {UID_LABEL: "u"}, status, exit_code=143) if self.made else None

    async def containers(self, _: str) -> list[Container]:
        """That one."""
        found = await self.inspect("c1")
        return [found] if found is not None else []

    async def serves_others(self) -> bool:
        """Not once it stops."""
        if self._stops:
            self._turned_away += 1
            if self._turned_away == 3:
                self.told.put_nowait("")  # it is gone
        return not self._stops

    @asynccontextmanager
    async def events(self, _: str) -> AsyncIterator[AsyncIterator[str]]:
        """What is told, until it goes."""

        async def ends() -> AsyncIterator[str]:
            while told := await self.told.get():
                yield told

        yield ends()


async def spin() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def _runtime(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listens: Callable[[Path], Awaitable[bool]]
) -> DockerRuntime:
    async def have(*_: Any) -> None:
        """Every image is there."""

    monkeypatch.setattr(docker_runtime, "make_folders", lambda *_: None)
    monkeypatch.setattr(docker_runtime, "configuration", lambda *_: {})
    monkeypatch.setattr(docker_runtime, "_listens", listens)
    place = SimpleNamespace(
        label="label",
        name=lambda uid: f"n-{uid}",
        socket=tmp_path.joinpath,
        link=lambda uid: tmp_path / f"link-{uid}",
        folder=tmp_path.joinpath,
    )
    return DockerRuntime(
        cast("Engine", engine),
        cast("Place", place),
        cast("Puller", SimpleNamespace(have=have)),
        public_keys_pem=str,
        concurrent_starts=1,
    )


@pytest.mark.parametrize("slow_looks", [False, True])
async def test_the_end_of_an_earlier_attempt_is_not_that_of_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow_looks: bool
) -> None:
    async def listens(_: Path) -> bool:
        await spin()
        return True

    engine = ScriptedEngine(breaks_off=True, slow_looks=slow_looks)
    runtime = _runtime(engine, monkeypatch, tmp_path, listens)
    following = asyncio.create_task(runtime.follow())
    try:
        async with asyncio.timeout(110):
            await runtime.create(Request("u", "a"), None)
        assert engine.made == 2
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


async def test_a_container_that_ends_as_it_is_told_of_is_told_to_have_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def listens(_: Path) -> bool:
        # As if its end came in just now.
        asyncio.get_running_loop().call_soon(runtime._live["u"].ended.set)
        return True

    runtime = _runtime(ScriptedEngine(breaks_off=False, slow_looks=False), monkeypatch, tmp_path, listens)
    async with asyncio.timeout(110):
        with pytest.raises(StartError, match="ended at once"):
            await runtime.create(Request("u", "a"), None)
    assert not runtime._live


@pytest.mark.parametrize(
    ("stops", "reason"), [(True, Reason.HOST_RESTART), (False, Reason.DELETED_EXTERNALLY)], ids=["stops", "goes on"]
)
async def test_an_engine_that_takes_long_to_stop_has_ended_its_containers_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stops: bool, reason: Reason
) -> None:
    monkeypatch.setattr(docker_runtime, "_DOUBT_SECONDS", 0.0)
    engine = EndingEngine(stops=stops)
    runtime = _runtime(engine, monkeypatch, tmp_path, at_once)
    following = asyncio.create_task(runtime.follow())
    try:
        async with asyncio.timeout(110):
            await runtime.create(Request("u", "a"), None)
            engine.ended = True
            engine.told.put_nowait("c1")
            assert (await anext(aiter(runtime.watch()))).reason is reason
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


async def at_once(_: Path) -> bool:
    return True


async def test_a_create_that_is_given_up_as_its_folder_is_written_leaves_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def make_folders(*_: Any) -> None:
        writing.set()
        assert go_on.wait(110)
        (tmp_path / "u").mkdir()

    runtime = _runtime(ScriptedEngine(breaks_off=False, slow_looks=False), monkeypatch, tmp_path, at_once)
    monkeypatch.setattr(docker_runtime, "make_folders", make_folders)
    creating = asyncio.create_task(runtime.create(Request("u", "a"), None))
    assert await asyncio.to_thread(writing.wait, 110)
    runtime.give_up("u")
    await spin()
    ended_before = creating.done()
    go_on.set()
    with pytest.raises(StartError, match="was deleted"):
        await creating
    await runtime.delete("u")
    assert not ended_before, "what removes it would not find it"
    assert not (tmp_path / "u").exists()


async def test_a_daemon_that_stops_as_a_container_is_made_removes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = ScriptedEngine(breaks_off=False, slow_looks=False)
    runtime = _runtime(engine, monkeypatch, tmp_path, at_once)
    engine.answers.clear()
    creating = asyncio.create_task(runtime.create(Request("u", "a"), None))
    async with asyncio.timeout(110):
        await engine.asked.wait()
        creating.cancel()
        await spin()
        closing = asyncio.create_task(_stop(creating, runtime))
        await spin()
        engine.answers.set()
        await closing
        await spin()
    assert (engine.made, engine.lives) == (1, False)


async def _stop(creating: asyncio.Task[Any], runtime: DockerRuntime) -> None:
    """In the order in which a node stops."""
    await asyncio.gather(creating, return_exceptions=True)
    await runtime.close(platform_ends=True)


async def test_an_answer_that_comes_in_pieces_is_read_whole(tmp_path: Path) -> None:
    lines = [b"\x01\0\0\0\0\0\0\x04one\n", b"\x02\0\0\0\0\0\0\x04two\n"]
    refusal = [b'{"mess', b'age": "it is not there"}']

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status, pieces = ("200 OK", lines) if b"/logs" in head else ("500 No", refusal)
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0.2)
        writer.write(b"0\r\n\r\n")
        writer.close()

    socket = tmp_path / "s"
    async with await asyncio.start_unix_server(serve, socket), Engine.connected(socket) as engine:
        assert await engine.log_of("c", 5) == "one\ntwo"
        with pytest.raises(EngineError, match="it is not there"):
            await engine.inspect("c")
