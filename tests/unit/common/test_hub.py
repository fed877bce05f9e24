import asyncio

from services.common.hub import Hub


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
