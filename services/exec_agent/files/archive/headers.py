"""The header blocks of tar."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from services.exec_agent.files.archive.numbers import ArchiveError, parse_number
from services.exec_agent.files.archive.sparse import Extent, numbers_of

BLOCK: Final = 512
_RECORD: Final = re.compile(rb"(\d{1,9}) ([^=]+)=")
_TIME: Final = re.compile(rb"(-?)(\d{1,15})(?:\.(\d{0,20}))?\Z")
_LARGEST_SIZE: Final = 1 << 62


class Kind(enum.Enum):
    """What an entry is."""

    FILE = "file"
    HARD_LINK = "hard link"
    SYMLINK = "symbolic link"
    DEVICE = "device"
    DIRECTORY = "directory"
    PIPE = "pipe"
    VOLUME = "volume header"


NO_DATA_KINDS: Final = frozenset({Kind.HARD_LINK, Kind.SYMLINK, Kind.DEVICE, Kind.PIPE})
_KINDS: Final[Mapping[int, Kind]] = {
    0: Kind.FILE,
    ord("0"): Kind.FILE,
    ord("7"): Kind.FILE,
    ord("S"): Kind.FILE,
    ord("1"): Kind.HARD_LINK,
    ord("2"): Kind.SYMLINK,
    ord("3"): Kind.DEVICE,
    ord("4"): Kind.DEVICE,
    ord("5"): Kind.DIRECTORY,
    ord("D"): Kind.DIRECTORY,  # with a list of names, of incremental backups
    ord("6"): Kind.PIPE,
    ord("V"): Kind.VOLUME,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A member of an archive.

    Attributes:
        name: as it stands in the archive.
        kind: what it is.
        mode: permission bits.
        size: of a file, in bytes, holes included.
        mtime_ns: last modification, in nanoseconds since 1970.
        link: target of a link.
    """

    name: bytes
    kind: Kind
    mode: int
    uid: int
    gid: int
    user: bytes
    group: bytes
    size: int
    mtime_ns: int
    link: bytes

    def with_size(self, size: int) -> Entry:
        """The same with another size."""
        return replace(self, size=size)

    def sparse(self, pax: Mapping[bytes, bytes], size_key: bytes) -> Entry:
        """A sparse file of a pax archive: its real name and size stand in records of their own."""
        size = _pax_number(pax, size_key)
        if size is None:
            raise ArchiveError(f"a sparse file without {size_key.decode()}")
        return replace(self, name=pax.get(b"GNU.sparse.name", self.name), size=size)


@dataclass(frozen=True, slots=True)
class Header:
    """One header block, as it stands."""

    name: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    type: int
    link: bytes
    user: bytes
    group: bytes
    extents: tuple[Extent, ...] = ()
    has_more_extents: bool = False
    real_size: int = 0

    def entry(self, pax: Mapping[bytes, bytes], long_name: bytes, long_link: bytes) -> Entry:
        """The entry, with what the headers before it said."""
        kind = _KINDS.get(self.type)
        name = pax.get(b"path", long_name or self.name)
        if kind is None:
            raise ArchiveError(f"{name.decode('utf-8', 'replace')!r} has the unknown type {chr(self.type)!r}")
        if kind is Kind.FILE and name.endswith(b"/"):
            kind = Kind.DIRECTORY  # so the oldest archives write directories
        size, uid, gid = (_pax_number(pax, key) for key in (b"size", b"uid", b"gid"))
        time = pax.get(b"mtime")
        return Entry(
            name=name,
            kind=kind,
            mode=self.mode & 0o7777,
            uid=self.uid if uid is None else uid,
            gid=self.gid if gid is None else gid,
            user=pax.get(b"uname", self.user),
            group=pax.get(b"gname", self.group),
            size=self.size if size is None else size,
            mtime_ns=self.mtime * 1_000_000_000 if time is None else _nanoseconds(time),
            link=pax.get(b"linkpath", long_link or self.link),
        )


def parse_header(block: bytes) -> Header:
    """Parse a block.

    Raises:
        ArchiveError: its checksum or a number is wrong.
    """
    stated = parse_number(block[148:156])
    blanked = block[:148] + b" " * 8 + block[156:]
    unsigned = sum(blanked)
    # Some old writers summed signed bytes.
    if stated != unsigned and stated != unsigned - 256 * sum(byte > 127 for byte in blanked):
        raise ArchiveError("the checksum is wrong")
    name = _text(block[0:100])
    is_posix, is_gnu = block[257:263] == b"ustar\0", block[257:265] == b"ustar  \0"
    prefix = _text(block[345:500]) if is_posix else b""
    type_ = block[156]
    is_sparse = is_gnu and type_ == ord("S")
    size = parse_number(block[124:136])
    if not 0 <= size <= _LARGEST_SIZE:
        raise ArchiveError("a size is out of range")
    return Header(
        name=prefix + b"/" + name if prefix else name,
        mode=parse_number(block[100:108]),
        uid=parse_number(block[108:116]),
        gid=parse_number(block[116:124]),
        size=size,
        mtime=parse_number(block[136:148]),
        type=type_,
        link=_text(block[157:257]),
        user=_text(block[265:297]) if is_posix or is_gnu else b"",
        group=_text(block[297:329]) if is_posix or is_gnu else b"",
        extents=tuple(Extent(*pair) for pair in numbers_of(block, 386, 4)) if is_sparse else (),
        has_more_extents=is_sparse and bool(block[482]),
        real_size=parse_number(block[483:495]) if is_sparse else 0,
    )


def parse_pax(content: bytes) -> list[tuple[bytes, bytes]]:
    """The records of a pax header, in order: "length key=value newline"."""
    records = []
    position = 0
    while position < len(content) and content[position]:
        match = _RECORD.match(content, position)
        end = position + int(match[1]) if match else 0
        if match is None or match.end() >= end + 1 or end > len(content) or content[end - 1 : end] != b"\n":
            raise ArchiveError("a pax header is broken")
        records.append((match[2], content[match.end() : end - 1]))
        position = end
    return records


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _pax_number(pax: Mapping[bytes, bytes], key: bytes) -> int | None:
    text = pax.get(key)
    if text is None:
        return None
    if not text.isdigit() or len(text) > 19 or int(text) > _LARGEST_SIZE:
        raise ArchiveError(f"the pax record {key.decode('ascii', 'replace')!r} is no number")
    return int(text)


def _nanoseconds(text: bytes) -> int:
    match = _TIME.match(text)
    if match is None:
        raise ArchiveError("the pax record 'mtime' is no time")
    value = int(match[2]) * 1_000_000_000 + int((match[3] or b"").ljust(9, b"0")[:9])
    return -value if match[1] else value
