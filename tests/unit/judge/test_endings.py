"""Work that is paid for comes to its end, whoever leaves."""

import asyncio

import pytest

from services.judge.endings import whole


class Work:
    """Ends when it is told to."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.ended, self.given_up = asyncio.Event(), asyncio.Event(), False, False

    async def run(self) -> str:
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.given_up = True
            raise
        self.ended = True
        return "done"


async def spin() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_caller_that_stays_has_the_result() -> None:
    work = Work()
    work.go_on.set()
    assert await whole(work.run()) == "done"


async def test_a_caller_that_leaves_however_often_leaves_it_its_end() -> None:
    work = Work()
    caller = asyncio.create_task(whole(work.run()))
    await work.begun.wait()
    for _ in range(3):
        caller.cancel()
        await spin()
    assert not caller.done()
    work.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.ended
    assert not work.given_up


@pytest.mark.parametrize("first", ["leave", "stop"])
async def test_a_service_that_stops_gives_it_up_once_the_caller_has_left(first: str) -> None:
    work, stopping = Work(), asyncio.Event()
    caller = asyncio.create_task(whole(work.run(), stopping))
    await work.begun.wait()
    for step in (first, "leave" if first == "stop" else "stop"):
        assert not work.given_up
        caller.cancel() if step == "leave" else stopping.set()
        await spin()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.given_up


async def test_an_error_reaches_the_caller() -> None:
    async def fails() -> None:
        raise KeyError("no")

    with pytest.raises(KeyError):
        await whole(fails())
