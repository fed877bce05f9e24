"""Bounds on calls: how many a minute, whether at all while an endpoint is ill, and how much may be spent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final


class Pace:
    """Spreads calls evenly over time, with a burst of a few seconds. Without a limit no call waits."""

    _BURST_SECONDS = 5.0

    def __init__(self, per_minute: float) -> None:
        self._seconds = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._line = asyncio.Lock()

    def delay(self, now: float) -> float:
        """Seconds until the next place is free."""
        return max(self._next - now - self._BURST_SECONDS, 0.0) if self._seconds else 0.0

    def take(self, now: float) -> None:
        """Take it."""
        self._next = max(self._next, now) + self._seconds

    async def turn(self) -> None:
        """Wait for a place and take it, first come, first served. Who leaves the line has taken none."""
        if not self._seconds:
            return
        loop = asyncio.get_running_loop()
        async with self._line:
            while (delay := self.delay(loop.time())) > 0:  # noqa: ASYNC110 (until a known time)
                await asyncio.sleep(delay)
            self.take(loop.time())


class Breaker:
    """Stops calling an endpoint that fails again and again, and tries it with one call from time to time."""

    THRESHOLD = 8
    FIRST_SECONDS = 2.0
    MOST_SECONDS = 60.0

    def __init__(self) -> None:
        self._failures = 0
        self._closed_until = 0.0
        self._rest = self.FIRST_SECONDS
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether it keeps calls away but for a probe."""
        return self._failures >= self.THRESHOLD

    def wait_seconds(self, now: float) -> float:
        """Seconds until it is worth asking again; 0 lets the caller through."""
        if not self.is_open:
            return 0.0
        if now < self._closed_until:
            return self._closed_until - now
        if self._probing:
            return self.FIRST_SECONDS
        self._probing = True
        return 0.0

    def succeeded(self) -> None:
        """The endpoint answered."""
        self._failures, self._rest, self._probing = 0, self.FIRST_SECONDS, False

    def failed(self, now: float) -> None:
        """It did not."""
        self._failures += 1
        probed, self._probing = self._probing, False
        # Calls that were under way when it opened tell nothing new: only a probe makes the rest longer.
        if probed or self._failures == self.THRESHOLD:
            self._closed_until = now + self._rest
            self._rest = min(self._rest * 2, self.MOST_SECONDS)

    def given_up(self) -> None:
        """The caller that was let through came to no end."""
        self._probing = False


class BudgetExhaustedError(Exception):
    """The next call does not fit."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Tokens and US dollars."""

    tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        """Both together."""
        return Amount(self.tokens + other.tokens, self.cost_usd + other.cost_usd)


UNLIMITED: Final = Amount()


class Ledger:
    """What was spent, and what calls under way may take. Several meters may go by one."""

    def __init__(self) -> None:
        self.spent = Amount()
        self.reserved: list[Amount] = []
        self._changed = asyncio.Event()

    def know(self, spent: Amount) -> None:
        """So much was spent, as somebody counted it who knows of some calls that are not ours, and not yet of all."""
        self.spent = Amount(max(self.spent.tokens, spent.tokens), max(self.spent.cost_usd, spent.cost_usd))

    def release(self, most: Amount) -> None:
        """A call has ended."""
        self.reserved.remove(most)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self) -> None:
        """Wait until a call has ended."""
        await self._changed.wait()


class Meter:
    """What may be spent, and was. 0 of either is no limit.

    Args:
        limit: what may be.
        ledger: what was; one of its own by default.
        look: tells what was spent elsewhere too; asked before each call, where there is a limit.
    """

    def __init__(
        self, limit: Amount, ledger: Ledger | None = None, look: Callable[[], Awaitable[Amount]] | None = None
    ) -> None:
        self._limit = limit
        self._ledger = ledger or Ledger()
        self._look = look if limit != UNLIMITED else None
        self.exhausted = False
        """Whether a call was not made."""

    @property
    def spent(self) -> Amount:
        """So far."""
        return self._ledger.spent

    @asynccontextmanager
    async def call(self, most: Amount) -> AsyncIterator[Callable[[Amount], None]]:
        """Room for one call, which takes `most` at most; what it took is told to the function that this gives.

        Where it fits only if others take less than they may, it waits for them.

        Raises:
            BudgetExhaustedError: it does not fit.
        """
        ledger = self._ledger
        while not await self._fits(most):
            if not ledger.reserved:
                self.exhausted = True
                raise BudgetExhaustedError
            await ledger.changed()
        ledger.reserved.append(most)
        try:
            yield self._spend
        finally:
            ledger.release(most)

    def _spend(self, amount: Amount) -> None:
        self._ledger.spent += amount

    async def _fits(self, most: Amount) -> bool:
        if self._limit == UNLIMITED:
            return True
        if self._look is not None:
            self._ledger.know(await self._look())
        total = sum(self._ledger.reserved, self._ledger.spent + most)
        return not (
            (self._limit.tokens and total.tokens > self._limit.tokens)
            or (self._limit.cost_usd and total.cost_usd > self._limit.cost_usd)
        )
