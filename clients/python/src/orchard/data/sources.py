"""Where exports and curation read trajectories: files here, or a server's (see `orchard.data.server`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, Self

from orchard.data.errors import DataError
from orchard.data.record import Record
from orchard.data.registry import read, reader_of
from orchard.data.report import Report
from orchard.trajectory.v1 import trajectory_pb2 as pb

_AGAIN: Final = "choose again with restart (--restart), when nothing changes what is chosen from"


class Source(Protocol):
    """Trajectories that can be read again and again, in the same order."""

    @property
    def identity(self) -> str:
        """Differs when the trajectories may differ, so that no export goes on with others."""
        ...

    @property
    def as_of(self) -> str:
        """The moment whose trajectories these are; empty where they do not grow."""
        ...

    def at(self, as_of: str) -> Source:
        """The same as of another moment."""
        ...

    def records(self, after: str = "") -> Iterator[tuple[Record, str]]:
        """Trajectories after a place, each with its own place. Empty: from the beginning."""
        ...

    def headers(self) -> Iterator[pb.Trajectory]:
        """The descriptions of all trajectories."""
        ...


class _Fixed:
    """A source that does not grow."""

    __slots__ = ()
    as_of = ""

    def at(self, as_of: str) -> Self:
        """The same."""
        del as_of
        return self


@dataclass(frozen=True, slots=True)
class FileSource(_Fixed):
    """Trajectories of files and folders, in the order in which they are named.

    Attributes:
        paths: what to read.
        format: of all of them; empty: told by each one's name and beginning.
        report: collects what could not be carried.

    Raises:
        OptionError: the format is none that can be read.
    """

    paths: tuple[Path, ...]
    format: str = ""
    report: Report = field(default_factory=Report)

    def __post_init__(self) -> None:
        if self.format:
            reader_of(self.format)

    @property
    def identity(self) -> str:
        """A hash of the files' names, sizes and times."""
        digest = hashlib.sha256(self.format.encode())
        for path in self.paths:
            inner = sorted(path.rglob("*")) if path.is_dir() else [path]
            for one in inner:
                info = one.stat()
                digest.update(f"{one}\0{info.st_size}\0{info.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def records(self, after: str = "") -> Iterator[tuple[Record, str]]:
        """Trajectories; what was read before a place is read again and passed over."""
        passed = int(after) if after else 0
        for number, record in enumerate(self._read(self.report if not passed else Report()), 1):
            if number > passed:
                yield record, str(number)

    def headers(self) -> Iterator[pb.Trajectory]:
        """The descriptions of all trajectories."""
        return (record.trajectory for record in self._read(Report()))

    def _read(self, report: Report) -> Iterator[Record]:
        for path in self.paths:
            yield from read(path, format=self.format, report=report)


@dataclass(frozen=True, slots=True)
class RecordSource(_Fixed):
    """Trajectories in memory."""

    found: tuple[Record, ...]

    @classmethod
    def of(cls, records: Iterable[Record]) -> RecordSource:
        """A source of these."""
        return cls(tuple(records))

    @property
    def identity(self) -> str:
        """A hash of what they say."""
        digest = hashlib.sha256()
        for record in self.found:
            digest.update(hash_of(record).encode())
        return digest.hexdigest()

    def records(self, after: str = "") -> Iterator[tuple[Record, str]]:
        """Trajectories after a place."""
        for number in range(int(after) if after else 0, len(self.found)):
            yield self.found[number], str(number + 1)

    def headers(self) -> Iterator[pb.Trajectory]:
        """Their descriptions."""
        return (record.trajectory for record in self.found)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Some of the trajectories of a source, in its order, as they were when they were chosen."""

    source: Source
    kept: Mapping[str, str]
    """The hash of each (see `hash_of`), by id."""

    @property
    def identity(self) -> str:
        """That of the source and of the choice."""
        digest = hashlib.sha256(self.source.identity.encode())
        digest.update("".join(f"{name} {kept}\n" for name, kept in sorted(self.kept.items())).encode())
        return digest.hexdigest()

    @property
    def as_of(self) -> str:
        """That of the source."""
        return self.source.as_of

    def at(self, as_of: str) -> Chosen:
        """The same choice as of another moment."""
        return Chosen(self.source.at(as_of), self.kept)

    def records(self, after: str = "") -> Iterator[tuple[Record, str]]:
        """Those that were chosen.

        Raises:
            DataError: one of them says something else than when it was chosen, or is not there any more.
        """
        missing = set(self.kept)
        for record, place in self.source.records(after):
            if record.id not in self.kept:
                continue
            if hash_of(record) != self.kept[record.id]:
                raise DataError(f"the trajectory {record.id!r} has changed since it was chosen", fix=_AGAIN)
            missing.discard(record.id)
            yield record, place
        # What was read before a place was looked at then.
        if missing and not after:
            raise DataError(f"the trajectory {min(missing)!r} was chosen, and is not there any more", fix=_AGAIN)

    def headers(self) -> Iterator[pb.Trajectory]:
        """The descriptions of those that were chosen."""
        return (header for header in self.source.headers() if header.trajectory_id in self.kept)


def hash_of(record: Record) -> str:
    """SHA-256 over all that a trajectory says; bodies by their own hashes."""
    digest = hashlib.sha256(record.trajectory.SerializeToString(deterministic=True))
    for message in (*record.steps, *record.values):
        data = message.SerializeToString(deterministic=True)
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
