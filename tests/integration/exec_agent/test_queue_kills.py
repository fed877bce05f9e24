"""Kills of an agent with commands in its queue: at each step that it takes, and at any time."""

from __future__ import annotations

import asyncio
import copy
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from orchard.exec.v1 import exec_pb2

from services.exec_agent import process
from tests.integration.exec_agent.conftest import AgentProcess, Client, agent_here, short_folder, spec
from tests.integration.exec_agent.test_queue_restarts import EXITED, NOT_STARTED, RESTARTED, hold, ran
from tests.integration.exec_agent.test_restarts import KILL_ROUNDS
from tests.integration.exec_agent.test_stdin import PIPE, stdin, write

T = TypeVar("T")
MakeAgent = Callable[..., AgentProcess]


@dataclass
class Told:
    """What clients had been told when a copy of the agent's directory was made."""

    offsets: dict[str, int] = field(default_factory=dict)
    """Accepted commands, and how much of their input was taken."""
    closed: set[str] = field(default_factory=set)
    results: dict[str, exec_pb2.ExecResult] = field(default_factory=dict)
    spawned: set[str] = field(default_factory=set)


class Kills:
    """Copies an agent's directory before, amid and after everything it does to it: as a kill there would leave it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._last: dict[str, bytes] = {}
        self.told = Told()
        self.copies: list[tuple[dict[str, bytes], Told]] = []
        for name in ("rename", "unlink", "ftruncate"):
            monkeypatch.setattr(os, name, self._around(getattr(os, name)))
        monkeypatch.setattr(os, "write", self._in_halves(os.write))
        monkeypatch.setattr(process.Launcher, "spawn", self._spawning(process.Launcher.spawn))

    def copy(self) -> None:
        found = {path.name: path.read_bytes() for path in self._folder.iterdir() if path.name.startswith(STATE)}
        if found != self._last:
            self._last = found
            self.copies.append((found, copy.deepcopy(self.told)))

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def copied(*arguments: Any, **named: Any) -> Any:
            self.copy()
            try:
                return call(*arguments, **named)
            finally:
                self.copy()

        return copied

    def _in_halves(self, write: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def halved(descriptor: int, data: Any) -> int:
            if not Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(self._folder):
                return write(descriptor, data)
            view = memoryview(data)
            written = write(descriptor, view[: len(view) // 2])
            self.copy()
            written += write(descriptor, view[len(view) // 2 :])
            self.copy()
            return written

        return halved

    def _spawning(self, spawn: Callable[..., Any]) -> Callable[..., Any]:
        def told(launcher: Any, spec: Any, descriptors: Any, events: Any, *rest: Any) -> Any:
            self.copy()
            self.told.spawned.add(events.exec_id)
            return spawn(launcher, spec, descriptors, events, *rest)

        return told


STATE = ("journal", "queued-")
RECORDED = {
    "fed": spec(shell="echo fed >> fed; cat", stdin_mode=PIPE),
    "unwanted": spec(shell="echo unwanted >> unwanted"),
    "plain": spec(shell="echo plain >> plain"),
}
INPUT = b"firstsecondlast"


async def record(client: Client, kills: Kills) -> None:
    """One that is fed, one that is cancelled, one that runs; all of them had to wait."""
    told = kills.told
    await hold(client)
    for exec_id, command in RECORDED.items():
        await client.start(command, wait=0, exec_id=exec_id)
        told.offsets[exec_id] = 0
    for offset, part in ((0, INPUT[:5]), (5, INPUT[5:11])):
        told.offsets["fed"] = (await write(client, "fed", part, offset=offset)).offset
    told.results["unwanted"] = (await client.signal("unwanted", cancel=True)).result
    await write(client, "fed", INPUT[11:], offset=11, end=True)
    told.offsets["fed"] = len(INPUT)
    told.closed.add("fed")
    await client.signal("gate", cancel=True)
    for exec_id in ("fed", "plain"):
        told.results[exec_id] = (await client.wait(exec_id)).result
    kills.copy()


async def go_on(client: Client, folder: Path, told: Told) -> None:
    """What a client finds that goes on with what it was told, and asks again for what it was not."""
    for exec_id, command in RECORDED.items():
        if exec_id not in told.offsets:
            await client.start(command, wait=0, exec_id=exec_id)
        if exec_id == "fed":
            await feed(client, told)
        if exec_id == "unwanted":
            await client.signal(exec_id, cancel=True)
        result = (await client.wait(exec_id)).result
        marks = (folder / exec_id).read_text().split() if (folder / exec_id).exists() else []
        if exec_id in told.results:
            assert (result, marks) == (told.results[exec_id], [])
        elif exec_id in told.spawned:
            assert result.ended in (RESTARTED, EXITED)
            assert not marks, "it ran before"
        elif exec_id == "unwanted":
            assert result.ended in (NOT_STARTED, EXITED, exec_pb2.EXEC_END_KILLED)
        elif result.ended == RESTARTED:
            assert not marks, "it was about to run"
        else:
            assert (result.ended, marks) == (EXITED, [exec_id])
            assert (await client.read(exec_id)).everything == (INPUT if exec_id == "fed" else b"")


async def feed(client: Client, told: Told) -> None:
    """Write what is missing, as the SDK does: from where the agent says on."""
    state = await stdin(client, "fed")
    if state.closed:
        return
    assert state.offset >= told.offsets.get("fed", 0)
    assert "fed" not in told.closed
    await write(client, "fed", INPUT[state.offset :], offset=state.offset, end=True)


async def test_a_kill_at_any_step_leaves_what_its_clients_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_folder() as folder:
        kills = Kills(folder, monkeypatch)
        async with agent_here(folder) as client:
            await record(client, kills)
        monkeypatch.undo()
    assert len(kills.copies) > 40, "of each step one"
    gone_on = 0
    for state, told in kills.copies:
        with short_folder() as folder:
            for name, content in state.items():
                (folder / name).write_bytes(content)
            async with agent_here(folder) as client:
                await go_on(client, folder, told)
                assert not [path for path in folder.iterdir() if path.name.startswith("queued-")]
            gone_on += (folder / "fed").exists()
    assert gone_on > 10


@pytest.mark.parametrize("seed", [1, 2])
async def test_an_agent_killed_again_and_again_runs_all_that_it_accepted_once(make_agent: MakeAgent, seed: int) -> None:
    agent, rng, done = make_agent(), random.Random(seed), asyncio.Event()

    async def kill_at_times() -> None:
        for _ in range(KILL_ROUNDS):
            await asyncio.sleep(rng.uniform(0.02, 0.25))  # the moment of the kill is what varies
            await asyncio.to_thread(agent.kill)
            await asyncio.to_thread(agent.start)
        done.set()

    async def retried(call: Callable[[Client], Awaitable[T]]) -> T:
        while True:
            try:
                async with agent.client() as client:
                    return await call(client)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.01)

    async def put(exec_id: str, text: bytes, offset: int) -> exec_pb2.StdinState:
        part = text[offset : offset + 50_000]
        return await retried(lambda client: write(client, exec_id, part, offset=offset, end=not part))

    async def feed_on(exec_id: str, text: bytes) -> None:
        """As the SDK does."""
        state = await retried(lambda client: stdin(client, exec_id))
        try:
            while not state.closed:
                state = await put(exec_id, text, state.offset)
        except grpc.aio.AioRpcError as error:  # a command that was ended takes no more
            assert error.code() == grpc.StatusCode.FAILED_PRECONDITION, error

    async def run_one(exec_id: str) -> int:
        text = os.urandom(120_000)
        command = spec(shell=f"echo {exec_id} >> log; cat", stdin_mode=PIPE)
        await retried(lambda client: client.start(command, wait=0, exec_id=exec_id))
        await feed_on(exec_id, text)
        result = (await retried(lambda client: client.wait(exec_id))).result
        output = await retried(lambda client: client.read(exec_id))
        assert result.ended in (EXITED, RESTARTED)
        assert text.startswith(output.everything)
        assert result.ended == RESTARTED or output.everything == text
        return result.ended

    async def run_on(number: int) -> list[int]:
        ends, last = [], False
        while not last:
            last = done.is_set()  # nothing disturbs that one
            ends.append(await run_one(f"{number}-{len(ends)}"))
        return ends

    killer = asyncio.create_task(kill_at_times())
    ends = await asyncio.gather(*map(run_on, range(4)))
    await killer
    marks = ran(agent)
    assert len(marks) == len(set(marks)), "nothing ran twice"
    assert set().union(*ends) == {EXITED, RESTARTED}, "both kinds were met"
