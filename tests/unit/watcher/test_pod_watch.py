"""What the watch of Pods asks an API server and makes of the answers: by scripted answers and a clock of the test."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from services.common.observed import Observed
from services.common.states import State
from services.watcher.model import Bookmark, Interrupted, Restarted, Seen, Synced
from services.watcher.pod_watch import ConnectionLostError, PodWatch, Timing

SELECTOR = "app=sandbox"
BACKSTOP = 110


def pod(name: str, version: int) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": {"uid": name, "resourceVersion": str(version)}}


def line(kind: str, thing: Mapping[str, Any]) -> bytes:
    return orjson.dumps({"type": kind, "object": thing}) + b"\n"


def change(name: str, version: int, kind: str = "MODIFIED") -> bytes:
    return line(kind, pod(name, version))


def bookmark(version: int, *, end: bool = False) -> bytes:
    notes = {"annotations": {"k8s.io/initial-events-end": "true"}} if end else {}
    return line("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version), **notes}})


def error(code: int, reason: str, **details: Any) -> bytes:
    return line("ERROR", {"kind": "Status", "code": code, "reason": reason, "message": "m", "details": details})


def pods_of(version: int, *found: dict[str, Any], more: str = "") -> bytes:
    metadata = {"resourceVersion": str(version), **({"continue": more} if more else {})}
    return orjson.dumps({"kind": "PodList", "metadata": metadata, "items": found})


def project(thing: dict[str, Any], *, removed: bool = False, complete_revision: int = 0) -> Seen:
    metadata = thing["metadata"]
    state = State.DELETED if removed else State.STARTING
    observed = Observed("t", "id", metadata["uid"], int(metadata["resourceVersion"]), state)
    return Seen(observed, 0, complete_revision=complete_revision)


LOST = ConnectionLostError("reset")
SILENT = ConnectionLostError("nothing for 75 s", silent=True)
FOR_EVER = None
"""Nothing more, and the script is over."""
NOTHING_MORE = "nothing more"


class Answer:
    """An answer of so many chunks, then its end, an error, or nothing for ever."""

    def __init__(
        self, *parts: bytes | str | Exception | None, status: int = 200, retry_after: str = "", lasts: float = 60
    ) -> None:
        self.parts = parts
        self.status = status
        self.retry_after = retry_after
        self.lasts = lasts
        self.open = False
        self.over = asyncio.Event()
        self.pass_by: Callable[[float], None] = lambda _seconds: None

    async def body(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            if part is FOR_EVER:
                self.over.set()
            if part in (FOR_EVER, NOTHING_MORE):
                await asyncio.Event().wait()
            if isinstance(part, Exception):
                self.pass_by(self.lasts)
                raise part
            yield part
        self.pass_by(self.lasts)


class Server:
    """Gives scripted answers in turn, on a clock that answers and waits move."""

    def __init__(self, *answers: Answer | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, str]] = []
        self.answer_seconds: list[float] = []
        self.read_seconds: list[float] = []
        self.forgotten = 0
        self.now = 0.0
        self.waits: list[float] = []
        self.snapshot_seconds = float(BACKSTOP)
        self.over = asyncio.Event()
        """Nothing more will come."""

    @asynccontextmanager
    async def get(
        self, query: Mapping[str, str], *, answer_seconds: float, read_seconds: float
    ) -> AsyncIterator[Answer]:
        self.asked.append(dict(query))
        self.answer_seconds.append(answer_seconds)
        self.read_seconds.append(read_seconds)
        answer = self.answers.pop(0) if self.answers else Answer(FOR_EVER)
        if isinstance(answer, Exception):
            raise answer
        answer.pass_by, answer.over = self.pass_by, self.over
        answer.open = True
        try:
            yield answer
        finally:
            answer.open = False

    def forget_credentials(self) -> None:
        self.forgotten += 1

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    @property
    def versions(self) -> list[str]:
        """From which version each request asked on; "" for a new snapshot."""
        return [query.get("resourceVersion", "") for query in self.asked]


class Longest(random.Random):
    """Waits as long as it may."""

    def uniform(self, a: float, b: float) -> float:
        return b


def watch_of(server: Server, rng: random.Random | None = None) -> PodWatch:
    return PodWatch(
        server,
        project,
        SELECTOR,
        Timing(snapshot=server.snapshot_seconds),
        rng=rng or Longest(),
        clock=lambda: server.now,
        sleep=server.sleep,
    )


def shown(event: Any) -> str:
    if isinstance(event, Seen):
        gone = "-" if event.observed.state is State.DELETED else ""
        return f"{gone}{event.observed.uid}{event.observed.revision}"
    return {Restarted: "restarted", Synced: "synced", Bookmark: "bookmark", Interrupted: "interrupted"}[type(event)]


async def run(server: Server, rng: random.Random | None = None) -> str:
    """What comes until the script is over, in a few words."""
    watch = watch_of(server, rng)
    return await told_by(watch, server)


async def told_by(watch: PodWatch, server: Server) -> str:
    told = []
    events = watch.events()
    over = asyncio.ensure_future(server.over.wait())
    async with asyncio.timeout(BACKSTOP):
        while True:
            following = asyncio.ensure_future(anext(events))
            await asyncio.wait((following, over), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                break
            told.append(shown(following.result()))
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await events.aclose()
    return " ".join(told)


SNAPSHOT = (change("a", 3, "ADDED"), change("b", 2, "ADDED"), bookmark(5, end=True))


async def test_the_snapshot_is_streamed_and_goes_on_as_the_watch() -> None:
    server = Server(Answer(*SNAPSHOT, change("b", 6), change("a", 7, "DELETED"), FOR_EVER))
    assert await run(server) == "restarted a3 b2 synced b6 -a7"
    (query,) = server.asked
    assert 300 <= int(query.pop("timeoutSeconds")) <= 600
    assert query == {
        "labelSelector": SELECTOR,
        "watch": "true",
        "allowWatchBookmarks": "true",
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
    }


async def test_a_stream_that_ended_is_taken_up_at_the_last_version() -> None:
    server = Server(
        Answer(*SNAPSHOT, change("a", 9)),
        Answer(bookmark(20)),
        Answer(change("b", 21), FOR_EVER),
    )
    assert await run(server) == "restarted a3 b2 synced a9 bookmark bookmark bookmark b21"
    assert server.versions == ["", "9", "20"]
    assert "sendInitialEvents" not in server.asked[1]
    assert server.waits == []


async def test_watches_last_for_different_times() -> None:
    server = Server(Answer(*SNAPSHOT), *(Answer(bookmark(5 + n)) for n in range(1, 40)))
    await run(server, random.Random(1))
    lasting = {int(query["timeoutSeconds"]) for query in server.asked}
    assert len(lasting) > 30
    assert all(300 <= seconds <= 600 for seconds in lasting)


@pytest.mark.parametrize("status", [400, 422])
async def test_a_server_without_streamed_snapshots_is_asked_for_pages(status: int) -> None:
    server = Server(
        Answer(b'{"message":"sendInitialEvents is forbidden"}', status=status),
        Answer(pods_of(8, pod("a", 3), more="next")),
        Answer(pods_of(8, pod("b", 2))),
        Answer(change("b", 9), LOST),
        Answer(status=410),
        Answer(pods_of(30), lasts=0),
        Answer(FOR_EVER),
    )
    assert await run(server) == (
        "restarted interrupted restarted bookmark a3 bookmark b2 synced bookmark b9 interrupted"
        " interrupted restarted bookmark synced bookmark"
    )
    assert server.asked[1] == {"labelSelector": SELECTOR, "limit": "250"}
    assert server.asked[2] == {"labelSelector": SELECTOR, "limit": "250", "continue": "next"}
    assert server.versions == ["", "", "", "8", "9", "", "30"]
    assert "limit" in server.asked[5], "it is known by now"
    assert server.waits[0] == 0


async def test_a_server_that_ignores_the_wish_is_asked_for_pages() -> None:
    unmarked = Server(Answer(change("a", 3, "ADDED"), bookmark(5)), Answer(pods_of(8, pod("a", 3))), Answer(FOR_EVER))
    assert await run(unmarked) == "restarted a3 interrupted restarted bookmark a3 synced bookmark"
    assert unmarked.waits == [0]


async def test_a_server_that_never_ends_its_initial_events_is_asked_for_pages() -> None:
    server = Server(Answer(change("a", 3, "ADDED"), NOTHING_MORE), Answer(pods_of(8, pod("a", 3))), Answer(FOR_EVER))
    server.snapshot_seconds = 0.05
    assert await run(server) == "restarted a3 interrupted restarted bookmark a3 synced bookmark"


async def test_a_snapshot_that_broke_off_is_begun_anew() -> None:
    server = Server(Answer(SNAPSHOT[0], LOST), Answer(SNAPSHOT[0]), Answer(*SNAPSHOT, FOR_EVER))
    assert await run(server) == "restarted a3 interrupted restarted a3 interrupted restarted a3 b2 synced"
    assert server.versions == ["", "", ""]


async def test_pages_whose_token_expired_are_begun_anew() -> None:
    server = Server(
        Answer(status=422),
        Answer(pods_of(8, pod("a", 3), more="next")),
        Answer(b'{"kind":"Status","message":"The provided continue parameter is too old"}', status=410),
        Answer(pods_of(11, pod("a", 10))),
    )
    told = await run(server)
    assert told == "restarted interrupted restarted bookmark a3 interrupted restarted bookmark a10 synced bookmark"
    assert "continue" not in server.asked[3]
    assert server.versions[-1] == "11"


@pytest.mark.parametrize("gone", [Answer(status=410), Answer(error(410, "Expired")), Answer(error(0, "Gone"))])
async def test_a_forgotten_version_costs_a_new_snapshot(gone: Answer) -> None:
    server = Server(Answer(*SNAPSHOT), gone, Answer(*SNAPSHOT[1:], FOR_EVER))
    told = await run(server)
    assert told.replace(" bookmark", "") == "restarted a3 b2 synced interrupted restarted b2 synced"
    assert server.versions == ["", "5", ""]
    assert server.waits == [0]


async def test_a_snapshot_older_than_what_is_known_undoes_nothing() -> None:
    old = (change("a", 3, "ADDED"), bookmark(4, end=True))
    server = Server(Answer(*SNAPSHOT), Answer(status=410), Answer(*old), Answer(*SNAPSHOT, FOR_EVER))
    assert (await run(server)).endswith("restarted a3 interrupted restarted a3 b2 synced")
    pages = Server(Answer(status=422), Answer(pods_of(8)), Answer(status=410), Answer(pods_of(7)), Answer(pods_of(9)))
    assert (await run(pages)).endswith("restarted bookmark interrupted restarted bookmark synced bookmark")


async def test_a_server_that_went_back_for_good_is_believed_in_the_end() -> None:
    old = [Answer(change("a", 3, "ADDED"), bookmark(4, end=True)) for _ in range(4)]
    server = Server(Answer(*SNAPSHOT), Answer(status=410), *old, Answer(change("a", 5), FOR_EVER))
    assert (await run(server)).endswith("restarted a3 synced bookmark a5")
    assert server.versions == ["", "5", "", "", "", "", "4"]


async def test_versions_forgotten_again_and_again_are_not_asked_for_in_a_tight_loop() -> None:
    gone = [answer for _ in range(4) for answer in (Answer(status=410), Answer(*SNAPSHOT, lasts=10))]
    server = Server(Answer(*SNAPSHOT), *gone)
    await run(server)
    assert server.waits[0] == 0
    assert all(wait > 0 for wait in server.waits[1:])


@pytest.mark.parametrize("broken", [LOST, SILENT, b'{"type":"ADDED","object":{"kind":"Po'])
async def test_a_broken_stream_is_taken_up_and_half_an_event_is_none(broken: Exception | bytes) -> None:
    server = Server(Answer(*SNAPSHOT, change("a", 8), broken), Answer(change("a", 9), FOR_EVER))
    assert await run(server) == "restarted a3 b2 synced a8 interrupted bookmark a9"
    assert server.versions == ["", "8"]


async def test_waits_double_up_to_half_a_minute() -> None:
    server = Server(Answer(*SNAPSHOT), *(Answer(status=503) for _ in range(9)))
    await run(server)
    assert server.waits == [0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30, 30]


async def test_a_server_that_cannot_be_reached_is_asked_every_few_seconds() -> None:
    server = Server(Answer(*SNAPSHOT, LOST), *[LOST] * 5)
    await run(server)
    assert server.waits == [0.8, 1.6, 3.2, 5, 5, 5]


async def test_a_server_that_has_just_come_back_is_not_left_alone_for_how_long_it_was_away() -> None:
    server = Server(Answer(*SNAPSHOT, LOST), *[LOST] * 5, Answer(status=503), Answer(status=429), LOST)
    await run(server)
    assert server.waits[6:] == [0.8, 1.6, 5]


async def test_after_an_outage_a_forgotten_version_is_no_further_reason_to_wait() -> None:
    server = Server(Answer(*SNAPSHOT, LOST), LOST, Answer(status=403), Answer(status=410), Answer(status=410))
    await run(server)
    assert server.waits == [0.8, 1.6, 0.8, 0, 1.6]


async def test_a_server_that_does_not_answer_is_given_longer_each_time() -> None:
    server = Server(*[LOST] * 5, Answer(*SNAPSHOT, LOST), LOST)
    await run(server)
    assert server.answer_seconds == [10, 20, 40, 75, 75, 75, 10, 20]
    assert set(server.read_seconds) == {75}


async def test_waits_are_spread_from_nothing_on() -> None:
    waits = []
    for seed in range(200):
        server = Server(LOST)
        await run(server, random.Random(seed))
        waits += server.waits
    assert min(waits) < 0.1
    assert max(waits) > 0.7
    assert all(0 <= wait <= 0.8 for wait in waits)


async def test_two_healthy_minutes_make_the_next_wait_short_again() -> None:
    server = Server(
        Answer(*SNAPSHOT, LOST),
        LOST,
        LOST,
        Answer(change("a", 6), LOST, lasts=119),
        Answer(change("a", 7), lasts=70),
        Answer(change("a", 8), LOST, lasts=70),
    )
    await run(server)
    assert server.waits == [0.8, 1.6, 3.2, 5, 0.8]


async def test_a_stream_that_ends_at_once_is_not_asked_for_in_a_tight_loop() -> None:
    server = Server(Answer(*SNAPSHOT, lasts=0), *(Answer(lasts=0) for _ in range(3)))
    await run(server)
    assert server.waits == [0.8, 1.6, 3.2, 6.4]
    assert server.versions == ["", "5", "5", "5", "5"]


@pytest.mark.parametrize(
    ("answer", "least"),
    [
        (Answer(b"slow down", status=429, retry_after="7"), 7),
        (Answer(status=503, retry_after="3"), 3),
        (Answer(status=429, retry_after="nonsense"), 0.8),
        (Answer(status=429, retry_after="86400"), 300),
        (Answer(error(429, "TooManyRequests", retryAfterSeconds=9)), 9),
    ],
)
async def test_a_server_that_asks_for_time_gets_it_and_the_version_stays(answer: Answer, least: float) -> None:
    server = Server(Answer(*SNAPSHOT), answer, Answer(FOR_EVER))
    await run(server)
    assert server.waits == [least]
    assert server.versions == ["", "5", "5"]


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_an_error_page_is_no_list_and_no_event(status: int) -> None:
    page = b"<html>\n<head><title>Gateway Time-out</title></head>\n</html>\n"
    server = Server(
        Answer(*SNAPSHOT),
        Answer(page, status=status),
        Answer(page),
        Answer(status=410),
        Answer(page, status=status),
        Answer(*SNAPSHOT[1:], FOR_EVER),
    )
    events = watch_of(server).events()
    told, whys = [], []
    async with asyncio.timeout(BACKSTOP):
        while told.count("synced") < 2:
            event = await anext(events)
            told.append(shown(event))
            if isinstance(event, Interrupted):
                whys.append(event.why)
    await events.aclose()
    assert server.versions == ["", "5", "5", "5", "", ""]
    assert whys[0] == f"HTTP {status}"
    assert not any("<" in why for why in whys)


async def test_a_page_in_place_of_a_list_is_not_an_empty_cluster() -> None:
    for body in (b"{}", b'{"kind":"Status","status":"Failure"}', b"<html></html>", pods_of(8)[:-1]):
        server = Server(Answer(status=422), Answer(body), Answer(pods_of(8, pod("a", 3))))
        assert (await run(server)).startswith(
            "restarted interrupted restarted interrupted restarted bookmark a3 synced"
        )


async def test_a_refused_token_is_read_again() -> None:
    server = Server(Answer(*SNAPSHOT), Answer(b'{"message":"Unauthorized"}', status=401), Answer(FOR_EVER))
    await run(server)
    assert server.forgotten == 1
    assert server.versions == ["", "5", "5"]


async def test_what_was_sent_already_does_not_bring_back_what_is_gone() -> None:
    server = Server(
        Answer(*SNAPSHOT, change("a", 6, "DELETED"), LOST),
        Answer(change("a", 4), change("a", 6, "DELETED"), change("a", 5), change("b", 7), FOR_EVER),
    )
    watch = watch_of(server)
    assert await told_by(watch, server) == "restarted a3 b2 synced -a6 interrupted bookmark b7"
    assert watch.counts["repeats"] == 3


@pytest.mark.parametrize(
    "nonsense",
    [
        error(500, "InternalError"),
        b"{}\n",
        line("ADDED", {}),
        line("ADDED", {"kind": "Pod", "metadata": {}}),
        line("ADDED", {"kind": "Secret", "metadata": {"uid": "a", "resourceVersion": "9"}}),
        line("WHATEVER", pod("a", 9)),
        line("MODIFIED", {"kind": "Pod", "metadata": {"resourceVersion": "9"}}),
    ],
)
async def test_nonsense_is_met_with_a_new_snapshot_in_the_end(nonsense: bytes) -> None:
    server = Server(Answer(*SNAPSHOT), *[Answer(nonsense)] * 3, Answer(*SNAPSHOT, FOR_EVER))
    told = await run(server)
    assert server.versions == ["", "5", "5", "5", ""]
    assert told.count("interrupted") == 3
    assert told.endswith("restarted a3 b2 synced")


async def test_outages_alone_cost_no_new_snapshot() -> None:
    server = Server(Answer(*SNAPSHOT, LOST), *[LOST] * 20, *[Answer(status=503)] * 20, Answer(FOR_EVER))
    await run(server)
    assert set(server.versions[1:]) == {"5"}


async def test_a_version_from_which_nothing_ever_comes_is_dropped() -> None:
    server = Server(Answer(*SNAPSHOT), Answer(SILENT), Answer(SILENT), Answer(*SNAPSHOT, FOR_EVER))
    await run(server)
    assert server.versions == ["", "5", "5", ""]
    lively = Server(Answer(*SNAPSHOT), *(Answer(bookmark(6 + n), SILENT) for n in range(5)), Answer(FOR_EVER))
    await run(lively)
    assert lively.versions == ["", "5", "6", "7", "8", "9", "10"]


async def test_others_get_their_turn_however_fast_events_come() -> None:
    count = 3200
    server = Server(Answer(*SNAPSHOT, b"".join(change("a", n) for n in range(6, 6 + count)), FOR_EVER))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    events = watch_of(server).events()
    async with asyncio.timeout(BACKSTOP):
        while shown(await anext(events)) != f"a{5 + count}":
            pass
    assert turns >= count // 64
    await events.aclose()
    task.cancel()


async def test_whoever_stops_listening_leaves_no_connection() -> None:
    answer = Answer(*SNAPSHOT, FOR_EVER)
    events = watch_of(Server(answer)).events()
    while shown(await anext(events)) != "synced":
        pass
    assert answer.open
    await events.aclose()
    assert not answer.open


async def test_counts_say_what_happened() -> None:
    again = (*SNAPSHOT[:2], bookmark(9, end=True))
    server = Server(Answer(*SNAPSHOT, LOST), Answer(bookmark(8)), Answer(status=410), Answer(*again, FOR_EVER))
    watch = watch_of(server)
    await told_by(watch, server)
    assert watch.counts == {
        "events": 4,
        "repeats": 0,
        "bookmarks": 3,
        "relists": 2,
        "resumes": 2,
        "interruptions": 2,
    }
