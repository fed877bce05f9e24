"""Bounds on calls: pace, circuit breaker, budgets, prices."""

import asyncio

import pytest

from services.judge.backends.base import error_of_status
from services.judge.backends.limits import Amount, Breaker, BudgetExhaustedError, Meter, Pace
from services.judge.backends.settings import JudgeSettings
from services.judge.model import Reason


def places(pace: Pace, now: float, count: int) -> list[float]:
    """Seconds until each of so many places is free, all taken at one time."""
    found = []
    for _ in range(count):
        found.append(pace.delay(now))
        pace.take(now)
    return found


def test_calls_are_spread_over_time_after_a_burst() -> None:
    """60 a minute: five seconds' worth at once, then one a second."""
    pace = Pace(60)
    assert places(pace, 100.0, 8) == [0, 0, 0, 0, 0, 0, 1, 2]
    assert pace.delay(200.0) == 0


async def test_no_limit_is_no_delay() -> None:
    pace = Pace(0)
    assert places(pace, 1.0, 1000) == [0] * 1000
    await pace.turn()


async def test_who_leaves_the_line_gives_the_place_back() -> None:
    """One an hour: the first goes at once, the others wait, and those that give up leave no hole."""
    pace, loop = Pace(1 / 60), asyncio.get_running_loop()
    await pace.turn()
    waiting = [asyncio.create_task(pace.turn()) for _ in range(10)]
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert 0 < pace.delay(loop.time()) <= 3600


async def test_the_line_is_first_come_first_served() -> None:
    pace, order = Pace(60_000_000), []

    async def one(number: int) -> None:
        await pace.turn()
        order.append(number)

    await asyncio.gather(*(one(number) for number in range(50)))
    assert order == list(range(50))


def test_a_breaker_rests_longer_each_time_and_lets_one_call_probe() -> None:
    breaker, now = Breaker(), 0.0
    for _ in range(Breaker.THRESHOLD):
        assert breaker.wait_seconds(now) == 0
        breaker.failed(now)
    rests = []
    for _ in range(8):
        rest = breaker.wait_seconds(now)
        rests.append(rest)
        now += rest
        assert breaker.wait_seconds(now) == 0
        assert breaker.wait_seconds(now) > 0
        breaker.failed(now)
    assert rests == [2, 4, 8, 16, 32, 60, 60, 60]
    now += breaker.wait_seconds(now)
    assert breaker.wait_seconds(now) == 0
    breaker.succeeded()
    assert not breaker.is_open
    assert [breaker.wait_seconds(now) for _ in range(3)] == [0, 0, 0]


def test_failures_that_are_not_in_a_row_leave_a_breaker_closed() -> None:
    breaker = Breaker()
    for _ in range(10 * Breaker.THRESHOLD):
        breaker.failed(0.0)
        breaker.succeeded()
    assert not breaker.is_open


def test_a_probe_that_came_to_no_end_lets_another_one_through() -> None:
    breaker = Breaker()
    for _ in range(Breaker.THRESHOLD):
        breaker.failed(0.0)
    now = Breaker.FIRST_SECONDS
    assert breaker.wait_seconds(now) == 0
    breaker.given_up()
    assert breaker.wait_seconds(now) == 0


def test_calls_that_fail_together_make_one_rest() -> None:
    """A hundred are under way as the endpoint goes away for a moment."""
    breaker, now = Breaker(), 100.0
    for number in range(100):
        breaker.failed(now + number / 1000)
    opened = now + (Breaker.THRESHOLD - 1) / 1000
    assert breaker.wait_seconds(opened) == pytest.approx(Breaker.FIRST_SECONDS, abs=1e-9)
    probe = opened + Breaker.FIRST_SECONDS
    assert breaker.wait_seconds(probe) == 0
    breaker.failed(probe)
    assert breaker.wait_seconds(probe) == pytest.approx(2 * Breaker.FIRST_SECONDS, abs=1e-9)


async def test_a_call_waits_for_what_others_may_leave() -> None:
    meter, order = Meter(Amount(tokens=100)), []

    async def first(go_on: asyncio.Event) -> None:
        async with meter.call(Amount(tokens=80)) as spend:
            await go_on.wait()
            spend(Amount(tokens=10))
            order.append("first")

    async def second() -> None:
        async with meter.call(Amount(tokens=80)) as spend:
            order.append("second")
            spend(Amount(tokens=80))

    go_on = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(first(go_on))
        group.create_task(second())
        await asyncio.sleep(0)
        go_on.set()
    assert order == ["first", "second"]
    assert meter.spent == Amount(tokens=90)
    assert not meter.exhausted
    with pytest.raises(BudgetExhaustedError):
        async with meter.call(Amount(tokens=11)):
            pass
    assert meter.exhausted


async def test_a_call_that_failed_leaves_its_room() -> None:
    meter = Meter(Amount(cost_usd=1.0))
    for _ in range(3):
        with pytest.raises(KeyError):
            async with meter.call(Amount(cost_usd=1.0)):
                raise KeyError
    assert meter.spent == Amount()


@pytest.mark.parametrize(
    ("status", "reason", "again"),
    [
        (429, Reason.RATE_LIMITED, True),
        (500, Reason.UNAVAILABLE, True),
        (502, Reason.UNAVAILABLE, True),
        (529, Reason.UNAVAILABLE, True),
        (408, Reason.UNAVAILABLE, True),
        (401, Reason.UNAUTHENTICATED, False),
        (403, Reason.UNAUTHENTICATED, False),
        (400, Reason.REJECTED, False),
        (404, Reason.REJECTED, False),
        (413, Reason.REJECTED, False),
    ],
)
def test_statuses(status: int, reason: str, again: bool) -> None:
    error = error_of_status(status, "no", None)
    assert (error.reason, error.again) == (reason, again)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        (None, None),
        ("soon", None),
        ("-1", None),
        ("nan", None),
        # Who waits so long holds a question, and others wait for that.
        ("86400", 60.0),
        ("1e9", 60.0),
        ("inf", 60.0),
    ],
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert error_of_status(429, "no", header).retry_after_seconds == seconds


def test_prices() -> None:
    """600 fresh tokens at 2, 400 cached at 0.5 and 100 written at 8 dollars a million."""
    given = {"name": "j", "kind": "openai", "model": "m", "base_url": "http://localhost"}
    given |= {"prompt_usd_per_million": 2, "completion_usd_per_million": 8}
    judge = JudgeSettings(**given, cached_usd_per_million=0.5)
    assert judge.cost_usd(1000, 100, 400) == pytest.approx(0.0022, abs=1e-12)
    assert JudgeSettings(**given).cost_usd(1000, 100, 400) == pytest.approx(0.0028, abs=1e-12)
