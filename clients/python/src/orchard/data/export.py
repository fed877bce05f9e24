"""Exports that survive being broken off: whole rows in a partial file, a cursor beside it, one rename at the end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from orchard.data.codecs.base import Codec, Container, Row, rows_of
from orchard.data.errors import DataError, OptionError, Where
from orchard.data.holding import Holding
from orchard.data.nodes import compact
from orchard.data.options import ExportOptions
from orchard.data.record import Record, valid_id
from orchard.data.registry import container_of
from orchard.data.report import Loss, Report
from orchard.data.sources import Source
from orchard.data.training.groups import Group, grouped

_CHECKPOINT_UNITS: Final = 500
_CHECKPOINT_BYTES: Final = 64 << 20
"""How much work is done again at most where an export is broken off."""

Progress = Callable[[int, int], None]
"""Called with trajectories done and rows written."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A finished export.

    Attributes:
        output: where it is.
        records: trajectories (or groups) that were read.
        rows: that were written.
        losses: what could not be carried and what was left out.
        sha256: of the file; of a folder, over the names and hashes of its files.
        resumed: how many trajectories (or groups) had been done before.
    """

    output: Path
    records: int
    rows: int
    losses: tuple[Loss, ...]
    sha256: str
    resumed: int


def export(  # noqa: PLR0917 (all but the first three are options)
    source: Source,
    codec: Codec,
    output: Path,
    options: ExportOptions | None = None,
    overwrite: bool = False,
    restart: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write the trajectories of a source in a format.

    The output appears under its name when it is whole. Until then `NAME.partial` has only whole rows, and
    `NAME.cursor` says how far it has come; the same call goes on from there.

    Args:
        source: what to write.
        codec: the format.
        output: a file, or a folder, as the format allows. The folder that it is in is made.
        options: how.
        overwrite: replace an output that is there; never a folder with files in it.
        restart: begin again where an earlier export was broken off.
        progress: called as it goes on.

    Raises:
        OptionError: the format is not written into such a file, the output is there, or an export that was broken off
            was another.
        DataError: an export to the same place is at work, or what is exported is not whole.
    """
    container = check_output(codec, output, overwrite=overwrite)
    given = options or ExportOptions()
    chosen = _with_files(given, container, output)
    with contextlib.closing(_Job(source, codec, container, output, chosen)) as job:
        job.prepare(restart=restart)
        job.run(progress)
        if not overwrite:
            _check_missing(output)
        return job.finish()


def check_output(codec: Codec, output: Path, *, overwrite: bool) -> Container:
    """What an output is written into.

    Raises:
        OptionError: the format is not written into such a file, or it is there.
    """
    container = container_of(codec, output)
    if not overwrite:
        _check_missing(output)
    if output.is_dir() and any(output.iterdir()):
        why = "is a folder with files in it, which may be more than an export"
        raise OptionError(why, where=Where(str(output)), fix="remove it, or choose another name")
    return container


def _check_missing(output: Path) -> None:
    if output.exists():
        fix = "choose another name, or replace it with overwrite (--overwrite)"
        raise OptionError("is there already", where=Where(str(output)), fix=fix)


def _with_files(options: ExportOptions, container: Container, output: Path) -> ExportOptions:
    return replace(options, files="files" if container is Container.FOLDER else f"{output.stem}.files")


