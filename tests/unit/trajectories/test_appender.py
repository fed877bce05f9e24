"""What the database does not take of one writer is no other's failure, and never ends the service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from services.common.errors import InternalError, NotFoundError, OrchardError, UnavailableError
from services.trajectories.appender import Appender
from services.trajectories.model import NewStep, Totals
from services.trajectories.store.appends import Append


class Store:
    """Takes what it is given, whole batches or nothing, as a transaction does."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    async def append(
        self, appends: list[Append], early: Callable[[Mapping[int, int]], None]
    ) -> list[int | OrchardError]:
        names = [append.trajectory_id for append in appends]
        self.batches.append(names)
        await asyncio.sleep(0)
        if "away" in names:
            raise UnavailableError("away")
        if "broken" in names:
            raise ValueError("value out of range")
        return [NotFoundError("none") if name == "missing" else 1 for name in names]


def an_append(name: str) -> Append:
    return Append("t", name, "w", False, (NewStep(0, b"step", Totals(), ()),))


async def appended(*names: str) -> tuple[list[int | BaseException], Store]:
    store = Store()
    appender = Appender(store)
    results = asyncio.gather(*(appender.append(an_append(name)) for name in names), return_exceptions=True)
    await asyncio.sleep(0)
    worker = asyncio.create_task(appender.run())
    found = await results
    assert not worker.done()
    assert appender.waiting_bytes == 0
    worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker
    return found, store


async def test_only_what_the_database_does_not_take_fails() -> None:
    results, _ = await appended("a", "broken", "missing", "b")
    assert [type(result) for result in results] == [int, InternalError, NotFoundError, int]


async def test_a_database_that_is_away_is_told_to_the_whole_batch() -> None:
    results, store = await appended("a", "away", "b")
    assert [type(result) for result in results] == [UnavailableError] * 3
    assert store.batches == [["a", "away", "b"]]


async def test_a_worker_that_ends_tells_its_writers_and_what_is_durable_is_told_before() -> None:
    class Stuck(Store):
        async def append(
            self, appends: list[Append], early: Callable[[Mapping[int, int]], None]
        ) -> list[int | OrchardError]:
            early({place: 1 for place, append in enumerate(appends) if append.trajectory_id == "a"})
            await asyncio.Event().wait()
            return []

    appender = Appender(Stuck())
    worker = asyncio.create_task(appender.run())
    durable = asyncio.create_task(appender.append(an_append("a")))
    writing = asyncio.create_task(appender.append(an_append("b")))
    assert await asyncio.wait_for(durable, 110) == 1
    assert not writing.done()
    worker.cancel()
    with pytest.raises(UnavailableError):
        await writing
