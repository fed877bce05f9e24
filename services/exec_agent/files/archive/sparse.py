"""Maps of sparse files: which parts of a file have data; the rest are holes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from services.exec_agent.files.archive.numbers import ArchiveError, parse_number


class Extent(NamedTuple):
    """A part of a file that has data, in bytes."""

    offset: int
    size: int


SparseMap = Sequence[Extent]


def numbers_of(block: bytes, start: int, count: int) -> Iterator[tuple[int, int]]:
    """Pairs of offset and size, 12 bytes each, of an old GNU header; unused ones are empty."""
    for position in range(start, start + 24 * count, 24):
        if not block[position]:
            return
        yield parse_number(block[position : position + 12]), parse_number(block[position + 12 : position + 24])


def pax_map(pax: Mapping[bytes, bytes], records: Sequence[tuple[bytes, bytes]]) -> SparseMap:
    """The map of pax formats 0.0 (a record for each number) and 0.1 (one record with commas)."""
    text = pax.get(b"GNU.sparse.map")
    if text is not None:
        numbers = text.split(b",")
    else:
        numbers = [value for key, value in records if key in {b"GNU.sparse.offset", b"GNU.sparse.numbytes"}]
    if len(numbers) % 2 or not all(number.isdigit() and len(number) < 20 for number in numbers):
        raise ArchiveError("a sparse file's map is broken")
    values = [int(number) for number in numbers]
    return [Extent(*pair) for pair in zip(values[::2], values[1::2], strict=True)]


def checked_map(extents: SparseMap, stored: int, size: int) -> SparseMap:
    """The map, if it is in order, within `size` bytes and speaks of exactly the `stored` bytes."""
    end = 0
    for extent in extents:
        if extent.offset < end or extent.size < 0:
            raise ArchiveError("a sparse file's map is out of order")
        end = extent.offset + extent.size
    if end > size or sum(extent.size for extent in extents) != stored:
        raise ArchiveError("a sparse file's map does not match its size")
    return extents
