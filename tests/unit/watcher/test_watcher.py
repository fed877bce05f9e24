"""The watcher's cache against scripted streams of a runtime, with agents that answer when told to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from orchard.watch.v1 import watch_service_pb2

from services.common.errors import UnavailableError
from services.common.health import Health
from services.common.observed import Observed
from services.common.states import Reason, State
from services.common.times import now_ms
from services.watcher.model import Bookmark, Seen, Synced
from services.watcher.service import Watcher
from services.watcher.servicer import WatchServicer

BACKSTOP = 110


class Script:
    """A runtime whose streams the test writes, and a prober."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Seen | Synced | Bookmark | Exception] = asyncio.Queue()
        self.streams = 0
        self.answering: set[str] = set()
        self.asked: list[str] = []

    async def watch(self) -> AsyncIterator[Seen | Synced | Bookmark]:
        self.streams += 1
        while True:
            event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            yield event

    async def answers(self, endpoint: str, uid: str) -> str | None:
        self.asked.append(uid)
        return "1.2.3" if uid in self.answering else None

    def put(self, *events: Seen | Synced | Bookmark | Exception) -> None:
        for event in events:
            self.events.put_nowait(event)


def seen(
    uid: str,
    revision: int,
    state: State = State.STARTING,
    *,
    endpoint: str = "unix:/a",
    start_timeout: float = 60,
    **more,
) -> Seen:
    more = {"create_ms": now_ms(), **more}
    observed = Observed("t", f"id-{uid}", uid, revision, state, endpoint=endpoint, **more)
    return Seen(observed, start_timeout)


@asynccontextmanager
async def watching():
    script = Script()
    watcher = Watcher(script, script, Health(), probe_interval_seconds=0.005)
    task = asyncio.ensure_future(watcher.run())
    try:
        yield script, watcher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def follow(watcher: Watcher):
    """A subscription once the watcher has synced."""
    async with asyncio.timeout(BACKSTOP):
        while True:
            try:
                return watcher.subscribe()
            except UnavailableError:
                await asyncio.sleep(0)


async def until(subscription, uid: str, state: State) -> Observed:
    async with asyncio.timeout(BACKSTOP):
        while True:
            for change in await subscription.next(BACKSTOP):
                if (change.uid, change.state) == (uid, state):
                    return change


async def test_no_snapshot_before_the_runtime_was_seen() -> None:
    async with watching() as (script, watcher):
        with pytest.raises(UnavailableError):
            watcher.subscribe()
        script.put(seen("a", 5, State.FAILED, reason=Reason.OOM), Synced())
        snapshot, _ = await follow(watcher)
        assert [(one.uid, one.state, one.reason) for one in snapshot] == [("a", State.FAILED, Reason.OOM)]


async def test_ready_only_when_the_agent_answered_as_that_sandbox() -> None:
    async with watching() as (script, watcher):
        script.put(Synced())
        _, changes = await follow(watcher)
        script.put(seen("a", 5))
        starting = await until(changes, "a", State.STARTING)
        while len(script.asked) < 3:
            await asyncio.sleep(0.001)
        script.answering.add("a")
        ready = await until(changes, "a", State.READY)
        assert ready.revision > starting.revision
        assert ready.ready_ms >= ready.create_ms


async def test_an_agent_that_never_answers_fails_the_sandbox() -> None:
    async with watching() as (script, watcher):
        script.put(Synced())
        _, changes = await follow(watcher)
        script.put(seen("a", 5, start_timeout=0.05))
        failed = await until(changes, "a", State.FAILED)
        assert failed.reason is Reason.AGENT_START
        assert "0.05 s" in failed.message


async def test_an_old_sandbox_survives_probes_that_miss_after_a_restart_of_the_watcher() -> None:
    async with watching() as (script, watcher):
        script.put(seen("a", 5, start_timeout=30, create_ms=now_ms() - 120_000), Synced())
        _, changes = await follow(watcher)
        async with asyncio.timeout(BACKSTOP):
            while len(script.asked) < 3:
                await asyncio.sleep(0.001)
        script.answering.add("a")
        found = []
        async with asyncio.timeout(BACKSTOP):
            while State.READY not in found:
                found += [change.state for change in await changes.next(BACKSTOP)]
        assert State.FAILED not in found


