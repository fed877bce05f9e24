"""Many short waits at little cost: for descriptors and for times, behind one descriptor and one timer of the loop.

A command takes three descriptors and five timers, and most of them are done with after a millisecond. Through the event
loop each would cost some 10 or 20 microseconds, here about two.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import select
import time
from collections.abc import Callable
from typing import Any, Final

_BATCH: Final = 256
_FINEST_SECONDS: Final = 0.001
_CANCELLED_MOST: Final = 256
"""So many cancelled timers may stand in the heap, or as many as others if that is more."""


class Timer:
    """A call to come. See Waits.call_later."""

    __slots__ = ("_arguments", "_callback", "_waits")

    def __init__(self, waits: Waits, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._waits = waits
        self._callback: Callable[..., object] | None = callback
        self._arguments = arguments

    @property
    def due(self) -> bool:
        """Whether it is still to be called."""
        return self._callback is not None

    def cancel(self) -> None:
        """Do not call it. Repeatable, also after it was called."""
        if self._callback is not None:
            self._callback, self._arguments = None, ()
            self._waits.note_cancelled()

    def run(self) -> None:
        """Call it, once."""
        callback, arguments = self._callback, self._arguments
        self._callback, self._arguments = None, ()
        if callback is not None:
            callback(*arguments)


class Waits:
    """The waits of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._readers: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._cancelled = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        self._loop.add_reader(self._epoll.fileno(), self._readable)

    def close(self) -> None:
        """Wait for nothing any more."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._readers.clear()
        self._heap.clear()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    # ------------------------------------------------------------ descriptors

    def watch(self, descriptor: int, callback: Callable[..., object], *arguments: Any) -> None:
        """Call back whenever there is something to read or the other end is closed. It may turn out to be nothing.

        Raises:
            OSError: the kernel lets this user watch no more descriptors.
        """
        self._epoll.register(descriptor, select.EPOLLIN)
        self._readers[descriptor] = (callback, arguments)

    def unwatch(self, descriptor: int) -> None:
        """Stop it; before the descriptor is closed. Repeatable."""
        if self._readers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def _readable(self) -> None:
        for descriptor, _ in self._epoll.poll(0, _BATCH):
            # Gone, or even another one under the same number, where a callback before this one has closed it.
            found = self._readers.get(descriptor)
            if found is not None:
                callback, arguments = found
                callback(*arguments)

    # ------------------------------------------------------------ times

    def call_later(self, seconds: float, callback: Callable[..., object], *arguments: Any) -> Timer:
        """Call back after so many seconds, a millisecond more or less."""
        timer = Timer(self, callback, arguments)
        when = time.monotonic() + seconds
        heapq.heappush(self._heap, (when, next(self._numbers), timer))
        if self._alarm is None or when < self._alarm_at:
            self._set_alarm(when, seconds)
        return timer

    @property
    def size(self) -> int:
        """Timers in the heap, cancelled ones too."""
        return len(self._heap)

    def note_cancelled(self) -> None:
        """A timer was cancelled. It stays in the heap until it is due, or there are too many."""
        self._cancelled += 1
        if self._cancelled > max(_CANCELLED_MOST, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[2].due]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def _set_alarm(self, when: float, seconds: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = when
        self._alarm = self._loop.call_later(max(_FINEST_SECONDS, seconds), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        try:
            now = time.monotonic()
            while self._heap and (self._heap[0][0] <= now or not self._heap[0][2].due):
                timer = heapq.heappop(self._heap)[2]
                if timer.due:
                    timer.run()
                else:
                    self._cancelled -= 1
        finally:
            # A callback may have set it for a timer of its own, later than those that were there.
            if self._heap and (self._alarm is None or self._heap[0][0] < self._alarm_at):
                when = self._heap[0][0]
                self._set_alarm(when, when - time.monotonic())
