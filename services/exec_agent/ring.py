"""The file of one command's output: a ring of bytes, written so that a later agent can read what this one left.

    0           header: magic, capacity, reserved
    TABLE       one number for each run of bytes of one stream, `end << 1 | stream - 1`; itself a ring
    DATA        the byte at offset n of the output stands at n modulo capacity

An agent can be killed between any two system calls, and in the middle of one that writes more than a page. Bytes are
therefore written first and their number in the table, which is eight bytes and so written as a whole, after them: what
the table does not name was never shown to anybody. Before a write goes over older bytes, `reserved` says up to which
end the output may stand in the file; a later agent counts what is kept from there.
The file outlives its agent and not the machine, as a sandbox does, so nothing is synced to the disk.
"""

from __future__ import annotations

import os
import struct
from array import array
from typing import Final, NamedTuple, Self

SEGMENT_LIMIT: Final = 1 << 17
"""Runs of bytes of one stream that are kept of one output; 8 bytes each."""
_MAGIC: Final = b"ORCHRNG1"
_HEADER: Final = struct.Struct("=8sQQ")
_NUMBER: Final = struct.Struct("=Q")
_CAPACITY_AT: Final = 8
_RESERVED_AT: Final = 16
_TABLE: Final = 4096
_SLOTS: Final = SEGMENT_LIMIT + 1  # the end of the run before the first tells where that one begins
_TABLE_STEP: Final = 32 << 10
_DATA: Final = _TABLE + (_SLOTS * _NUMBER.size + 4095) // 4096 * 4096


class Kept(NamedTuple):
    """What a file holds.

    Attributes:
        start: offset of the first byte.
        segments: `begin << 1 | stream - 1` of each run of bytes, the first of which may begin before `start`.
        end: offset after the last byte.
    """

    start: int
    segments: array[int]
    end: int


