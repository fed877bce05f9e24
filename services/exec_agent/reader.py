"""A reader of one command's output: late or early, following or not."""

from __future__ import annotations

import asyncio
from typing import Final

from services.common.errors import OutOfRangeError
from services.exec_agent.execution import Execution
from services.exec_agent.latch import wake
from services.exec_agent.model import Chunk, Gap
from services.exec_agent.pump import LARGE_READ, most_unread
from services.exec_agent.spool import NotCachedError, Spool

LARGEST_CHUNK: Final = 1 << 20
_CHUNK: Final = 64 << 10
"""Of the first message of a reader, each of whose messages may be twice as large: where connections break again and
again, every one still brings something."""
_GATHERED: Final = 256 << 10
_BURST_SECONDS: Final = 0.002
_GATHER_SECONDS: Final = 0.001
"""In a burst a message waits so long to be a large one: each costs 0.1 ms, whatever its size."""


class Nudged(Exception):  # noqa: N818 (nothing is wrong)
    """Somebody nudged the reader; it goes on with the next call."""


class OutputReader:
    """Reads on from an offset. Close it, also after an error."""

    def __init__(self, execution: Execution, offset: int, *, follow: bool) -> None:
        self._execution = execution
        self._loop = asyncio.get_running_loop()
        self._stop_at = None if follow and execution.result is None else execution.spool.end
        self._waiter: asyncio.Future[None] | None = None
        self._wake_at = 0
        self._last = 0.0
        self._closed = False
        self._nudged = False
        self._largest = _CHUNK
        self.offset = offset
        self.lagging = False
        """It held the command up for too long and no longer does."""
        execution.call_opened()
        execution.spool.listeners.add(self)
        if execution.pump is not None and self._stop_at is None:
            execution.pump.follow(self)

    async def next(self) -> Chunk | Gap | None:
        """The next piece; None at the end.

        Raises:
            OutOfRangeError: the command has ended before the offset.
            Nudged: nudge() was called.
        """
        spool = self._execution.spool
        while True:
            if self._nudged:
                self._nudged = False
                raise Nudged
            stop = self._stop_at
            if stop is None and 0 < spool.end - self.offset < self._gathered:
                await self._gather()
            if stop is None or self.offset < stop:
                size = min(self._largest, max(_CHUNK, spool.end - self.offset))
                found = await self._read(size if stop is None else min(size, stop - self.offset))
                if found is not None:
                    self._advance(found)
                    return found
            if stop is not None:
                self._check_range(stop)
                return None
            if self._execution.result is not None:
                # A child that lives on may write for ever: this reader ends with what there is now.
                self._stop_at = spool.end
                continue
            self._execution.check_interrupted()
            await self._wait_for(self.offset + 1)

    def changed(self) -> None:
        """There is more output, or there will be none."""
        if self._stop_at is None and not self._closed and self._execution.pump is not None:
            # A command that was queued has its pump only now: it must not run away before this reader has caught up.
            self._execution.pump.follow(self)
        if self._waiter is not None and (self._execution.spool.end >= self._wake_at or self._ending):
            wake(self._waiter)

    def nudge(self) -> None:
        """End this wait, or the next: whoever reads has something else to do first."""
        self._nudged = True
        if self._waiter is not None:
            wake(self._waiter)

    def close(self) -> None:
        """Stop reading. Repeatable."""
        if self._closed:
            return
        self._closed = True
        self._execution.spool.listeners.discard(self)
        if self._execution.pump is not None:
            self._execution.pump.leave(self)
        self._execution.call_closed()

    @property
    def _ending(self) -> bool:
        return self._execution.result is not None or self._execution.interrupted

    @property
    def _gathered(self) -> int:
        """Never more than is kept beside the command's next bytes: it would wait for this reader, and this for it."""
        return min(_GATHERED, max(0, most_unread(self._execution.spool) - LARGE_READ))

    async def _gather(self) -> None:
        """In a burst, wait a moment until there is enough for a large message."""
        now = self._loop.time()
        if now - self._last < _BURST_SECONDS and not self._ending:
            await self._wait_for(self.offset + self._gathered, _GATHER_SECONDS)
            now = self._loop.time()
        self._last = now

    async def _wait_for(self, end: int, seconds: float | None = None) -> None:
        """Wait until the output reaches `end`, the command ends, or for so long."""
        self._wake_at = end
        waiter = self._waiter = self._loop.create_future()
        timer = None if seconds is None else self._loop.call_later(seconds, wake, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    async def _read(self, size: int) -> Chunk | Gap | None:
        spool = self._execution.spool
        try:
            return spool.read(self.offset, size)
        except NotCachedError as where:
            data = await asyncio.to_thread(_load, spool, self.offset, where.size)
            # The ring may have been overwritten meanwhile, or dropped: then these are not the bytes asked for.
            if spool.start > self.offset:
                return Gap(self.offset, spool.start - self.offset)
            if isinstance(data, OSError):
                raise data from None
            return Chunk(self.offset, where.stream, data)

    def _advance(self, found: Chunk | Gap) -> None:
        self.offset = found.offset + (found.size if isinstance(found, Gap) else len(found.data))
        self._largest = min(2 * self._largest, LARGEST_CHUNK)
        self.lagging = False
        if self._execution.pump is not None:
            self._execution.pump.follower_moved()

    def _check_range(self, stop: int) -> None:
        if self.offset > stop and self._execution.result is not None:
            raise OutOfRangeError(
                f"offset {self.offset} is past the end of the output, which has {stop} bytes",
                reason="OFFSET_OUT_OF_RANGE",
                offset=self.offset,
                output_bytes=stop,
            )


def _load(spool: Spool, offset: int, size: int) -> bytes | OSError:
    try:
        return spool.load(offset, size)
    except OSError as error:
        return error
