"""Moves what a command writes from its pipes into its spool, and slows the command down for readers that are behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from typing import Final, Protocol

from services.exec_agent.spool import Spool
from services.exec_agent.waits import Timer, Waits

FIRST_READ: Final = 64 << 10
LARGE_READ: Final = 512 << 10
_LARGE_PIPE: Final = 1 << 20
_DRAIN_LIMIT: Final = 4 << 20
STALL_SECONDS: Final = 30.0
_PLACE_SECONDS: Final = 10.0
"""A client notices that its connection broke, waits a moment and calls again; a gateway is there again after two."""
_MOST_PLACES: Final = 32


class Follower(Protocol):
    """A reader that follows a running command."""

    offset: int
    lagging: bool


class _Place:
    """Where a follower was that was cut off. It comes back somewhere behind `first`, and no later than at `offset`."""

    def __init__(self, spool: Spool, sent: int) -> None:
        self.first = sent - spool.capacity
        self.offset = sent
        self.lagging = False


def most_unread(spool: Spool) -> int:
    """Bytes that a follower may leave unread before it holds the command up.

    Half of what is retained. The other half is what it was sent last: connections on the way to a client hold tens of
    MiB, which are lost where one of them breaks, and which the client asks for again.
    """
    return spool.capacity - spool.capacity // 2


class OutputPump:
    """Reads the pipes of one command until all their write ends are closed.

    A follower that is far behind (see most_unread) stops it, at most STALL_SECONDS at a stretch; then that follower may
    lose the oldest bytes. One whose stream ends before the command is waited for: a client that gives up, one that is
    dead and a gateway that was killed look the same, and the last one's client comes back.
    """

    def __init__(
        self, waits: Waits, spool: Spool, pipes: dict[int, int], limit: int, on_limit: Callable[[], None]
    ) -> None:
        """`pipes` maps each read end, owned from now on, to its stream. `limit`: bytes to keep at most, or zero."""
        self._waits = waits
        self._spool = spool
        self._pipes = pipes
        self._limit = limit
        self._on_limit = on_limit
        self._read_size = FIRST_READ
        self._stalled: Timer | None = None
        self.followers: set[Follower] = set()
        self.expected: set[Follower] = set()
        """Each in the place of a follower that is still to come; a start that is repeated has several."""
        self._places: dict[_Place, Timer] = {}
        self.on_eof: Callable[[], None] | None = None
        self.cut = False
        """Whether more was written than the limit allows."""
        for pipe in pipes:
            os.set_blocking(pipe, False)
            self._waits.watch(pipe, self._readable, pipe)

    @property
    def eof(self) -> bool:
        """Whether nothing can be written any more."""
        return not self._pipes

    @property
    def is_held_up(self) -> bool:
        """Whether followers, or one that is expected, hold the command up."""
        return self._stalled is not None

    def drain(self, *, force: bool = False) -> bool:
        """Take what stands in the pipes now, without waiting; False if followers hold it up, unless forced."""
        if force:
            self._resume()
        for pipe in tuple(self._pipes):
            taken = 0
            while taken < _DRAIN_LIMIT:
                if not force and self._must_stall():
                    # Also where nothing more is written, which nobody would be told of: no follower is waited for
                    # for ever.
                    self._stall()
                    return False
                size = self._read(pipe)
                if size == 0:
                    break
                taken += size
        return True

    def follow(self, follower: Follower) -> None:
        """A follower has come: the one that was expected, if any was, or one that was cut off. Repeatable."""
        if follower not in self.followers:
            self.followers.add(follower)
            for place in [place for place in self._places if place.first <= follower.offset <= place.offset]:
                self._places.pop(place).cancel()
        self.expected.clear()
        self.follower_moved()

    def leave(self, follower: Follower) -> None:
        """A follower's stream has ended; while the command runs on, its place is kept for a while. Repeatable."""
        if follower not in self.followers:
            return
        self.followers.remove(follower)
        if not self.eof and not follower.lagging:
            if len(self._places) == _MOST_PLACES:
                self._places.pop(next(iter(self._places))).cancel()
            place = _Place(self._spool, follower.offset)
            self._places[place] = self._waits.call_later(_PLACE_SECONDS, self._give_up_place, place)
        self.follower_moved()

    def follower_moved(self) -> None:
        """A follower has read on, come or left."""
        if self._stalled is not None and not self._must_stall():
            self._resume()

    def close(self) -> None:
        """Stop reading; whoever still writes gets SIGPIPE."""
        self._cancel_stall()
        for pipe in tuple(self._pipes):
            self._close_pipe(pipe)

    def _readable(self, pipe: int) -> None:
        if self._must_stall():
            self._stall()
            return
        self._read(pipe)
        if not self._pipes and self.on_eof is not None:
            self.on_eof()

    def _read(self, pipe: int) -> int:
        """Read once; returns the bytes taken, zero at the end or when nothing is there."""
        try:
            data = os.read(pipe, self._next_size)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            data = b""  # a terminal that nobody has open any more, everything taken
        if not data:
            self._close_pipe(pipe)
            return 0
        if len(data) == FIRST_READ and self._read_size == FIRST_READ:
            self._enlarge(pipe)
        self._keep(self._pipes[pipe], data)
        return len(data)

    def _keep(self, stream: int, data: bytes) -> None:
        spool = self._spool
        kept = data[: self._limit - spool.end] if self._limit else data
        if kept:
            spool.append(stream, kept)
        if len(kept) < len(data) and not self.cut:
            # It is told to end. What it writes until then is read and forgotten: it must not block on a full pipe.
            self.cut = True
            self._on_limit()

    def _enlarge(self, pipe: int) -> None:
        """A command that fills its pipe is fast: fewer and larger reads from now on."""
        self._read_size = LARGE_READ
        with contextlib.suppress(OSError):  # the user's share of pipe memory is used up
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _LARGE_PIPE)

    @property
    def _next_size(self) -> int:
        """Bytes of the next read: never more than fits, or a follower would hold it up that has read everything."""
        return min(self._read_size, most_unread(self._spool))

    def _must_stall(self) -> bool:
        spool, size = self._spool, self._next_size
        if not spool.would_overwrite(spool.start, size):
            return False
        return any(not f.lagging and self._would_lose(f, size) for f in self._held_up_for)

    def _would_lose(self, follower: Follower, size: int) -> bool:
        """Whether `size` more bytes would drop what it has not read, or was sent last and may not have reached."""
        return self._spool.end + size - follower.offset > most_unread(self._spool)

    @property
    def _held_up_for(self) -> tuple[Follower, ...]:
        return (*self.followers, *self.expected, *self._places)

    def _stall(self) -> None:
        for pipe in self._pipes:
            self._waits.unwatch(pipe)
        if self._stalled is None:
            self._stalled = self._waits.call_later(STALL_SECONDS, self._give_up)
            self._spool.notify()

    def _give_up(self) -> None:
        for follower in self._held_up_for:
            if self._would_lose(follower, self._next_size):
                follower.lagging = True
        self._resume()

    def _give_up_place(self, place: _Place) -> None:
        if self._places.pop(place, None) is not None:
            self.follower_moved()

    def _forget_places(self) -> None:
        for timer in self._places.values():
            timer.cancel()
        self._places.clear()

    def _resume(self) -> None:
        if self._stalled is not None:
            self._cancel_stall()
            for pipe in self._pipes:
                self._waits.watch(pipe, self._readable, pipe)

    def _cancel_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _close_pipe(self, pipe: int) -> None:
        self._waits.unwatch(pipe)
        del self._pipes[pipe]
        os.close(pipe)
        if not self._pipes:
            self._forget_places()
