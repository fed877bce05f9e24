"""A bound on what all calls hold together."""

import asyncio

import pytest

from services.common.errors import ResourceExhaustedError
from services.judge.held import Held


async def spin() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_calls_together_hold_no_more_than_the_bound() -> None:
    held = Held(100, patience_seconds=0)
    with held.share() as one, held.share() as other:
        await one.take(60)
        await other.take(40)
        with pytest.raises(ResourceExhaustedError) as raised:
            await other.take(1)
        assert raised.value.reason == "TOO_MANY_JUDGEMENTS"
        assert held.bytes == 100
    assert held.bytes == 0


async def test_a_sender_waits_until_another_call_has_ended() -> None:
    held = Held(100)
    with held.share() as other:
        with held.share() as one:
            await one.take(100)
            waiting = asyncio.create_task(other.take(10))
            await spin()
            assert not waiting.done()
        await waiting
        assert held.bytes == other.bytes == 10


async def test_a_sender_whose_items_are_judged_waits_for_them_without_end() -> None:
    held = Held(100, patience_seconds=0)
    with held.share() as batch:
        await batch.take(100)
        batch.whole(80)
        waiting = asyncio.create_task(batch.take(50))
        await spin()
        assert not waiting.done()
        batch.judged(80)
        await waiting
        assert held.bytes == 70


async def test_a_sender_has_its_patience_anew_once_nothing_of_its_own_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, later = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + later)
    held = Held(100, patience_seconds=60)
    with held.share() as batch:
        with held.share() as other:
            await batch.take(40)
            await other.take(60)
            batch.whole(40)
            waiting = asyncio.create_task(batch.take(50))
            await spin()
            later = 100.0  # that is how long its judges took
            batch.judged(40)
            await spin()
            assert not waiting.done()
        await waiting
        assert held.bytes == 50


async def test_a_sender_that_leaves_takes_nothing() -> None:
    held = Held(10)
    with held.share() as one, held.share() as other:
        await one.take(10)
        waiting = asyncio.create_task(other.take(5))
        await spin()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert held.bytes == 0
