import asyncio

import pytest

from services.scheduler.throttle import Throttle


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_then_the_rate() -> None:
    clock = Clock()
    throttle = Throttle(10, 3, clock=clock)
    delays = [throttle.take() for _ in range(5)]
    assert [max(0, round(delay, 6)) for delay in delays] == [0, 0, 0, 0.1, 0.2]
    clock.now += 0.2
    assert round(throttle.take(), 6) == 0.1
    clock.now += 1000  # the bucket holds no more than its burst
    assert [max(0, round(throttle.take(), 6)) for _ in range(4)] == [0, 0, 0, 0.1]


def test_after_a_pause_turns_come_one_by_one() -> None:
    clock = Clock()
    throttle = Throttle(10, 3, clock=clock)
    throttle.pause(5)
    assert [round(throttle.take(), 6) for _ in range(3)] == [5.1, 5.2, 5.3]


def test_a_pause_has_an_end() -> None:
    clock = Clock()
    throttle = Throttle(10, 1, clock=clock)
    throttle.pause(86_400)
    assert round(throttle.take(), 6) == 60.1


async def test_a_turn_within_a_pause_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    throttle = Throttle(10, 1, clock=clock)
    throttle.take()
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))
        clock.now += seconds
        if len(slept) == 1:
            throttle.pause(2)  # while it waits for its turn

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await throttle.turn()
    assert slept == [0.1, 2.1]
