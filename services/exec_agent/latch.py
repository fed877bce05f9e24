"""A one-way event with cheap, bounded waits."""

from __future__ import annotations

import asyncio

from services.exec_agent.waits import Waits


class Latch:
    """Something that happens once. Lighter than asyncio.Event with wait_for, which costs a task a wait."""

    __slots__ = ("_loop", "_waiters", "_waits", "is_set")

    def __init__(self, loop: asyncio.AbstractEventLoop, waits: Waits) -> None:
        self._loop = loop
        self._waits = waits
        self._waiters: set[asyncio.Future[None]] = set()
        self.is_set = False

    def set(self) -> None:
        """It happened."""
        self.is_set = True
        self.wake_all()

    def wake_all(self) -> None:
        """End all waits without its having happened."""
        for waiter in self._waiters:
            wake(waiter)
        self._waiters.clear()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until it happened, or for so long; returns whether it has."""
        if self.is_set or (seconds is not None and seconds <= 0):
            return self.is_set
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        timer = None if seconds is None else self._waits.call_later(seconds, wake, waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if timer is not None:
                timer.cancel()
        return self.is_set


def wake(waiter: asyncio.Future[None]) -> None:
    """Resolve a waiter that may have given up."""
    if not waiter.done():
        waiter.set_result(None)
