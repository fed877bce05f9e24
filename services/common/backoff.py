"""Delays between attempts: doubling, with full jitter, reset by success."""

from __future__ import annotations

import random


class Backoff:
    """Delays drawn from 0 to a bound that doubles from `first_seconds` to `maximum_seconds`."""

    def __init__(self, first_seconds: float, maximum_seconds: float, *, rng: random.Random | None = None) -> None:
        self._first = first_seconds
        self._maximum = maximum_seconds
        self._bound = first_seconds
        self._rng = rng or random.Random()  # noqa: S311 (spreads load, guards nothing)

    def next(self) -> float:
        """Seconds to wait before the next attempt."""
        delay = self._rng.uniform(0, self._bound)
        self._bound = min(self._bound * 2, self._maximum)
        return delay

    def reset(self) -> None:
        """Begin again after a success."""
        self._bound = self._first