async def test_no_probe_outlives_its_sandbox() -> None:
    async with watching() as (script, watcher):
        script.put(Synced())
        _, changes = await follow(watcher)
        script.put(seen("a", 5))
        await until(changes, "a", State.STARTING)
        assert any(task.get_name() == "probe a" for task in asyncio.all_tasks())
        script.put(seen("a", 6, State.DELETED))
        await until(changes, "a", State.DELETED)
        async with asyncio.timeout(BACKSTOP):
            while any(task.get_name() == "probe a" for task in asyncio.all_tasks()):
                await asyncio.sleep(0.001)


async def test_the_end_of_a_sandbox_says_when_it_was_ready() -> None:
    async with watching() as (script, watcher):
        script.answering.add("a")
        script.put(seen("a", 5), Synced())
        _, changes = await follow(watcher)
        ready = await until(changes, "a", State.READY)
        script.put(seen("a", 6, State.FAILED, reason=Reason.OOM))
        assert (await until(changes, "a", State.FAILED)).ready_ms == ready.ready_ms
        script.put(seen("a", 7, State.DELETED))
        assert (await until(changes, "a", State.DELETED)).ready_ms == ready.ready_ms > 0


async def test_a_frozen_cache_is_not_served() -> None:
    async with watching() as (script, watcher):
        script.put(seen("a", 5), Synced())
        await follow(watcher)
        stream = WatchServicer(watcher, asyncio.Event()).WatchSandboxes(watch_service_pb2.WatchSandboxesRequest(), None)
        async with asyncio.timeout(BACKSTOP):
            while not (await anext(stream)).HasField("synced"):
                pass
            script.put(UnavailableError("cut"))
            with pytest.raises(UnavailableError) as caught:
                while True:
                    await anext(stream)
        assert caught.value.reason == "WATCHER_NOT_SYNCED"
        with pytest.raises(UnavailableError):
            watcher.subscribe()
        script.put(seen("a", 5), Synced())
        snapshot, _ = await follow(watcher)
        assert [one.uid for one in snapshot] == ["a"]


async def test_a_relist_is_a_diff() -> None:
    async with watching() as (script, watcher):
        script.answering.update("ab")
        script.put(seen("a", 5), seen("b", 6), Synced())
        _, changes = await follow(watcher)
        await until(changes, "b", State.READY)
        script.put(UnavailableError("cut"), seen("b", 6), Synced())
        gone = await until(changes, "a", State.DELETED)
        assert gone.endpoint == ""
        snapshot, _ = await follow(watcher)
        assert [(one.uid, one.state) for one in snapshot] == [("b", State.READY)]
        assert script.streams == 2


async def test_revisions_only_grow_whatever_the_runtime_repeats() -> None:
    async with watching() as (script, watcher):
        script.answering.add("a")
        script.put(seen("a", 5), Synced())
        _, changes = await follow(watcher)
        ready = await until(changes, "a", State.READY)
        script.put(seen("a", 5), seen("a", 4), seen("a", 7, State.DELETING))
        deleting = await until(changes, "a", State.DELETING)
        assert deleting.revision > ready.revision
        script.put(seen("a", 6))
        script.put(seen("a", 8, State.DELETED))
        assert (await until(changes, "a", State.DELETED)).revision > deleting.revision


async def test_a_change_of_a_ready_sandbox_does_not_make_it_start_again() -> None:
    async with watching() as (script, watcher):
        script.answering.add("a")
        script.put(seen("a", 5), Synced())
        _, changes = await follow(watcher)
        ready = await until(changes, "a", State.READY)
        script.put(seen("a", 9, expire_ms=77))
        again = await until(changes, "a", State.READY)
        assert (again.expire_ms, again.ready_ms) == (77, ready.ready_ms)


async def test_two_replicas_give_the_same_finding_the_same_revision() -> None:
    revisions = []
    for _ in range(2):
        async with watching() as (script, watcher):
            script.answering.add("a")
            script.put(seen("a", 5), Synced())
            _, changes = await follow(watcher)
            revisions.append((await until(changes, "a", State.READY)).revision)
    assert revisions[0] == revisions[1]


async def test_a_sandbox_deleted_while_it_is_probed_stays_deleted() -> None:
    async with watching() as (script, watcher):
        script.put(Synced())
        _, changes = await follow(watcher)
        script.put(seen("a", 5))
        await until(changes, "a", State.STARTING)
        script.put(seen("a", 6, State.DELETING))
        await until(changes, "a", State.DELETING)
        script.answering.add("a")
        script.put(replace(seen("b", 7, State.FAILED)))
        await until(changes, "b", State.FAILED)
        snapshot, _ = await follow(watcher)
        assert {one.uid: one.state for one in snapshot} == {"a": State.DELETING, "b": State.FAILED}
