"""What the watcher makes of starts that hang and of streams with gaps: by its own clock, with scripted streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.common.errors import UnavailableError
from services.common.health import Health
from services.common.observed import Observed
from services.common.states import Reason, State
from services.common.times import now_ms
from services.watcher.model import Bookmark, Event, GiveUp, Interrupted, Restarted, Seen, Synced
from services.watcher.service import DEPENDENCY, Watcher

BACKSTOP = 110


class Script:
    """A runtime whose stream the test writes, and agents that answer when told to."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.streams = 0
        self.answering: set[str] = set()
        self.asked: asyncio.Queue[str] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[Event]:
        self.streams += 1
        while True:
            yield await self.events.get()

    async def answers(self, endpoint: str, uid: str) -> str | None:
        assert endpoint
        self.asked.put_nowait(uid)
        return "" if uid in self.answering else None

    def put(self, *events: Event) -> None:
        for event in events:
            self.events.put_nowait(event)


def seen(
    uid: str, revision: int, state: State = State.STARTING, *, start_timeout=60.0, running=True, give_up=None, **m
):
    return Seen(Observed("t", f"id-{uid}", uid, revision, state, **m), start_timeout, running, give_up)


def gone(uid: str, revision: int) -> Seen:
    return Seen(Observed("", "", uid, revision, State.DELETED), 0)


def soon(message: str = "too long", milliseconds: int = 2000) -> GiveUp:
    """Long enough for a busy machine to come to what happens before."""
    return GiveUp(now_ms() + milliseconds, Reason.IMAGE_PULL, message)


class Watching:
    def __init__(self, silence_seconds: float) -> None:
        self.script = Script()
        self.health = Health([DEPENDENCY])
        self.watcher = Watcher(
            self.script, self.script, self.health, probe_interval_seconds=0.005, silence_seconds=silence_seconds
        )

    async def follow(self):
        async with asyncio.timeout(BACKSTOP):
            while True:
                try:
                    snapshot, changes = self.watcher.subscribe()
                except UnavailableError:
                    await asyncio.sleep(0)
                else:
                    self.changes = changes
                    return snapshot

    async def until(self, uid: str, state: State, message: str | None = None) -> Observed:
        async with asyncio.timeout(BACKSTOP):
            while True:
                for change in await self.changes.next(BACKSTOP):
                    if (change.uid, change.state) == (uid, state) and message in (None, change.message):
                        return change

    async def next(self) -> list[tuple[str, State]]:
        return [(change.uid, change.state) for change in await self.changes.next(BACKSTOP)]

    async def known(self) -> dict[str, State]:
        return {one.uid: one.state for one in await self.follow()}


@asynccontextmanager
async def watching(*events: Event, silence_seconds: float = 60):
    w = Watching(silence_seconds)
    task = asyncio.ensure_future(w.watcher.run())
    try:
        if events:
            w.script.put(*events)
            await w.follow()
        yield w
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_start_that_hangs_fails_by_the_watchers_own_clock() -> None:
    async with watching(Synced()) as w:
        w.script.put(seen("a", 5, reason=Reason.IMAGE_PULL, message="no such host", give_up=soon("no image")))
        starting = await w.until("a", State.STARTING)
        assert (starting.reason, starting.message) == (Reason.IMAGE_PULL, "no such host")
        failed = await w.until("a", State.FAILED)
        assert (failed.reason, failed.message) == (Reason.IMAGE_PULL, "no image")
        assert failed.revision > starting.revision


async def test_one_that_went_on_in_time_is_not_given_up() -> None:
    async with watching(Synced()) as w:
        w.script.answering.add("a")
        w.script.put(
            seen("a", 5, give_up=soon(milliseconds=60_000)),
            seen("a", 6, give_up=soon(milliseconds=2000)),
            seen("a", 7, endpoint="1.2.3.4:7070"),
            seen("b", 8, give_up=soon(milliseconds=2100)),
        )
        await w.until("b", State.FAILED)
        assert await w.known() == {"a": State.READY, "b": State.FAILED}


async def test_what_was_given_up_on_never_comes_back() -> None:
    async with watching(Synced()) as w:
        w.script.put(seen("a", 5, give_up=soon("no image")))
        failed = await w.until("a", State.FAILED)
        w.script.answering.add("a")
        w.script.put(seen("a", 6, endpoint="1.2.3.4:7070"))
        again = await w.until("a", State.FAILED)
        assert (again.reason, again.message, again.endpoint) == (failed.reason, failed.message, "")
        assert again.revision > failed.revision
        assert w.script.asked.empty()


async def test_the_start_timeout_counts_from_when_its_processes_run() -> None:
    async with watching(Synced()) as w:
        made = {"endpoint": "1.2.3.4:7070", "start_timeout": 0.05}
        w.script.put(seen("a", 5, running=False, **made))
        async with asyncio.timeout(BACKSTOP):
            began = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() - began < 0.15:
                await w.script.asked.get()
        assert await w.known() == {"a": State.STARTING}
        w.script.put(seen("a", 6, **made))
        failed = await w.until("a", State.FAILED)
        assert failed.reason is Reason.AGENT_START


