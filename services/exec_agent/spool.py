"""The output of one command: all of it up to a limit, for any number of readers at any position.

A small output stays in memory and in the journal. A larger one goes to a file that is a ring of fixed capacity; what it
overwrites is gone and shows as a gap. The newest chunks stay in memory too: a reader that keeps up never touches the
file. Nothing is shown to anybody before it stands in the journal or the file, so that an agent that is started again
shows the same.
"""

from __future__ import annotations

import contextlib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

from services.exec_agent.model import Chunk, Gap
from services.exec_agent.ring import SEGMENT_LIMIT, Ring
from services.exec_agent.spools import SpoolStore

INLINE_LIMIT: Final = 8 << 10  # a thousand finished commands then hold 8 MiB at most
RECENT_LIMIT: Final = 512 << 10
RECENT_COUNT: Final = 256
JOIN_LIMIT: Final = 4 << 10
CAPACITY_FLOOR: Final = 64 << 10  # every command may have this much, whatever the others use


class NotCachedError(Exception):
    """The bytes have to come from the disk: `load` them in a thread."""

    def __init__(self, stream: int, size: int) -> None:
        super().__init__()
        self.stream = stream
        self.size = size


class Listener(Protocol):
    """Somebody who wants to know of new output."""

    def changed(self) -> None:
        """There is more, or there will be no more."""


