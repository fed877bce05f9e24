import asyncio

import pytest

from services.common.errors import UnavailableError
from services.common.hub import Hub, Hubs


async def test_the_newest_value_of_each_key_is_kept_in_order_of_change() -> None:
    hub: Hub[str, int] = Hub()
    with hub.subscribe([("a", 0)]) as subscription:
        hub.publish("b", 1)
        hub.publish("a", 2)
        hub.publish("a", 3)
        assert await subscription.next(5) == [1, 3]


async def test_a_wait_ends_without_a_change() -> None:
    hub: Hub[str, int] = Hub()
    with hub.subscribe() as subscription:
        assert await subscription.next(0.001) == []


async def test_a_change_between_two_waits_is_not_lost() -> None:
    hub: Hub[str, int] = Hub()
    with hub.subscribe() as subscription:
        hub.publish("a", 1)
        assert await subscription.next(5) == [1]
        waiting = asyncio.ensure_future(subscription.next(5))
        await asyncio.sleep(0)
        hub.publish("a", 2)
        assert await waiting == [2]


async def test_one_that_left_gets_nothing_and_costs_nothing() -> None:
    hub: Hub[str, int] = Hub()
    with hub.subscribe():
        assert hub.subscribed
    assert not hub.subscribed


async def test_a_slow_reader_gets_the_newest_of_each() -> None:
    hub: Hub[str, int] = Hub(most_pending=3)
    with hub.subscribe([("a", 1)]) as subscription:
        for value in range(2, 1000):
            hub.publish("a", value)
            hub.publish("b", value)
        assert await subscription.next(5) == [999, 999]


async def test_a_reader_that_is_overrun_starts_over_and_the_others_do_not() -> None:
    hub: Hub[str, int] = Hub(most_pending=10)
    with hub.subscribe() as slow, hub.subscribe() as quick:
        for number in range(30):
            hub.publish(f"u{number}", number)
            assert await quick.next(5) == [number]
        for _ in range(2):
            with pytest.raises(UnavailableError) as caught:
                await slow.next(5)
            assert caught.value.reason == "WATCH_OVERRUN"


async def test_an_end_is_told_at_once_and_for_good() -> None:
    hub: Hub[str, int] = Hub()
    with hub.subscribe() as subscription:
        waiting = asyncio.ensure_future(subscription.next(60))
        await asyncio.sleep(0)
        hub.end(UnavailableError("it stops", reason="SERVER_STOPPING"))
        with pytest.raises(UnavailableError, match="it stops"):
            await waiting
        hub.publish("a", 1)
        with pytest.raises(UnavailableError, match="it stops"):
            await subscription.next(5)
    with hub.subscribe() as later:
        hub.publish("a", 1)
        assert await later.next(5) == [1]


async def test_an_empty_answer_says_that_nothing_changed() -> None:
    """Also where a change comes in the moment in which the wait ends."""
    hub: Hub[str, int] = Hub()
    loop = asyncio.get_running_loop()
    with hub.subscribe() as subscription:
        waiting = asyncio.ensure_future(subscription.next(0.01))
        await asyncio.sleep(0)
        # Runs in the same turn as the timer of the wait, after it.
        loop.call_at(loop.time() + 0.01, hub.publish, "a", 1)
        told = await waiting
        if told == []:
            told = await subscription.next(5)
        assert told == [1]


async def test_a_waiter_of_one_key_hears_of_no_other() -> None:
    hubs: Hubs[str, int] = Hubs()
    with hubs.subscribe("a") as first, hubs.subscribe("a") as second, hubs.subscribe("b") as other:
        hubs.publish("a", 1)
        hubs.publish("c", 2)
        assert (await first.next(5), await second.next(5), await other.next(0.001)) == ([1], [1], [])
        hubs.wake()
        assert await other.next(60) == []
        assert len(hubs) == 2
    assert len(hubs) == 0


async def test_a_key_is_kept_until_its_last_waiter_leaves() -> None:
    hubs: Hubs[str, int] = Hubs()
    with hubs.subscribe("a") as staying:
        with hubs.subscribe("a"):
            pass
        hubs.publish("a", 1)
        assert await staying.next(5) == [1]
