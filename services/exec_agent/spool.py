"""The output of one command: all of it up to a limit, for any number of readers at any position.

A small output stays in memory. A larger one goes to an unlinked file that is a ring of fixed capacity; what it
overwrites is gone and shows as a gap. The newest chunks stay in memory too: a reader that keeps up never touches the
file.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from typing import Final, Protocol

from services.exec_agent.model import Chunk, Gap

INLINE_LIMIT: Final = 8 << 10  # a thousand finished commands then hold 8 MiB at most
RECENT_LIMIT: Final = 512 << 10
RECENT_COUNT: Final = 256
JOIN_LIMIT: Final = 4 << 10
SEGMENT_LIMIT: Final = 1 << 17  # 8 bytes each
CAPACITY_FLOOR: Final = 64 << 10  # every command may have this much, whatever the others use


class SpoolStore:
    """Opens spool files in the agent's own directory and keeps their sum below the sandbox's limit."""

    def __init__(self, directory_fd: int, limit: int) -> None:
        self._directory_fd = directory_fd
        self._limit = limit
        self._allocated = 0
        self._ended: OrderedDict[int, Spool] = OrderedDict()

    @property
    def allocated(self) -> int:
        """Bytes of all spool files."""
        return self._allocated

    def open(self) -> int:
        """A new file without a name.

        Raises:
            OSError: there is no space or no descriptor left.
        """
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            return os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=self._directory_fd)
        except OSError:  # a file system without O_TMPFILE
            name = f"spool-{os.urandom(8).hex()}"
            descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._directory_fd)
            os.unlink(name, dir_fd=self._directory_fd)
            return descriptor

    def grow(self, size: int) -> bool:
        """Take `size` more bytes, if need be from the commands that ended first; False if the rest is in use."""
        while self._allocated + size > self._limit and self._ended:
            _, oldest = self._ended.popitem(last=False)
            oldest.drop()
        if self._allocated + size > self._limit:
            return False
        self._allocated += size
        return True

    def force_grow(self, size: int) -> None:
        """Take the floor that every command may have."""
        self._allocated += size

    def release(self, size: int) -> None:
        """Give bytes back."""
        self._allocated -= size

    def note_ended(self, spool: Spool) -> None:
        """Its output may be dropped when others need the space."""
        self._ended[id(spool)] = spool

    def forget(self, spool: Spool) -> None:
        """It is closed."""
        self._ended.pop(id(spool), None)


class NotCachedError(Exception):
    """The bytes have to come from the disk; read them in a thread."""


class Listener(Protocol):
    """Somebody who wants to know of new output."""

    def changed(self) -> None:
        """There is more, or there will be no more."""


class Spool:
    """See the module. `start` is the first retained byte, `end` the next one to come."""

    def __init__(self, store: SpoolStore, capacity: int) -> None:
        self._store = store
        self.capacity = capacity
        self.start = 0
        self.end = 0
        self._segments = array("Q")  # offset << 1 | (stream - 1), one for each change of stream
        self._first_segment = 0
        self._recent: deque[Chunk] = deque()
        self._recent_bytes = 0
        self._fd: int | None = None
        self._allocated = 0
        self._memory_only = False
        self._recent_limit = RECENT_LIMIT
        self._finished = False
        self._closed = False
        self.listeners: set[Listener] = set()

    def append(self, stream: int, data: bytes) -> None:
        """Add output; the oldest is dropped where there is no room."""
        if self._closed or not data:
            return
        self._add_segment(stream)
        if self._fd is None and not self._memory_only and self.end + len(data) > INLINE_LIMIT:
            self._open_file()
        self._remember(stream, data)
        if self._fd is not None:
            self._write(self.end, data)
        self.end += len(data)
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
        return self._read_file(offset, maximum, may_block=may_block)

    def finish(self) -> None:
        """The command has ended: keep only what is needed for late readers."""
        self._finished = True
        self._recent_limit = 0
        if self._fd is not None:
            self._forget_recent()
            self._store.note_ended(self)
        self.notify()

    def drop(self) -> None:
        """Give up everything that is in the file; readers see a gap."""
        self._forget_recent()
        self.start = self.end
        self._segments = array("Q")
        self._first_segment = 0
        self._close_file()
        self.capacity = min(self.capacity, RECENT_LIMIT)
        self._memory_only = True

    def close(self) -> None:
        """Free everything; later output is thrown away."""
        self._store.forget(self)
        self.drop()
        self._closed = True
        self.notify()

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

    def _open_file(self) -> None:
        try:
            self._fd = self._store.open()
        except OSError:
            self._memory_only = True
            return
        for chunk in self._recent:
            self._write(chunk.offset, chunk.data)
        if self._finished:
            self._store.note_ended(self)

    def _write(self, offset: int, data: bytes) -> None:
        """Put bytes at their place in the ring; on a full disk the ring stays as large as it is."""
        needed = min(offset + len(data), self.capacity) - self._allocated
        if needed > 0 and not self._allocate(needed):
            self._freeze()
        try:
            self._write_ring(offset, data)
        except OSError:
            if self._fd is not None and self._allocated - max(needed, 0) >= CAPACITY_FLOOR and offset < self.capacity:
                self._give_back(max(needed, 0))
                self._freeze()
                with contextlib.suppress(OSError):
                    self._write_ring(offset, data)
                    return
            self._close_file()
            self._memory_only = True

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
        self.capacity = self._allocated

    def _write_ring(self, offset: int, data: bytes) -> None:
        if self._fd is None:
            return
        view = memoryview(data)
        if len(view) > self.capacity:
            offset += len(view) - self.capacity
            view = view[-self.capacity :]
        place = offset % self.capacity
        room = self.capacity - place
        _write_all(self._fd, view[:room], place)
        if len(view) > room:
            _write_all(self._fd, view[room:], 0)

    def _trim(self) -> None:
        recent = self._recent
        if self._fd is not None:
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
            first = 0
        self._first_segment = first

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

    def _read_file(self, offset: int, maximum: int, *, may_block: bool) -> Chunk:
        if self._fd is None:
            raise OSError("output is neither in memory nor in a file")
        segments = self._segments
        index = bisect_right(segments, offset << 1 | 1, lo=self._first_segment) - 1
        stream = (segments[index] & 1) + 1
        limit = segments[index + 1] >> 1 if index + 1 < len(segments) else self.end
        place = offset % self.capacity
        size = min(maximum, limit - offset, self.capacity - place)
        data = os.pread(self._fd, size, place) if may_block else _read_cached(self._fd, size, place)
        if len(data) != size:
            raise OSError("the spool file is shorter than it should be")
        return Chunk(offset, stream, data)

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._give_back(self._allocated)


def _write_all(descriptor: int, data: memoryview, place: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, place)
        data = data[written:]
        place += written


def _read_cached(descriptor: int, size: int, place: int) -> bytes:
    """Read from the page cache, never from the disk."""
    buffer = bytearray(size)
    try:
        count = os.preadv(descriptor, [buffer], place, os.RWF_NOWAIT)
    except BlockingIOError:
        raise NotCachedError from None
    except OSError:  # file systems in memory know no RWF_NOWAIT
        return os.pread(descriptor, size, place)
    if count < size:  # the rest is not cached
        raise NotCachedError
    return bytes(buffer)