async def test_an_agent_may_answer_before_the_runtime_says_that_it_runs() -> None:
    async with watching(Synced()) as w:
        w.script.answering.add("a")
        w.script.put(seen("a", 5, running=False, endpoint="1.2.3.4:7070", message="being made", give_up=soon()))
        ready = await w.until("a", State.READY)
        assert (ready.endpoint, ready.message) == ("1.2.3.4:7070", "")
        # What the runtime says later, behind the agent's own word, does not undo it.
        w.script.put(seen("a", 6, running=False, message="being made"), seen("b", 7, State.FAILED))
        await w.until("b", State.FAILED)
        (a, _b) = await w.follow()
        assert (a.state, a.endpoint, a.message) == (State.READY, "1.2.3.4:7070", "")


async def test_asking_stops_where_there_is_no_address_and_begins_again_with_one() -> None:
    async with watching(Synced()) as w:
        w.script.put(seen("a", 5, running=False, endpoint="1.2.3.4:7070"))
        async with asyncio.timeout(BACKSTOP):
            await w.script.asked.get()
            w.script.put(seen("a", 6, message="back-off"))
            while any(task.get_name() == "probe a" for task in asyncio.all_tasks()):
                await asyncio.sleep(0.001)
        w.script.answering.add("a")
        w.script.put(seen("a", 7, endpoint="1.2.3.4:7070"))
        await w.until("a", State.READY)


async def test_each_new_message_of_a_start_is_told() -> None:
    async with watching(Synced()) as w:
        for revision, message in enumerate(("no node yet", "being made", "its agent starts"), start=5):
            w.script.put(seen("a", revision, message=message, endpoint="1.2.3.4:7070", running=False))
            assert (await w.until("a", State.STARTING, message)).revision == revision * 4


async def test_the_last_word_says_why_it_ended() -> None:
    async with watching(Synced()) as w:
        w.script.put(seen("a", 5, State.FAILED, reason=Reason.NODE_LOST, message="node-7 is gone"))
        await w.until("a", State.FAILED)
        w.script.put(seen("a", 6, State.DELETING), gone("a", 7))
        deleted = await w.until("a", State.DELETED)
        assert (deleted.sandbox_id, deleted.reason, deleted.message) == ("id-a", Reason.NODE_LOST, "node-7 is gone")


async def test_what_held_a_start_up_is_not_why_it_was_removed() -> None:
    async with watching(Synced()) as w:
        w.script.put(seen("a", 5, reason=Reason.UNSCHEDULABLE, message="no node"))
        await w.until("a", State.STARTING)
        w.script.put(gone("a", 6))
        assert (await w.until("a", State.DELETED)).reason is Reason.UNSPECIFIED


async def test_the_end_of_what_was_never_known_is_not_told() -> None:
    async with watching(Synced()) as w:
        w.script.put(gone("a", 6), seen("b", 7, State.FAILED))
        assert await w.next() == [("b", State.FAILED)]


async def test_a_new_snapshot_is_a_diff_and_ends_no_subscription() -> None:
    async with watching(seen("a", 5, State.FAILED), seen("b", 6, State.FAILED), Synced()) as w:
        w.script.put(Interrupted("410"), Restarted(), seen("b", 6, State.FAILED), seen("c", 9, State.FAILED), Synced())
        await w.until("a", State.DELETED)
        assert w.watcher.synced
        assert w.script.streams == 1
        assert await w.known() == {"b": State.FAILED, "c": State.FAILED}


async def test_a_snapshot_that_broke_off_drops_nothing() -> None:
    async with watching(seen("a", 5, State.FAILED), seen("b", 6, State.FAILED), Synced()) as w:
        w.script.put(Restarted(), seen("a", 5, State.FAILED), Restarted())
        w.script.put(seen("b", 6, State.FAILED), seen("c", 9, State.FAILED))
        assert await w.next() == [("c", State.FAILED)]
        assert await w.known() == {"a": State.FAILED, "b": State.FAILED, "c": State.FAILED}
        w.script.put(Synced())
        await w.until("a", State.DELETED)


async def test_a_gap_before_the_first_snapshot_says_why_in_health() -> None:
    async with watching() as w:
        w.script.put(Interrupted("HTTP 403: pods is forbidden"))
        async with asyncio.timeout(BACKSTOP):
            while w.health.wrong[DEPENDENCY] != "HTTP 403: pods is forbidden":
                await asyncio.sleep(0.001)
        with pytest.raises(UnavailableError):
            w.watcher.subscribe()


async def test_a_short_gap_ends_nothing_a_long_silence_does() -> None:
    async with watching(Synced(), silence_seconds=4) as w:
        clock = asyncio.get_running_loop().time
        began = clock()
        w.script.put(Interrupted("cut"))
        async with asyncio.timeout(BACKSTOP):
            # Signs of life keep it going for longer than the silence that ends it.
            while clock() - began < 5:
                assert w.watcher.synced
                assert DEPENDENCY not in w.health.wrong
                w.script.put(Bookmark())
                await asyncio.sleep(0.001)
            w.script.put(Interrupted("connection refused"))
            while w.watcher.synced or DEPENDENCY not in w.health.wrong:
                await asyncio.sleep(0.001)
        assert w.health.wrong[DEPENDENCY] == "silent for 4 s: connection refused"
        w.script.put(Synced())
        await w.follow()
        assert w.script.streams == 2


async def test_attempts_at_a_new_snapshot_are_no_sign_of_life() -> None:
    async with watching(Synced(), silence_seconds=0.3) as w:
        async with asyncio.timeout(BACKSTOP):
            while w.watcher.synced:
                w.script.put(Interrupted("nothing came"), Restarted())
                await asyncio.sleep(0.001)