class _Job:
    """One export."""

    def __init__(
        self, source: Source, codec: Codec, container: Container, output: Path, options: ExportOptions
    ) -> None:
        self.source = source
        self.codec = codec
        self.container = container
        self.output = output
        self.options = options
        self.partial = output.with_name(output.name + ".partial")
        self.cursor = output.with_name(output.name + ".cursor")
        self.report = Report()
        self.job = self._job()
        self.place = ""
        self.size = 0
        self.resumed = 0
        self._holding = Holding()

    def close(self) -> None:
        """Let others at its files."""
        self._holding.close()

    # Going on from where it was broken off.

    def prepare(self, *, restart: bool) -> None:
        """Take up a broken-off export, or begin."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._take()
        state = None if restart else self._state()
        # Of one that came to nothing, such as by a mistake in its input, there is nothing to lose or to mix.
        if state is None or (state["job"] != self.job and not state["records"]):
            self._empty()
            self._save()
            return
        if state["job"] != self.job:
            raise OptionError(
                "an export of other trajectories, or in another way, was broken off here",
                where=Where(str(self.cursor)),
                fix="repeat it as it was, or begin again with restart (--restart)",
            )
        self.source = self.source.at(state["as_of"])
        self.place, self.size = state["place"], state["size"]
        self.report.restore(state["records"], state["rows"], [Loss(**loss) for loss in state["losses"]])
        self.resumed = self.report.records
        if self.container is not Container.FOLDER:
            os.truncate(self.partial, self.size)

    def _take(self) -> None:
        """Hold what is written into: nobody else's rows are to come between ours, nor are they to be cut off."""
        while True:
            if self.container is Container.FOLDER:
                self.partial.mkdir(exist_ok=True)
            else:
                self.partial.touch()
            # Not there: whoever had it has just finished.
            with contextlib.suppress(FileNotFoundError):
                self._holding.take(self.partial)
                return

    def _state(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.cursor.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) and self._has(found["size"]) else None

    def _has(self, size: int) -> bool:
        """Whether what was written before is there: who removes it need not know of the cursor."""
        if self.container is Container.FOLDER:
            return not size or any(self.partial.iterdir())
        return self.partial.stat().st_size >= size

    def _empty(self) -> None:
        # Not the file or folder itself: another would be nobody's for a moment.
        self.cursor.unlink(missing_ok=True)
        if self.container is not Container.FOLDER:
            os.truncate(self.partial, 0)
            return
        for path in self.partial.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _job(self) -> str:
        """A hash of all that decides what the rows are."""
        options = asdict(replace(self.options, counter=None))
        options["counter"] = getattr(self.options.counter, "name", "")
        text = compact([self.codec.name, self.container.value, options, self.source.identity])
        return hashlib.sha256(text.encode()).hexdigest()

    def _save(self) -> None:
        state = {
            "job": self.job,
            "as_of": self.source.as_of,
            "place": self.place,
            "size": self.size,
            "records": self.report.records,
            "rows": self.report.rows,
            "losses": [asdict(loss) for loss in self.report.losses],
        }
        write_whole(self.cursor, json.dumps(state).encode())

    # Writing.

    def run(self, progress: Progress | None) -> None:
        """Write what is left."""
        if self.container is Container.FOLDER:
            self._run(_FolderSink(self.partial), progress)
        else:
            with self.partial.open("ab") as file:
                self._run(_LineSink(file, self.output.parent), progress)

    def _run(self, sink: _LineSink | _FolderSink, progress: Progress | None) -> None:
        since_units, since_bytes = 0, self.size
        for unit, place in self._units():
            for row in rows_of(self.codec, unit, self.options, self.report):
                self.size += sink.write(row)
                self.report.rows += 1
            self.report.records += 1
            self.place = place
            since_units += 1
            if since_units >= _CHECKPOINT_UNITS or self.size - since_bytes >= _CHECKPOINT_BYTES:
                sink.flush()
                self._save()
                since_units, since_bytes = 0, self.size
            if progress is not None:
                progress(self.report.records, self.report.rows)
        sink.flush()
        self._save()

    def _units(self) -> Iterator[tuple[Record | Group, str]]:
        if self.codec.rows is not None:
            yield from self.source.records(self.place)
            return
        # Groups are made anew from the beginning; those that were written are passed over.
        records = (record for record, _ in self.source.records())
        first = not self.resumed
        for group in grouped(self.source.headers(), records, self._alone if first else None, self._torn):
            if group.number >= self.resumed:
                yield group, ""

    def _alone(self, record: Record) -> None:
        self.report.left_out(record.id, "it names neither a group nor an instance")

    def _torn(self, key: str) -> None:
        self.report.left_out(key, "not all of its attempts came: some were added or deleted while they were read")

    def finish(self) -> Exported:
        """Give the output its name."""
        made = self.partial
        if self.container is Container.PARQUET:
            made = self.output.with_name(self.output.name + ".tmp")
            from orchard.data.parquet import write_parquet

            assert self.codec.schema is not None  # noqa: S101 (a codec that is written into Parquet has one)
            write_parquet(self.partial, made, self.codec.schema())
        elif self.container is Container.JSON:
            made = self.output.with_name(self.output.name + ".tmp")
            _write_array(self.partial, made)
        if self.output.is_dir():
            shutil.rmtree(self.output)
        # From the moment that what we hold is not there any more, another export may have its own at these places.
        self.cursor.unlink(missing_ok=True)
        made.replace(self.output)
        _sync_folder(self.output.parent)
        if made is not self.partial:
            self.partial.unlink()
        report = self.report
        digest = hash_of_path(self.output)
        return Exported(self.output, report.records, report.rows, report.losses, digest, self.resumed)


class _LineSink:
    """Rows as lines; their files beside the output."""

    def __init__(self, file: BinaryIO, folder: Path) -> None:
        self._file = file
        self._folder = folder

    def write(self, row: Row) -> int:
        """Write a row; returns its bytes."""
        _write_files(self._folder, row.files)
        return self._file.write(compact(row.value).encode() + b"\n")

    def flush(self) -> None:
        """What was written is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())


class _FolderSink:
    """A file for each row."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, row: Row) -> int:
        """Write a row; returns its bytes."""
        _write_files(self._folder, row.files)
        data = json.dumps(row.value, ensure_ascii=False, indent=1, allow_nan=False).encode() + b"\n"
        path = self._folder / f"{valid_id(row.name)}.json"
        if path.exists() and path.read_bytes() != data:
            raise DataError("two trajectories have this id", where=Where(str(path)), fix="export one of them")
        write_whole(path, data)
        return len(data)

    def flush(self) -> None:
        """The folder's names are on the disk; so is each file."""
        _sync_folder(self._folder)


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_whole(path, data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole, or not at all."""
    made = path.with_name(path.name + ".tmp")
    with made.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    made.replace(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_array(lines: Path, output: Path) -> None:
    """Lines of JSON as one array."""
    with lines.open("rb") as file, output.open("wb") as made:
        made.write(b"[")
        for number, line in enumerate(file):
            made.write((b",\n" if number else b"\n") + line.rstrip(b"\n"))
        made.write(b"\n]\n")
        made.flush()
        os.fsync(made.fileno())


def hash_of_path(path: Path) -> str:
    """SHA-256 of a file; of a folder, over the names and hashes of its files."""
    if not path.is_dir():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files: Iterable[Path] = sorted(one for one in path.rglob("*") if one.is_file())
    lines = [f"{hash_of_path(one)}  {one.relative_to(path).as_posix()}\n" for one in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
