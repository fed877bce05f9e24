from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

from services.exec_agent.waits import Waits

BACKSTOP = 110.0


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield read, write
    finally:
        os.close(read)
        os.close(write)


async def test_what_is_watched_calls_back_with_its_arguments_until_it_is_not() -> None:
    waits = Waits()
    seen: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
    with pipe() as (first, to_first), pipe() as (second, to_second):
        for name, descriptor in (("first", first), ("second", second)):
            waits.watch(descriptor, lambda n, d: seen.put_nowait((n, os.read(d, 8))), name, descriptor)
        os.write(to_first, b"one")
        assert await asyncio.wait_for(seen.get(), BACKSTOP) == ("first", b"one")

        waits.unwatch(first)
        waits.unwatch(first)
        os.write(to_first, b"unheard")
        os.write(to_second, b"two")
        assert await asyncio.wait_for(seen.get(), BACKSTOP) == ("second", b"two")
        assert seen.empty()
        waits.close()


async def test_the_other_ends_close_is_something_to_read() -> None:
    waits = Waits()
    closed = asyncio.get_running_loop().create_future()
    read, write = os.pipe2(os.O_CLOEXEC)

    def take() -> None:
        if not closed.done():
            closed.set_result(os.read(read, 8))

    waits.watch(read, take)
    os.close(write)
    assert await asyncio.wait_for(closed, BACKSTOP) == b""
    waits.unwatch(read)
    os.close(read)
    waits.close()


async def test_a_callback_may_end_the_watch_of_another_that_is_ready_too() -> None:
    waits = Waits()
    called: list[int] = []
    done = asyncio.get_running_loop().create_future()
    with pipe() as (first, to_first), pipe() as (second, to_second):

        def only_one(mine: int, other: int) -> None:
            called.append(mine)
            waits.unwatch(mine)
            waits.unwatch(other)
            waits.call_later(0.0, done.set_result, None)

        os.write(to_first, b"x")
        os.write(to_second, b"x")
        waits.watch(first, only_one, first, second)
        waits.watch(second, only_one, second, first)
        await asyncio.wait_for(done, BACKSTOP)
        assert len(called) == 1
        waits.close()


async def test_timers_come_in_the_order_of_their_times_whatever_the_order_they_were_set_in() -> None:
    waits = Waits()
    order: list[str] = []
    done = asyncio.get_running_loop().create_future()
    waits.call_later(0.03, done.set_result, None)
    waits.call_later(0.02, order.append, "later")
    waits.call_later(0.0, order.append, "sooner")
    waits.call_later(0.01, order.append, "cancelled").cancel()
    await asyncio.wait_for(done, BACKSTOP)
    assert order == ["sooner", "later"]
    waits.close()


async def test_a_timer_that_a_callback_sets_holds_up_none_that_was_there() -> None:
    waits = Waits()
    done = asyncio.get_running_loop().create_future()
    # Both at once, the one that is due and the one that is not yet: the alarm for it is set once the first has come.
    waits.call_later(0.0, waits.call_later, 3600.0, list)
    waits.call_later(0.05, done.set_result, None)
    await asyncio.wait_for(done, BACKSTOP)
    waits.close()


async def test_a_callback_that_raises_does_not_hold_up_the_timers_after_it() -> None:
    waits = Waits()
    failures: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: failures.append(type(context["exception"]).__name__))
    done = loop.create_future()

    def fail() -> None:
        raise LookupError

    waits.call_later(0.0, fail)
    waits.call_later(0.01, done.set_result, None)
    await asyncio.wait_for(done, BACKSTOP)
    assert failures == ["LookupError"]
    waits.close()


async def test_cancelled_timers_of_far_times_do_not_pile_up() -> None:
    waits = Waits()
    kept = waits.call_later(3600.0, list)
    for _ in range(5000):
        waits.call_later(3600.0, list).cancel()
    assert waits.size <= 600
    assert kept.due
    waits.close()
