"""What a command reads: its input on the way to its pipe or terminal, by offset and within a bound."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from services.common.errors import FailedPreconditionError, OutOfRangeError
from services.exec_agent.latch import wake

BUFFER_BYTES: Final = 256 << 10
"""So much is taken before the command reads it."""
PATIENCE_SECONDS: Final = 30.0
"""A message waits so long for its command to read, then its call tells how far it has come."""
_END_OF_FILE: Final = b"\x04"
"""VEOF of a terminal, as it is unless its command has set another. After the beginning of a line it ends that alone."""
_AT_LINE_START: Final = frozenset({b"", b"\n", b"\r", _END_OF_FILE})
"""The last byte typed, where nothing of a line is waiting."""


class InputLog(Protocol):
    """Where input is noted until its command has started. Each call fails where it cannot be: then it is not taken."""

    def took(self, offset: int, data: memoryview) -> None:
        """This follows what was noted before."""

    def ended(self, offset: int) -> None:
        """That was all."""


class Stdin:
    """The input of one command. All methods run on the event loop.

    Attributes:
        log: where it is noted that input was taken, before its writer is told so; None: nowhere.
        offset: bytes taken; the offset of the next one.
        closed: no more is taken: its end was given, or the command does not want it.
        listeners: called when some was written, and when it is closed.
    """

    __slots__ = (
        "_buffered",
        "_ending",
        "_fd",
        "_interrupted",
        "_is_past",
        "_last",
        "_loop",
        "_parts",
        "_terminal",
        "_waiters",
        "_watching",
        "_writer",
        "closed",
        "listeners",
        "log",
        "offset",
    )

    def __init__(self, *, terminal: bool = False) -> None:
        """`terminal`: it goes to one, which outlives the end of its input."""
        self._loop = asyncio.get_running_loop()
        self._terminal = terminal
        self._fd = -1
        self._parts: deque[memoryview] = deque()
        self._buffered = 0
        self._watching = False
        self._ending = False
        self._interrupted = False
        self._is_past = False
        self._last = b""
        self._waiters: set[asyncio.Future[None]] = set()
        self._writer: object = None
        self.log: InputLog | None = None
        self.offset = 0
        self.closed = False
        self.listeners: set[Callable[[], None]] = set()

    @classmethod
    def of(cls, data: bytes) -> Stdin:
        """Input that is known whole."""
        made = cls()
        made._hold(memoryview(data))
        made._ending = made.closed = True
        return made

    @classmethod
    def past(cls) -> Stdin:
        """Input of a command that has ended: closed at any offset, since nobody knows any more how far it had come."""
        made = cls()
        made._is_past = made.closed = True
        return made

    def restore(self, data: bytes, *, ended: bool) -> None:
        """Take what an agent before this one had taken of the input of a command that it did not start."""
        self._hold(memoryview(data))
        self._ending = self.closed = ended

    @property
    def written(self) -> int:
        """Bytes that the command's pipe or terminal has taken."""
        return self.offset - self._buffered

    @property
    def descriptor(self) -> int:
        """Our end of the command's terminal or pipe; negative before its start and after its end."""
        return self._fd

    def open(self, descriptor: int) -> None:
        """Write to `descriptor`, which is owned from now on, without blocking."""
        self.log = None  # whatever becomes of the command now, it will not be started again
        self._fd = descriptor
        os.set_blocking(descriptor, False)
        self._write()

    def begin(self) -> object:
        """A call begins to write, and is the writer from now on: the ones before it take nothing more."""
        self._writer = object()
        self._wake()
        return self._writer

    def has_turn(self, writer: object) -> bool:
        """Whether no other call has begun since; None has always."""
        return writer is None or writer is self._writer

    async def take(
        self, offset: int, data: bytes, patience: float = PATIENCE_SECONDS, *, writer: object = None
    ) -> bool:
        """Take bytes, those that are new; waits for room.

        Returns:
            Whether all was taken; False once another writer has begun, and after `patience` seconds in all. However
            steadily a command reads, a call must come to its next message before it counts as silent.

        Raises:
            OutOfRangeError: STDIN_OFFSET_AHEAD: bytes before these are missing.
            FailedPreconditionError: STDIN_CLOSED.
            ResourceExhaustedError: NO_SPACE: what is taken before the start cannot be noted.
        """
        rest, until = memoryview(data), self._loop.time() + patience
        while self.has_turn(writer):
            done = self._put(offset, rest)
            offset, rest = offset + done, rest[done:]
            if not rest:
                return True
            if not done and not await self._moved(until - self._loop.time()):
                return False
        return False

    def end(self, offset: int) -> None:
        """The input ends at `offset`. Repeatable, also when nobody reads it any more.

        Raises:
            OutOfRangeError: STDIN_OFFSET_AHEAD.
            ResourceExhaustedError: NO_SPACE.
        """
        self.check_reached(offset)
        if not self.closed and offset == self.offset:
            if self.log is not None:
                self.log.ended(offset)
            self._ending = self.closed = True
            self._write()
            self._notify()

    def finish(self) -> None:
        """The command's own process has ended: no more is taken; what is, a child of it may still read."""
        if self._fd < 0 or self._terminal:
            self.close()
        elif not self.closed:
            self._ending = self.closed = True
            self._write()
            self._notify()

    def interrupt(self) -> None:
        """The agent is about to stop: nobody waits for room any more."""
        self._interrupted = True
        self._notify()

    def close(self) -> None:
        """Write nothing more. Repeatable."""
        self.closed = True
        self._parts.clear()
        self._unwatch()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._notify()

    def _put(self, offset: int, data: memoryview) -> int:
        """Take what there is room for; returns how many bytes of `data` need not be sent again."""
        self.check_reached(offset)
        new = data[max(0, self.offset - offset) :]
        if not new:
            return len(data)
        if not self.closed:
            part = new[: BUFFER_BYTES - self._buffered]
            if part:
                if self.log is not None:
                    self.log.took(self.offset, part)
                self._hold(part)
                self._write()
            if not self.closed:
                return len(data) - len(new) + len(part)
        raise FailedPreconditionError(
            "the command takes no more input: its end was sent, the command has closed it, or it has ended",
            reason="STDIN_CLOSED",
            offset=self.offset,
        )

    def check_reached(self, offset: int) -> None:
        """Raise OutOfRangeError (STDIN_OFFSET_AHEAD) if bytes before `offset` are missing."""
        if offset > self.offset and not self._is_past:
            raise OutOfRangeError(
                f"the input up to offset {self.offset} was taken, and this goes on at {offset}; send it from"
                f" {self.offset} on",
                reason="STDIN_OFFSET_AHEAD",
                offset=offset,
                expected_offset=self.offset,
            )

    def _hold(self, part: memoryview) -> None:
        self._parts.append(part)
        self._buffered += len(part)
        self.offset += len(part)
        self._last = bytes(part[-1:])

    def _write(self) -> None:
        if self._fd < 0:
            return
        before = self._buffered
        try:
            while self._parts:
                size = os.write(self._fd, self._parts[0])
                self._buffered -= size
                self._parts[0] = self._parts[0][size:]
                if not self._parts[0]:
                    self._parts.popleft()
            self._all_written()
        except BlockingIOError:
            if not self._watching:
                self._watching = True
                self._loop.add_writer(self._fd, self._write)
        except OSError:  # nobody reads it any more
            self.close()
            return
        if self._buffered < before:
            self._notify()

    def _all_written(self) -> None:
        if self._ending and self._terminal:
            if self._last not in _AT_LINE_START:
                os.write(self._fd, _END_OF_FILE)
                self._last = _END_OF_FILE
            os.write(self._fd, _END_OF_FILE)
            self._ending = False
        self._unwatch()
        if self._ending:
            self.close()

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_writer(self._fd)

    async def _moved(self, seconds: float) -> bool:
        """Wait until some was written or it was closed; False after so long, or if the agent stops."""
        if self._interrupted:
            return False
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        before = self._buffered
        timer = self._loop.call_later(seconds, wake, waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            timer.cancel()
        return self.closed or self._buffered < before

    def _wake(self) -> None:
        for waiter in self._waiters:
            wake(waiter)
        self._waiters.clear()

    def _notify(self) -> None:
        self._wake()
        for listener in tuple(self.listeners):
            listener()
