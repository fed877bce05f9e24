"""Whatever happens between the watcher and the API server: in the end the cache says what the server says."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import yaml

from services.watcher.pod_watch import Timing
from services.watcher.service import DEPENDENCY
from tests.cluster.watcher.pods import BACKSTOP, Truth, Watched, watching
from tests.support.api_proxy import NO_ANSWER, ApiProxy, Connection, Reply
from tests.support.testbed import NAMESPACE, Testbed

PAGE = b"<html>\n<head><title>504 Gateway Time-out</title></head>\n<body>nginx</body>\n</html>\n"
EXPIRED = (
    b'{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure",'
    b'"message":"too old resource version: 1 (2)","reason":"Expired","code":410}}\n'
)
HTML = {"Content-Type": "text/html"}


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(BACKSTOP):
        while not holds():
            await asyncio.sleep(0.005)


async def change_everything(truth: Truth) -> None:
    """Of a, b and c: one changes, one goes, one leaves the selector; one comes, and one comes and goes."""
    await truth.annotate("a", x="1")
    await truth.delete("b")
    await truth.select("c", False)
    await truth.create("d")
    await truth.create("e")
    await truth.delete("e")


async def check(watched: Watched, truth: Truth) -> None:
    await watched.agrees(truth)
    assert watched.ids() == {"a", "d"}
    assert {"b", "c"} <= set(watched.deleted)
    # And it goes on.
    await truth.select("c", True)
    await truth.annotate("d", x="2")
    await watched.agrees(truth)
    assert watched.ids() == {"a", "c", "d"}


async def cut(proxy: ApiProxy) -> None:
    proxy.cut()


async def end(proxy: ApiProxy) -> None:
    await proxy.inject(b"\n", end=True)


async def expire(proxy: ApiProxy) -> None:
    await proxy.inject(EXPIRED, end=True)


async def expire_resume(proxy: ApiProxy) -> None:
    proxy.reply(Reply(410, b'{"kind":"Status","code":410,"reason":"Expired"}'), to="watch")
    proxy.cut()


async def busy(proxy: ApiProxy) -> None:
    proxy.reply(Reply(429, b"slow down", {"Retry-After": "1"}), to="watch")
    proxy.cut()


async def gateway_timeouts(proxy: ApiProxy) -> None:
    proxy.reply(Reply(504, PAGE, HTML), Reply(500, PAGE, HTML), Reply(200, PAGE, HTML), to="watch")
    proxy.cut()


async def unauthorised(proxy: ApiProxy) -> None:
    proxy.reply(Reply(401, b'{"kind":"Status","code":401,"message":"Unauthorized"}'), to="watch")
    proxy.cut()


async def empty_events(proxy: ApiProxy) -> None:
    await proxy.inject(b"\n\r\n")
    for body in (b"{}\n", b'{"type":"ADDED","object":{}}\n', b'{"type":"MODIFIED","object":{"kind":"Pod"}}\n'):
        proxy.reply(Reply(200, body, lines=True), to="watch")
    proxy.cut()


async def nothing_at_all(proxy: ApiProxy) -> None:
    proxy.reply(*[Reply(200, lines=True)] * 3, to="watch")
    proxy.cut()


async def old_lines_again(proxy: ApiProxy) -> None:
    proxy.repeat(lambda lines: [*lines[::-1], *lines])
    proxy.cut()


async def old_snapshot_lost_version(proxy: ApiProxy) -> None:
    """Expired, and the new snapshot breaks twice before it is whole."""
    proxy.reply(Reply(410), to="watch")

    async def abort(connection: Connection, _line: bytes) -> bool:
        connection.abort()
        return False

    proxy.harm(abort)
    proxy.harm(abort)
    proxy.cut()


FAULTS = [
    cut,
    end,
    expire,
    expire_resume,
    busy,
    gateway_timeouts,
    unauthorised,
    empty_events,
    nothing_at_all,
    old_lines_again,
    old_snapshot_lost_version,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("when", ["before the changes", "after the changes", "away meanwhile"])
async def test_after_each_fault_the_cache_is_right(
    watched: Watched, truth: Truth, proxy: ApiProxy, fault: Callable[[ApiProxy], Awaitable[None]], when: str
) -> None:
    if when == "before the changes":
        await fault(proxy)
        await change_everything(truth)
    elif when == "after the changes":
        await change_everything(truth)
        await fault(proxy)
    else:
        proxy.refusing = True
        await fault(proxy)
        await change_everything(truth)
        proxy.refusing = False
    await check(watched, truth)


@pytest.mark.parametrize("orderly", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
async def test_an_event_cut_in_the_middle_is_sent_again(
    watched: Watched, truth: Truth, proxy: ApiProxy, share: float, orderly: bool
) -> None:
    async def truncate(connection: Connection, line: bytes) -> bool:
        await connection.send(line[: int(len(line) * share)] or b" ")
        if orderly:
            connection.end()
        else:
            connection.abort()
        return False

    before = watched.runtime.counts()["relists"]
    proxy.harm(truncate)
    await change_everything(truth)
    await check(watched, truth)
    assert watched.runtime.counts()["relists"] == before


async def test_a_clean_end_is_taken_up_without_a_list(watched: Watched, truth: Truth, proxy: ApiProxy) -> None:
    # On a busy machine its first snapshot may have been begun more than once.
    before, begun = watched.runtime.counts()["relists"], snapshots(proxy)
    for number in range(3):
        await truth.annotate("a", n=str(number))
        await watched.agrees(truth)
        await end(proxy)
        await truth.annotate("b", n=str(number))
        await watched.agrees(truth)
    assert watched.runtime.counts()["relists"] == before
    assert snapshots(proxy) == begun
    assert not any("limit" in query for query in proxy.requests)


def snapshots(proxy: ApiProxy) -> int:
    """How often one was asked for."""
    return sum("sendInitialEvents" in query for query in proxy.requests)


async def test_a_half_open_connection_is_noticed(watched: Watched, truth: Truth, proxy: ApiProxy) -> None:
    proxy.stall()
    await change_everything(truth)
    await until(lambda: watched.runtime.counts()["interruptions"] >= 2)
    # What the old connections held back comes late, to nobody.
    proxy.flow()
    await check(watched, truth)


async def test_a_request_that_is_left_without_an_answer_is_sent_again(
    truth: Truth, proxy: ApiProxy, kubeconfig: Path
) -> None:
    """Though bytes of an answer might come for much longer."""
    timing = Timing(answer=0.5, read=600, snapshot=600, first_retry=0.02, longest_retry=0.2)
    for name in "abc":
        await truth.create(name)
    proxy.reply(NO_ANSWER, NO_ANSWER, to="watch")
    async with watching(kubeconfig, timing) as watched:
        await watched.agrees(truth)
        before = watched.runtime.counts()["relists"]
        assert before >= 3
        proxy.reply(NO_ANSWER, to="watch")
        proxy.cut()
        await change_everything(truth)
        await check(watched, truth)
        assert watched.runtime.counts()["relists"] == before, "what was taken up again needed no new snapshot"


async def test_late_events_are_late_and_not_lost(watched: Watched, truth: Truth, proxy: ApiProxy) -> None:
    held = asyncio.Event()

    async def hold(_connection: Connection, _line: bytes) -> bool:
        await held.wait()
        return True

    proxy.harm(hold)
    await change_everything(truth)
    held.set()
    await check(watched, truth)


async def test_a_server_without_streamed_snapshots(truth: Truth, proxy: ApiProxy, kubeconfig: Path) -> None:
    for name in "abc":
        await truth.create(name)
    proxy.reply(Reply(422, b'{"kind":"Status","message":"sendInitialEvents is forbidden"}'), to="watch")
    async with watching(kubeconfig) as watched:
        await watched.agrees(truth)
        assert "limit" in proxy.requests[1]
        # Lists that are none, then one that is.
        proxy.reply(Reply(410), to="watch")
        proxy.reply(Reply(504, PAGE, HTML), Reply(200, PAGE, HTML), Reply(200, b"{}"), to="list")
        await change_everything(truth)
        proxy.cut()
        await check(watched, truth)


async def test_a_list_of_several_pages_whose_token_expires(truth: Truth, proxy: ApiProxy, kubeconfig: Path) -> None:
    await asyncio.gather(*(truth.create(f"p{number}") for number in range(260)))
    proxy.reply(Reply(400), to="watch")
    # As often as it is cut, and not because the machine is busy.
    timing = Timing(read=60.0, snapshot=60.0, first_retry=0.02, longest_retry=0.2)
    async with watching(kubeconfig, timing) as watched:
        await watched.agrees(truth)
        assert len(watched.told) == 260
        await truth.delete("p7")
        await truth.create("q")
        proxy.reply(Reply(410), to="watch")
        proxy.reply(Reply(410, b'{"kind":"Status","code":410,"reason":"Expired"}'), to="continue")
        proxy.cut()

        def lists() -> list[str]:
            return ["more" if "continue" in query else "first" for query in proxy.requests if "limit" in query]

        # What changed may have come by the old watch already.
        await until(lambda: len(lists()) >= 6)
        assert lists() == ["first", "more", "first", "more", "first", "more"]
        await watched.agrees(truth)


async def test_no_answer_for_long_ends_the_streams_and_the_next_snapshot_begins_them_anew(
    truth: Truth, proxy: ApiProxy, kubeconfig: Path
) -> None:
    for name in "abc":
        await truth.create(name)
    async with watching(kubeconfig, silence_seconds=3) as watched:
        await watched.agrees(truth)
        proxy.stall()
        await change_everything(truth)
        await until(lambda: not watched.watcher.synced and DEPENDENCY in watched.health.wrong)
        assert "silent for 3 s" in watched.health.wrong[DEPENDENCY]
        assert watched.ids() == {"a", "b", "c"}, "a consumer keeps what it knew"
        proxy.flow()
        await watched.agrees(truth)
        await until(lambda: DEPENDENCY not in watched.health.wrong)
        await check(watched, truth)


async def test_a_token_that_is_refused_is_read_again(control_plane: Testbed, truth: Truth, tmp_path: Path) -> None:
    """No proxy: the API server itself refuses it."""
    await truth.create("a")
    good = control_plane.watcher_kubeconfig.read_text()
    config = yaml.safe_load(good)
    config["users"][0]["user"]["token"] = "of yesterday"
    stale = tmp_path / "stale"
    stale.write_text(yaml.safe_dump(config))
    async with watching(stale) as watched:
        await until(lambda: "HTTP 401" in watched.health.wrong.get(DEPENDENCY, ""))
        stale.write_text(good)
        await watched.agrees(truth)
        assert watched.ids() == {"a"}


async def test_missing_rights_are_said_in_health(control_plane: Testbed) -> None:
    async with watching(control_plane.folder / "node.kubeconfig") as watched:
        await until(lambda: "cannot watch resource" in watched.health.wrong.get(DEPENDENCY, ""))
        assert NAMESPACE in watched.health.wrong[DEPENDENCY]
