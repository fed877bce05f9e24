"""The cache of sandboxes against a real gRPC stream that the test writes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from orchard.watch.v1 import watch_service_pb2, watch_service_pb2_grpc

from services.common import watch_cache
from services.common.health import Health
from services.common.observed import Observed, to_proto
from services.common.states import State
from services.common.watch_cache import WatchCache

Response = watch_service_pb2.WatchSandboxesResponse
SYNCED = Response(synced=watch_service_pb2.Synced(), complete_revision=100)
BOOKMARK = Response(bookmark=watch_service_pb2.Bookmark())


class Scripted(watch_service_pb2_grpc.WatchServiceServicer):
    """Sends what is put into `messages`; None ends the stream."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[watch_service_pb2.WatchSandboxesResponse | None] = asyncio.Queue()
        self.ended: asyncio.Queue[None] = asyncio.Queue()

    async def WatchSandboxes(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            while (message := await self.messages.get()) is not None:
                yield message
        finally:
            self.ended.put_nowait(None)


def ready(sandbox_id: str, revision: int = 1) -> watch_service_pb2.WatchSandboxesResponse:
    seen = Observed("t", sandbox_id, f"u-{sandbox_id}", revision, State.READY)
    return Response(sandbox=to_proto(seen, include_spec=False))


@asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[tuple[Scripted, WatchCache, asyncio.Queue[bool]]]:
    """A cache of a scripted watcher, and whether it was live at each Synced."""
    scripted, server = Scripted(), grpc.aio.server()
    watch_service_pb2_grpc.add_WatchServiceServicer_to_server(scripted, server)
    address = f"unix:{folder}/w"
    server.add_insecure_port(address)
    await server.start()
    synced: asyncio.Queue[bool] = asyncio.Queue()
    cache = WatchCache(address, Health(), include_spec=False, on_synced=lambda: synced.put_nowait(cache.live))
    following = asyncio.ensure_future(cache.run())
    try:
        yield scripted, cache, synced
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await server.stop(0)


async def known(cache: WatchCache, sandbox_id: str, revision: int = 1) -> Observed | None:
    return await cache.wait("t", sandbox_id, lambda seen: seen.revision >= revision, 110)


async def test_it_is_live_from_the_snapshot_to_the_end_of_the_stream(tmp_path: Path) -> None:
    async with watched(tmp_path) as (scripted, cache, synced):
        scripted.messages.put_nowait(ready("a"))
        assert await known(cache, "a")
        assert (cache.live, cache.synced) == (False, False)  # half a snapshot is none
        scripted.messages.put_nowait(SYNCED)
        assert await asyncio.wait_for(synced.get(), 110)
        assert (cache.live, cache.synced) == (True, True)
        scripted.messages.put_nowait(None)
        scripted.messages.put_nowait(ready("b"))  # of the next stream
        assert await known(cache, "b")
        assert (cache.live, cache.synced) == (False, True)
        assert cache.get("t", "a").state is State.READY  # type: ignore[union-attr]  # kept as it is
        scripted.messages.put_nowait(SYNCED)
        assert await asyncio.wait_for(synced.get(), 110)
        assert cache.get("t", "a").state is State.DELETED  # type: ignore[union-attr]


async def test_every_message_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(1, 10))
    monkeypatch.setattr(watch_cache, "clock_ms", lambda: next(count))
    async with watched(tmp_path) as (scripted, cache, synced):
        for message in (ready("a"), BOOKMARK, SYNCED):
            scripted.messages.put_nowait(message)
        await asyncio.wait_for(synced.get(), 110)
        assert cache.heard_ms == 3


async def test_a_waiter_wakes_only_for_its_own_sandbox(tmp_path: Path) -> None:
    async with watched(tmp_path) as (scripted, cache, _synced):
        looked: list[int] = []

        def enough(seen: Observed) -> bool:
            looked.append(seen.revision)
            return seen.revision == 3

        for name in ("a", "b"):
            scripted.messages.put_nowait(ready(name))
        assert await known(cache, "b")
        waiting = asyncio.ensure_future(cache.wait("t", "a", enough, 110))
        for revision in range(2, 50):
            scripted.messages.put_nowait(ready("b", revision))
            assert await known(cache, "b", revision)
        assert looked == [1]
        scripted.messages.put_nowait(ready("a", 3))
        found = await waiting
        assert found is not None
        assert (found.revision, looked) == (3, [1, 3])
        assert not cache._waiters


def synced_to(revision: int) -> watch_service_pb2.WatchSandboxesResponse:
    return Response(synced=watch_service_pb2.Synced(), complete_revision=revision)


