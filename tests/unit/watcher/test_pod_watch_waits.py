"""How long the watch of Pods waits: before it asks again, and for an answer."""

import random

import pytest

from tests.unit.watcher.api_server import FOR_EVER, LOST, SNAPSHOT, Answer, Server, bookmark, change, error, run


async def test_watches_last_for_different_times() -> None:
    server = Server(Answer(*SNAPSHOT), *(Answer(bookmark(5 + n)) for n in range(1, 40)))
    await run(server, random.Random(1))
    lasting = {int(query["timeoutSeconds"]) for query in server.asked}
    assert len(lasting) > 30
    assert all(300 <= seconds <= 600 for seconds in lasting)


async def test_versions_forgotten_again_and_again_are_not_asked_for_in_a_tight_loop() -> None:
    gone = [answer for _ in range(4) for answer in (Answer(status=410), Answer(*SNAPSHOT, lasts=10))]
    server = Server(Answer(*SNAPSHOT), *gone)
    await run(server)
    assert server.waits[0] == 0
    assert all(wait > 0 for wait in server.waits[1:])


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
