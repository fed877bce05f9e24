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
SYNCED = Response(synced=watch_service_pb2.Synced())
BOOKMARK = Response(bookmark=watch_service_pb2.Bookmark())


class Scripted(watch_service_pb2_grpc.WatchServiceServicer):
    """Sends what is put into `messages`; None ends the stream."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[watch_service_pb2.WatchSandboxesResponse | None] = asyncio.Queue()

    async def WatchSandboxes(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while (message := await self.messages.get()) is not None:
            yield message


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
    return await cache.wait("t", sandbox_id, lambda seen: seen.revision >= revision, 10)


async def test_it_is_live_from_the_snapshot_to_the_end_of_the_stream(tmp_path: Path) -> None:
    async with watched(tmp_path) as (scripted, cache, synced):
        scripted.messages.put_nowait(ready("a"))
        assert await known(cache, "a")
        assert (cache.live, cache.synced) == (False, False)  # half a snapshot is none
        scripted.messages.put_nowait(SYNCED)
        assert await asyncio.wait_for(synced.get(), 10)
        assert (cache.live, cache.synced) == (True, True)
        scripted.messages.put_nowait(None)
        scripted.messages.put_nowait(ready("b"))  # of the next stream
        assert await known(cache, "b")
        assert (cache.live, cache.synced) == (False, True)
        assert cache.get("t", "a").state is State.READY  # type: ignore[union-attr]  # kept as it is
        scripted.messages.put_nowait(SYNCED)
        assert await asyncio.wait_for(synced.get(), 10)
        assert cache.get("t", "a").state is State.DELETED  # type: ignore[union-attr]


async def test_every_message_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(1, 10))
    monkeypatch.setattr(watch_cache, "clock_ms", lambda: next(count))
    async with watched(tmp_path) as (scripted, cache, synced):
        for message in (ready("a"), BOOKMARK, SYNCED):
            scripted.messages.put_nowait(message)
        await asyncio.wait_for(synced.get(), 10)
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
        waiting = asyncio.ensure_future(cache.wait("t", "a", enough, 10))
        for revision in range(2, 50):
            scripted.messages.put_nowait(ready("b", revision))
            assert await known(cache, "b", revision)
        assert looked == [1]
        scripted.messages.put_nowait(ready("a", 3))
        found = await waiting
        assert found is not None
        assert (found.revision, looked) == (3, [1, 3])
        assert not cache._waiters