async def test_a_watcher_that_lags_drops_nothing_until_it_has_caught_up(tmp_path: Path) -> None:
    async with watched(tmp_path) as (scripted, cache, synced):
        for message in (ready("old", 3), ready("new", 8), synced_to(8)):
            scripted.messages.put_nowait(message)
        await asyncio.wait_for(synced.get(), 110)
        scripted.messages.put_nowait(None)
        # Another one, which has not heard of `new` and believes `old` to be as it was long ago.
        for message in (ready("old", 1), ready("other", 4), synced_to(5)):
            scripted.messages.put_nowait(message)
        assert await known(cache, "other")
        await unwell(cache)
        assert (cache.live, synced.empty()) == (False, True)
        assert [cache.get("t", name).revision for name in ("old", "new")] == [3, 8]  # type: ignore[union-attr]
        # It hears, in one batch, that `new` is there and `old` is not.
        gone = Observed("t", "old", "u-old", 7, State.DELETED)
        scripted.messages.put_nowait(Response(sandbox=to_proto(gone, include_spec=False)))
        scripted.messages.put_nowait(ready("new", 8))
        assert await cache.wait("t", "old", lambda seen: seen.state is State.DELETED, 110)
        assert not cache.live  # there is more to come
        scripted.messages.put_nowait(Response(bookmark=watch_service_pb2.Bookmark(), complete_revision=8))
        assert await asyncio.wait_for(synced.get(), 110)
        assert {seen.sandbox_id for seen in cache.living()} == {"new", "other"}


async def test_what_is_gone_goes_when_the_watcher_has_caught_up(tmp_path: Path) -> None:
    async with watched(tmp_path) as (scripted, cache, synced):
        for message in (ready("a", 3), ready("b", 8), synced_to(8)):
            scripted.messages.put_nowait(message)
        await asyncio.wait_for(synced.get(), 110)
        scripted.messages.put_nowait(None)
        for message in (ready("b", 6), synced_to(6)):
            scripted.messages.put_nowait(message)
        await unwell(cache)
        assert cache.get("t", "a").state is State.READY  # type: ignore[union-attr]
        scripted.messages.put_nowait(Response(bookmark=watch_service_pb2.Bookmark(), complete_revision=9))
        assert await cache.wait("t", "a", lambda seen: seen.state is State.DELETED, 110)
        assert await asyncio.wait_for(synced.get(), 110)
        assert cache.get("t", "b").state is State.READY  # type: ignore[union-attr]


async def test_another_watcher_is_tried_when_one_lags_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_cache, "_BEHIND_SECONDS", 0.0)
    async with watched(tmp_path) as (scripted, cache, synced):
        for message in (ready("a", 3), synced_to(3), None):
            scripted.messages.put_nowait(message)
        await asyncio.wait_for(synced.get(), 110)
        scripted.messages.put_nowait(synced_to(2))
        for _ in range(2):
            await asyncio.wait_for(scripted.ended.get(), 110)
        for message in (ready("a", 3), synced_to(3)):  # of the next stream
            scripted.messages.put_nowait(message)
        assert await asyncio.wait_for(synced.get(), 110)
        assert cache.get("t", "a").state is State.READY  # type: ignore[union-attr]


async def test_a_runtime_that_has_gone_back_needs_a_new_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_cache, "_GONE_BACK_SECONDS", -1.0)
    async with watched(tmp_path) as (scripted, _cache, synced):
        for message in (ready("a", 3), synced_to(3), None, synced_to(2)):
            scripted.messages.put_nowait(message)
        await asyncio.wait_for(synced.get(), 110)
        (running,) = (task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "WatchCache.run")
        with pytest.raises(RuntimeError, match="gone back"):
            await asyncio.wait_for(asyncio.shield(running), 110)


async def test_what_is_not_known_is_not_there_only_while_the_watcher_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000]
    monkeypatch.setattr(watch_cache, "clock_ms", lambda: now[0])
    async with watched(tmp_path) as (scripted, cache, synced):
        assert not cache.current
        scripted.messages.put_nowait(SYNCED)
        await asyncio.wait_for(synced.get(), 110)
        assert cache.current
        now[0] += 8_000
        assert (cache.live, cache.current) == (True, False)


async def unwell(cache: WatchCache) -> None:
    """Wait until the cache says that its watcher lags."""
    async with asyncio.timeout(110):
        while "lags" not in cache._health.wrong.get(watch_cache.DEPENDENCY, ""):
            await asyncio.sleep(0)
