"""A bound on how often a server is asked: a token bucket that also heeds the server's own word."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

_LONGEST_PAUSE_SECONDS: Final = 60.0


class Throttle:
    """At most `burst` calls at once and `per_second` in the long run, in the order in which they came.

    The bucket is kept as the time at which it would be full again, so that it needs no timer.
    """

    def __init__(self, per_second: float, burst: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = 1 / per_second
        self._depth = burst * self._interval
        self._clock = clock
        self._full_at = clock()
        self._paused_until = 0.0

    async def turn(self) -> None:
        """Wait for a turn. One that comes within a pause is given back: the next is after it, one by one again."""
        while True:
            if (delay := self.take()) > 0:
                await asyncio.sleep(delay)
            if self._clock() >= self._paused_until:
                return

    def take(self) -> float:
        """Take the next turn; returns the seconds until it comes, at most 0 for now."""
        now = self._clock()
        self._full_at = max(self._full_at, now) + self._interval
        return self._full_at - self._depth - now

    def pause(self, seconds: float) -> None:
        """The server asked to be left alone for so long; longer than a minute it cannot ask."""
        self._paused_until = max(self._paused_until, self._clock() + min(seconds, _LONGEST_PAUSE_SECONDS))
        # The bucket is empty then.
        self._full_at = max(self._full_at, self._paused_until + self._depth)
