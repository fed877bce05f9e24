"""Parses a tar stream piece by piece: ustar, pax and GNU, sparse files included. No I/O, flat memory.

Sources: POSIX.1-2017, pax "ustar Interchange Format" and "pax Header Block"; GNU tar manual, "Tar Internals".
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

from services.exec_agent.files.archive.headers import (
    BLOCK,
    NO_DATA_KINDS,
    Entry,
    Header,
    Kind,
    parse_header,
    parse_pax,
)
from services.exec_agent.files.archive.numbers import ArchiveError
from services.exec_agent.files.archive.sparse import Extent, SparseMap, checked_map, numbers_of, pax_map

_MAXIMUM_META_BYTES: Final = 1 << 20  # of one pax header or long name; real ones have a few KiB
_MAXIMUM_EXTENTS: Final = 500_000
_META_TYPES: Final = frozenset(b"xgXLK")
_GZIP, _ZSTD, _XZ, _BZIP2 = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh"


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of the entry that came last, at an offset of its file."""

    offset: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class End:
    """The entry that came last is complete."""


Event = Entry | Data | End
_Steps = Generator[None, None, None]


class TarParser:
    """Feed it the stream; it gives entries, their data and their ends.

    Raises (from `feed` and `finish`):
        ArchiveError: the stream is no tar archive, a broken or a truncated one.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._chunk = memoryview(b"")
        self._position = 0
        self._taken = b""
        self._offset = 0
        self._pax: dict[bytes, bytes] = {}
        self._global_pax: dict[bytes, bytes] = {}
        self._pax_records: list[tuple[bytes, bytes]] = []
        self._long_name = b""
        self._long_link = b""
        self._name = b""
        self._is_done = False
        self._steps = self._run()

    def feed(self, data: bytes) -> list[Event]:
        """Take the next bytes; the events' views are good until they are dropped by the caller."""
        if self._is_done:
            return []  # padding after the end
        self._chunk, self._position = memoryview(data), 0
        try:
            next(self._steps)
        except StopIteration:
            self._is_done = True
        events, self._events = self._events, []
        return events

    def finish(self) -> None:
        """Say that the stream has ended."""
        if not self._is_done:
            where = f" in or before {self._name.decode('utf-8', 'replace')!r}" if self._name else ""
            raise ArchiveError(
                f"the archive is cut short: it ends after {self._offset} bytes{where} without its end-of-archive block",
                reason="ARCHIVE_TRUNCATED",
            )

    def _run(self) -> _Steps:
        while True:
            start = self._offset
            yield from self._take(BLOCK)
            if not any(self._taken):
                return
            header = self._header(start)
            if header.type in _META_TYPES:
                yield from self._meta(header)
                continue
            yield from self._entry(header)

    def _header(self, start: int) -> Header:
        try:
            return parse_header(self._taken)
        except ArchiveError as error:
            compressed = start == 0 and self._taken.startswith((_GZIP, _ZSTD, _XZ, _BZIP2))
            hint = "it is compressed; send plain tar" if compressed else error.message
            raise ArchiveError(f"no tar header at byte {start}: {hint}") from None

    def _take(self, count: int) -> _Steps:
        """Wait for `count` bytes; they are then in self._taken."""
        pieces = []
        while count > 0:
            if self._position == len(self._chunk):
                yield
                continue
            piece = self._chunk[self._position : self._position + count]
            pieces.append(piece)
            self._position += len(piece)
            self._offset += len(piece)
            count -= len(piece)
        self._taken = b"".join(pieces)

    def _pass_on(self, count: int, file_offset: int, *, dropped: bool = False) -> _Steps:
        """Give `count` bytes on as data, or drop them."""
        while count > 0:
            if self._position == len(self._chunk):
                yield
                continue
            piece = self._chunk[self._position : self._position + count]
            self._position += len(piece)
            self._offset += len(piece)
            count -= len(piece)
            if not dropped:
                self._events.append(Data(file_offset, piece))
                file_offset += len(piece)

    def _meta(self, header: Header) -> _Steps:
        """An entry that speaks of the next one."""
        if header.size > _MAXIMUM_META_BYTES:
            raise ArchiveError(f"a header of {header.size} bytes; at most {_MAXIMUM_META_BYTES >> 20} MiB are allowed")
        yield from self._take(header.size)
        content = self._taken
        yield from self._pass_on(-header.size % BLOCK, 0, dropped=True)
        if header.type == ord("L"):
            self._long_name = content.split(b"\0")[0]
        elif header.type == ord("K"):
            self._long_link = content.split(b"\0")[0]
        else:
            records = parse_pax(content)
            if header.type == ord("g"):
                self._global_pax.update(records)
            else:
                self._pax_records += records
                self._pax.update(records)

    def _entry(self, header: Header) -> _Steps:
        pax = {key: value for key, value in {**self._global_pax, **self._pax}.items() if value}
        entry = header.entry(pax, self._long_name, self._long_link)
        self._name = entry.name
        stored = entry.size
        extents: SparseMap | None = None
        if header.type == ord("S"):
            extents = yield from self._old_gnu_map(header)
            entry = entry.with_size(header.real_size)
        elif pax.get(b"GNU.sparse.major") == b"1":
            entry = entry.sparse(pax, b"GNU.sparse.realsize")
            extents, map_size = yield from self._map_in_data(stored)
            stored -= map_size
        elif b"GNU.sparse.size" in pax:
            entry = entry.sparse(pax, b"GNU.sparse.size")
            extents = pax_map(pax, self._pax_records)
        self._pax, self._pax_records, self._long_name, self._long_link = {}, [], b"", b""
        if entry.kind in NO_DATA_KINDS or header.type == ord("5"):
            stored = 0
            entry = entry.with_size(0)
        self._events.append(entry)
        if extents is None:
            yield from self._pass_on(stored, 0, dropped=entry.kind is not Kind.FILE)
        else:
            for extent in checked_map(extents, stored, entry.size):
                yield from self._pass_on(extent.size, extent.offset)
        yield from self._pass_on(-stored % BLOCK, 0, dropped=True)
        self._events.append(End())

    def _old_gnu_map(self, header: Header) -> Generator[None, None, SparseMap]:
        extents = list(header.extents)
        more = header.has_more_extents
        while more:
            yield from self._take(BLOCK)
            extents += [Extent(*pair) for pair in numbers_of(self._taken, 0, 21)]
            more = bool(self._taken[504])
            self._check_count(len(extents))
        return extents

    def _map_in_data(self, stored: int) -> Generator[None, None, tuple[SparseMap, int]]:
        """The map of pax format 1.0: decimal lines before the data, padded to a block. Returns it and its bytes."""
        lines: list[bytes] = []
        rest = b""
        size = 0
        count: int | None = None
        while count is None or len(lines) < 2 * count + 1:
            if size >= stored:
                raise ArchiveError("a sparse file's map is cut short")
            yield from self._take(BLOCK)
            size += BLOCK
            *complete, rest = (rest + self._taken).split(b"\n")
            lines += complete
            if count is None and lines:
                count = _decimal(lines[0])
                self._check_count(count)
        values = [_decimal(line) for line in lines[1 : 2 * count + 1]]
        return [Extent(*pair) for pair in zip(values[::2], values[1::2], strict=True)], size

    def _check_count(self, count: int) -> None:
        if count > _MAXIMUM_EXTENTS:
            raise ArchiveError(f"a sparse file in more than {_MAXIMUM_EXTENTS:,} pieces")


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 19:
        raise ArchiveError("a sparse file's map has something other than numbers in it")
    return int(text)