class Ring:
    """An open file. `capacity`: how many of the newest bytes it holds."""

    __slots__ = ("_descriptor", "capacity")

    def __init__(self, descriptor: int, capacity: int) -> None:
        """Owns `descriptor`."""
        self._descriptor = descriptor
        self.capacity = capacity

    @classmethod
    def create(cls, directory_fd: int, name: str, capacity: int) -> Self:
        """A new, empty file.

        Raises:
            OSError: there is no space or no descriptor left.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=directory_fd)
        try:
            os.pwrite(descriptor, _HEADER.pack(_MAGIC, capacity, 0), 0)
        except OSError:
            os.close(descriptor)
            os.unlink(name, dir_fd=directory_fd)
            raise
        return cls(descriptor, capacity)

    @classmethod
    def open(cls, directory_fd: int, name: str) -> tuple[Self, Kept] | None:
        """A file that another agent wrote; None if there is none that can be understood."""
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
        except OSError:
            return None
        try:
            found = _recover(descriptor)
        except OSError:
            found = None
        if found is None:
            os.close(descriptor)
            return None
        capacity, kept = found
        return cls(descriptor, capacity), kept

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes at their place; `note` makes them count.

        Raises:
            OSError: the disk is full or failed.
        """
        view = memoryview(data)
        end = offset + len(view)
        if end > self.capacity:
            _write_all(self._descriptor, memoryview(_NUMBER.pack(end)), _RESERVED_AT)
            if len(view) > self.capacity:
                view = view[-self.capacity :]
                offset = end - len(view)
        place = offset % self.capacity
        room = self.capacity - place
        _write_all(self._descriptor, view[:room], _DATA + place)
        if len(view) > room:
            _write_all(self._descriptor, view[room:], _DATA)

    def note(self, index: int, end: int, stream: int) -> None:
        """The run of bytes number `index`, the newest there is, now ends at `end`.

        Raises:
            OSError: the disk is full or failed.
        """
        number = _NUMBER.pack(end << 1 | (stream - 1))
        _write_all(self._descriptor, memoryview(number), _TABLE + index % _SLOTS * _NUMBER.size)

    def note_all(self, segments: array[int], end: int) -> None:
        """Note the runs of an output that was not in a file before, fewer than SEGMENT_LIMIT.

        Raises:
            OSError: the disk is full or failed.
        """
        ends = [*(following >> 1 for following in segments[1:]), end]
        numbers = array("Q", (e << 1 | begin & 1 for e, begin in zip(ends, segments, strict=True)))
        _write_all(self._descriptor, memoryview(numbers).cast("B"), _TABLE)

    def shrink(self, capacity: int) -> None:
        """Hold fewer bytes from now on. Only before anything was written over: every byte then stands at its offset.

        Raises:
            OSError: the disk failed.
        """
        _write_all(self._descriptor, memoryview(_NUMBER.pack(capacity)), _CAPACITY_AT)
        self.capacity = capacity

    def read(self, offset: int, size: int) -> bytes:
        """At most `size` bytes from `offset` on, all of which must be held; fewer where the ring is joined.

        Raises:
            OSError: the disk failed.
        """
        place = offset % self.capacity
        size = min(size, self.capacity - place)
        data = os.pread(self._descriptor, size, _DATA + place)
        if len(data) != size:
            raise OSError("the spool file is shorter than it should be")
        return data

    def read_cached(self, offset: int, size: int) -> bytes | None:
        """The same from the page cache, never from the disk; None if they are not all there.

        Raises:
            OSError: the file is damaged.
        """
        place = offset % self.capacity
        buffer = bytearray(min(size, self.capacity - place))
        try:
            count = os.preadv(self._descriptor, [buffer], _DATA + place, os.RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError:  # file systems in memory know no RWF_NOWAIT
            return self.read(offset, size)
        return bytes(buffer) if count == len(buffer) else None

    def close(self) -> None:
        """Close the file; it stays where it is."""
        os.close(self._descriptor)


def _recover(descriptor: int) -> tuple[int, Kept] | None:
    """Capacity and contents of a file; None if it is not one of ours or holds nothing."""
    header = os.pread(descriptor, _HEADER.size, 0)
    if len(header) != _HEADER.size:
        return None
    magic, capacity, reserved = _HEADER.unpack(header)
    numbers, base = _read_table(descriptor)
    if magic != _MAGIC or capacity == 0 or len(numbers) == 0:
        return None
    if any(numbers[i] >> 1 >= numbers[i + 1] >> 1 for i in range(len(numbers) - 1)):
        return None
    end = numbers[-1] >> 1
    begins = [base, *(number >> 1 for number in numbers[:-1])]
    start = max(begins[0], max(end, reserved) - capacity)
    if start < end and os.fstat(descriptor).st_size < _DATA + min(end, capacity):
        start = end
    segments = array("Q", (b << 1 | number & 1 for b, number in zip(begins, numbers, strict=True)))
    return capacity, Kept(min(start, end), segments, end)


def _read_table(descriptor: int) -> tuple[array[int], int]:
    """The numbers, oldest first, and where the first run begins."""
    numbers = array("Q")
    while len(numbers) < _SLOTS:
        size = min(_TABLE_STEP, (_SLOTS - len(numbers)) * _NUMBER.size)
        block = os.pread(descriptor, size, _TABLE + len(numbers) * _NUMBER.size)
        step = array("Q", block[: len(block) // _NUMBER.size * _NUMBER.size])
        used = next((i for i, number in enumerate(step) if number == 0), len(step))
        numbers.extend(step[:used])
        if used < size // _NUMBER.size:
            return numbers, 0
    newest = max(range(_SLOTS), key=numbers.__getitem__)
    # All slots are used: the oldest number, next to the newest, tells where the run after it begins.
    ordered = numbers[newest + 1 :] + numbers[: newest + 1]
    return ordered[1:], ordered[0] >> 1


def _write_all(descriptor: int, data: memoryview, place: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, place)
        data = data[written:]
        place += written
