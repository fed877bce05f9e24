"""How steps are packed: a zstd frame of framed steps, each as it stands on the wire as field 1 of a message.

So any run of whole frames is a serialised StepBatch, ReadStepsResponse or ExportTrajectoriesResponse: what is packed
goes out to readers without being parsed.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import IO, Final

import zstandard

_LENGTH_DELIMITED: Final = 2
_LEVEL: Final = 9
_IN_MEMORY_BYTES: Final = 16 << 20


def frame(body: bytes) -> bytes:
    """A serialised step as an element of a repeated field 1."""
    return frame_prefix(len(body), 1) + body


def frame_prefix(size: int, number: int) -> bytes:
    """What stands before so many bytes of a field of this number, 15 at most: its tag and its length."""
    prefix = bytearray((number << 3 | _LENGTH_DELIMITED,))
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix)


def pack(bodies: Iterable[bytes]) -> tuple[bytes, str]:
    """Compressed steps, and the SHA-256 of what was packed. Of what is at hand as a whole: its size being known, less
    is left of it than a Packer leaves, in less time.
    """
    framed = b"".join(map(frame, bodies))
    packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(framed)
    return packed, hashlib.sha256(framed).hexdigest()


class Packer:
    """Compresses framed steps into a file, in memory while it is small."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
        self._hash = hashlib.sha256()
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115 (the caller closes it)

    def add_all(self, bodies: Iterable[bytes]) -> None:
        """The next steps."""
        framed = b"".join(map(frame, bodies))
        self._hash.update(framed)
        self._file.write(self._compressor.compress(framed))

    def finish(self) -> tuple[IO[bytes], str]:
        """The file, at its beginning, and the SHA-256 of what was packed."""
        self._file.write(self._compressor.flush())
        self._file.seek(0)
        return self._file, self._hash.hexdigest()


def unpacked_whole(packed: bytes, most_bytes: int) -> bytes | None:
    """Decompress what is small; None of what has more, or is broken: who reads it piece by piece is told of that."""
    try:
        if zstandard.frame_content_size(packed) > most_bytes:
            return None
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=most_bytes)
    except zstandard.ZstdError:
        return None


class DamagedError(Exception):
    """A packed object is not what was packed: it was cut off, or changed."""


async def unpacked(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Decompress.

    Raises:
        DamagedError: in the end too, when all that there is was returned.
    """
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    try:
        async for chunk in chunks:
            if piece := decompressor.decompress(chunk):
                yield piece
    except zstandard.ZstdError as error:
        raise DamagedError from error
    if not decompressor.eof or decompressor.unused_data:
        raise DamagedError


@dataclass(frozen=True, slots=True)
class Run:
    """Whole frames in a row: `count` steps from step `first` on."""

    first: int
    count: int
    framed: bytes = field(repr=False)


async def runs(chunks: AsyncIterator[bytes], *, first: int, most_bytes: int) -> AsyncIterator[Run]:
    """The frames of a stream from step `first` on, in runs of at most `most_bytes` unless one step alone is larger.

    Raises:
        DamagedError: the stream ends within a frame.
    """
    buffer, index = bytearray(), 0
    async for chunk in chunks:
        buffer += chunk
        begin, begun_at, position = 0, index, 0
        while (end := _frame_end(buffer, position)) is not None:
            if index < first:
                begin, begun_at = end, index + 1
            elif end - begin > most_bytes and position > begin:
                yield Run(begun_at, index - begun_at, bytes(buffer[begin:position]))
                begin, begun_at = position, index
            position, index = end, index + 1
        if position > begin:
            yield Run(begun_at, index - begun_at, bytes(buffer[begin:position]))
        del buffer[:position]
    if buffer:
        raise DamagedError


def count_of(framed: bytes) -> int:
    """How many whole frames there are."""
    count, position = 0, 0
    while (end := _frame_end(framed, position)) is not None:
        count, position = count + 1, end
    return count


def _frame_end(buffer: bytes | bytearray, start: int) -> int | None:
    """Where the frame at `start` ends; None if it is not whole yet."""
    size, shift, position = 0, 0, start + 1
    while position < len(buffer):
        byte = buffer[position]
        size |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            end = position + size
            return end if end <= len(buffer) else None
        shift += 7
    return None
