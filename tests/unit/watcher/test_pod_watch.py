"""How the watch of Pods goes on over streams that end, break or bring what is no event."""

import asyncio

import pytest

from services.watcher.model import Interrupted
from tests.unit.watcher.api_server import (
    BACKSTOP,
    FOR_EVER,
    LOST,
    SILENT,
    SNAPSHOT,
    Answer,
    Server,
    bookmark,
    change,
    run,
    shown,
    told_by,
    watch_of,
)


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


@pytest.mark.parametrize("broken", [LOST, SILENT, b'{"type":"ADDED","object":{"kind":"Po'])
async def test_a_broken_stream_is_taken_up_and_half_an_event_is_none(broken: Exception | bytes) -> None:
    server = Server(Answer(*SNAPSHOT, change("a", 8), broken), Answer(change("a", 9), FOR_EVER))
    assert await run(server) == "restarted a3 b2 synced a8 interrupted bookmark a9"
    assert server.versions == ["", "8"]


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
