"""Where the watch of Pods begins: with a snapshot, streamed or in pages, and when it asks for a new one."""

import pytest

from tests.unit.watcher.api_server import (
    FOR_EVER,
    LOST,
    NOTHING_MORE,
    SELECTOR,
    SILENT,
    SNAPSHOT,
    Answer,
    Server,
    bookmark,
    change,
    error,
    line,
    pod,
    pods_of,
    run,
)


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


async def test_a_page_in_place_of_a_list_is_not_an_empty_cluster() -> None:
    for body in (b"{}", b'{"kind":"Status","status":"Failure"}', b"<html></html>", pods_of(8)[:-1]):
        server = Server(Answer(status=422), Answer(body), Answer(pods_of(8, pod("a", 3))))
        assert (await run(server)).startswith(
            "restarted interrupted restarted interrupted restarted bookmark a3 synced"
        )


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