class Spool:
    """See the module. `start` is the first retained byte, `end` the next one to come."""

    def __init__(self, store: SpoolStore, exec_id: str, capacity: int) -> None:
        self._store = store
        self._exec_id = exec_id
        self.capacity = capacity
        self.start = 0
        self.end = 0
        self._segments = array("Q")  # offset << 1 | (stream - 1), one for each change of stream
        self._first_segment = 0
        self._removed_segments = 0
        self._recent: deque[Chunk] = deque()
        self._recent_bytes = 0
        self._ring: Ring | None = None
        self._named = False
        """The file can be found by a later agent, and has everything."""
        self._allocated = 0
        self._memory_only = False
        self._recent_limit = RECENT_LIMIT
        self._finished = False
        self._closed = False
        self.listeners: set[Listener] = set()

    def restore(self, start: int, noted: Iterable[Chunk], end: int) -> None:
        """Take what an agent before this one left: what it noted, from `start` to `end`, or its file if that has it."""
        found = self._store.find(self._exec_id)
        if found is not None and found[1].end >= end:
            self._ring, kept = found
            self.capacity = self._ring.capacity
            self.start, self._segments, self.end = kept
            self._named = True
            self._allocated = min(self.end, self.capacity)
            self._store.force_grow(self._allocated)
            return
        if found is not None:
            found[0].close()
            self._store.remove(self._exec_id)
        self.start = self.end = start
        for chunk in noted:
            self._add_segment(chunk.stream)
            self._remember(chunk.stream, chunk.data)
            self.end += len(chunk.data)

    def append(self, stream: int, data: bytes) -> None:
        """Add output; the oldest is dropped where there is no room."""
        if self._closed or not data:
            return
        self._add_segment(stream)
        if self._ring is None and not self._memory_only and self._outgrown(len(data)):
            self._open_ring()
        self._remember(stream, data)
        if self._ring is not None:
            self._write(self.end, data)
        self.end += len(data)
        self._note(stream, data)
        self._trim()
        self.notify()

    def notify(self) -> None:
        """Wake everybody who waits for output."""
        for listener in tuple(self.listeners):
            listener.changed()

    def would_overwrite(self, offset: int, size: int) -> bool:
        """Whether `size` more bytes would drop the byte at `offset`."""
        return self.end + size - offset > self.capacity

    def read(self, offset: int, maximum: int, *, may_block: bool = False) -> Chunk | Gap | None:
        """What stands at `offset`, at most `maximum` bytes; None if nothing does yet.

        Raises:
            NotCachedError: it must be read from the disk and `may_block` is not set.
            OSError: the disk failed.
        """
        if offset < self.start:
            return Gap(offset, self.start - offset)
        if offset >= self.end:
            return None
        if self._recent and offset >= self._recent[0].offset:
            return self._read_recent(offset, maximum)
        stream, size = self._run_at(offset)
        size = min(size, maximum)
        ring = self._open_file()
        if may_block:
            return Chunk(offset, stream, ring.read(offset, size))
        data = ring.read_cached(offset, size)
        if data is None:
            raise NotCachedError(stream, size)
        return Chunk(offset, stream, data)

    def load(self, offset: int, size: int) -> bytes:
        """Bytes that were not cached. In any thread; they count if `offset` is still retained after it.

        Raises:
            OSError: the disk failed, or the file is gone by now.
        """
        return self._open_file().read(offset, size)

    def noted(self) -> tuple[int, list[Chunk]]:
        """What the log must have of it: where that begins, and the output from there on."""
        if self._named:
            return 0, []
        if self._memory_only or self._ring is not None:
            return self.end, []
        return self.start, list(self._recent)

    def finish(self) -> None:
        """The command has ended: keep only what is needed for late readers."""
        self._finished = True
        self._recent_limit = 0
        if self._ring is not None:
            self._forget_recent()
            self._store.note_ended(self)
        self.notify()

    def drop(self) -> None:
        """Give up everything that is in the file; readers see a gap."""
        self._store.log.lost(self._exec_id, self.end)
        self._discard()

    def remove(self) -> None:
        """Free everything, the file too; later output is thrown away."""
        self._store.forget(self)
        self._discard()
        self._closed = True
        self.notify()

    def close(self) -> None:
        """The agent stops: free everything but the file, which the next agent finds."""
        self._store.forget(self)
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._closed = True

    def _discard(self) -> None:
        self._forget_recent()
        self.start = self.end
        self._segments = array("Q")
        self._first_segment = 0
        self._close_ring()
        self.capacity = min(self.capacity, RECENT_LIMIT)

    # ------------------------------------------------------------ adding

    def _outgrown(self, size: int) -> bool:
        return self.end + size > INLINE_LIMIT or len(self._recent) >= RECENT_COUNT

    def _add_segment(self, stream: int) -> None:
        segments = self._segments
        if self._first_segment == len(segments) or segments[-1] & 1 != stream - 1:
            segments.append(self.end << 1 | (stream - 1))

    def _remember(self, stream: int, data: bytes) -> None:
        recent = self._recent
        last = recent[-1] if recent else None
        if last is not None and last.stream == stream and len(last.data) + len(data) <= JOIN_LIMIT:
            recent[-1] = Chunk(last.offset, stream, last.data + data)
        else:
            recent.append(Chunk(self.end, stream, data))
        self._recent_bytes += len(data)

    def _forget_recent(self) -> None:
        self._recent.clear()
        self._recent_bytes = 0

    def _note(self, stream: int, data: bytes) -> None:
        """Make sure that a later agent knows of the bytes that were just added."""
        if self._ring is None or not self._named:
            if self._ring is None and not self._memory_only:
                self._store.log.output(self._exec_id, Chunk(self.end - len(data), stream, data))
            else:
                self._store.log.lost(self._exec_id, self.end)
            return
        try:
            self._ring.note(self._removed_segments + len(self._segments) - 1, self.end, stream)
        except OSError:  # the disk is full: this agent can still read it
            self._hide()

    def _open_ring(self) -> None:
        try:
            self._ring = self._store.create(self._exec_id, self.capacity)
        except OSError:
            self._memory_only = True
            # What is kept, so that a command waits for its readers instead of dropping what they have not read.
            self.capacity = min(self.capacity, RECENT_LIMIT)
            return
        self._named = True
        for chunk in self._recent:
            self._write(chunk.offset, chunk.data)
        if self._finished:
            self._store.note_ended(self)
        if self._ring is None or not self.end:
            return
        segments = self._segments if self._segments[-1] >> 1 < self.end else self._segments[:-1]
        try:
            self._ring.note_all(segments, self.end)
        except OSError:
            self._hide()

    def _hide(self) -> None:
        """The file does not have everything: no later agent may find it."""
        self._named = False
        self._store.remove(self._exec_id)
        self._store.log.lost(self._exec_id, self.end)

    def _write(self, offset: int, data: bytes) -> None:
        """Put bytes at their place in the ring; on a full disk the ring stays as large as it is."""
        if self._ring is None:
            return
        needed = min(offset + len(data), self.capacity) - self._allocated
        try:
            if needed > 0 and not self._allocate(needed):
                self._freeze()
            self._ring.write(offset, data)
        except OSError:
            if self._allocated - max(needed, 0) >= CAPACITY_FLOOR and offset < self.capacity:
                self._give_back(max(needed, 0))
                with contextlib.suppress(OSError):
                    self._freeze()
                    self._ring.write(offset, data)
                    return
            self._close_ring()

    def _allocate(self, size: int) -> bool:
        self._store.forget(self)  # it makes room at the cost of others, not of itself
        granted = self._store.grow(size)
        if self._finished:
            self._store.note_ended(self)
        if granted:
            self._allocated += size
            return True
        floor = CAPACITY_FLOOR - self._allocated
        if floor > 0:
            self._store.force_grow(floor)
            self._allocated = CAPACITY_FLOOR
        return False

    def _give_back(self, size: int) -> None:
        self._allocated -= size
        self._store.release(size)

    def _freeze(self) -> None:
        """Until a ring has wrapped, every byte stands at its own offset: only then can its capacity change."""
        if self._ring is not None and self.capacity != self._allocated:
            self.capacity = self._allocated
            self._ring.shrink(self.capacity)

    def _trim(self) -> None:
        recent = self._recent
        if self._ring is not None:
            while recent and (self._recent_bytes > self._recent_limit or len(recent) > RECENT_COUNT):
                self._recent_bytes -= len(recent.popleft().data)
            self.start = max(self.start, self.end - self.capacity)
        elif self._memory_only:
            limit = min(self.capacity, RECENT_LIMIT)
            while recent and (self._recent_bytes > limit or len(recent) > RECENT_COUNT):
                self._recent_bytes -= len(recent.popleft().data)
            self.start = max(self.start, recent[0].offset if recent else self.end)
        self._trim_segments()

    def _trim_segments(self) -> None:
        segments, first = self._segments, self._first_segment
        if len(segments) - first > SEGMENT_LIMIT:
            first += 1
            self.start = max(self.start, segments[first] >> 1)
        while first + 1 < len(segments) and segments[first + 1] >> 1 <= self.start:
            first += 1
        if first > 4096 and first * 2 > len(segments):
            del segments[:first]
            self._removed_segments += first
            first = 0
        self._first_segment = first

    # ------------------------------------------------------------ reading

    def _read_recent(self, offset: int, maximum: int) -> Chunk:
        recent = self._recent
        index = len(recent) - 1
        while recent[index].offset > offset:
            index -= 1
        first = recent[index]
        skip = offset - first.offset
        if skip or len(first.data) > maximum:
            return Chunk(offset, first.stream, first.data[skip : skip + maximum])
        parts, size = [first.data], len(first.data)
        for following in range(index + 1, len(recent)):
            chunk = recent[following]
            if chunk.stream != first.stream or size + len(chunk.data) > maximum:
                break
            parts.append(chunk.data)
            size += len(chunk.data)
        return first if len(parts) == 1 else Chunk(offset, first.stream, b"".join(parts))

    def _run_at(self, offset: int) -> tuple[int, int]:
        """Stream of the byte at `offset`, and how many bytes from there on are of the same."""
        segments = self._segments
        index = bisect_right(segments, offset << 1 | 1, lo=self._first_segment) - 1
        limit = segments[index + 1] >> 1 if index + 1 < len(segments) else self.end
        return (segments[index] & 1) + 1, limit - offset

    def _open_file(self) -> Ring:
        if self._ring is None:
            raise OSError("output is neither in memory nor in a file")
        return self._ring

    def _close_ring(self) -> None:
        """The file is of no use any more."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None
            self._store.remove(self._exec_id)
        self._named = False
        self._memory_only = True
        self._give_back(self._allocated)
