"""The one list of formats."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from orchard.data.codecs.base import Codec, Container, Reader
from orchard.data.errors import DataError, MissingExtraError, OptionError, Where
from orchard.data.nodes import kind_of, read_document, read_lines
from orchard.data.record import Record
from orchard.data.report import Report


@cache
def codecs() -> Mapping[str, Codec]:
    """All formats by name."""
    from orchard.data.codecs import (
        atif,
        groups,
        mini_swe_agent,
        native,
        openai,
        openhands,
        public,
        sft,
        swebench,
        trainers,
        value,
    )

    found = (
        native.CODEC,
        atif.CODEC,
        public.SWE,
        public.GUI,
        openai.CODEC,
        mini_swe_agent.CODEC,
        openhands.CODEC,
        swebench.CODEC,
        sft.SFT,
        sft.TURNS,
        sft.RISES,
        sft.TRL,
        sft.TRL_TOKENS,
        groups.GRPO,
        groups.PREFERENCE,
        value.CODEC,
        trainers.SLIME,
        trainers.VERL,
        trainers.PRIME_RL,
    )
    return {codec.name: codec for codec in found}


def codec(name: str) -> Codec:
    """A format by its name.

    Raises:
        DataError: there is none of this name.
    """
    found = codecs().get(name)
    if found is None:
        raise OptionError(f"there is no format {name!r}", fix=f"use one of {', '.join(codecs())}")
    return found


def readable() -> Iterator[Codec]:
    """Formats that can be imported."""
    return (one for one in codecs().values() if one.read is not None)


def writable() -> Iterator[Codec]:
    """Formats that can be exported."""
    return (one for one in codecs().values() if one.writes)


def detect(path: Path) -> Codec:
    """The format of a file or folder, by its name and its beginning.

    Raises:
        DataError: it is none that can be read, or it is not there.
    """
    if not path.exists():
        raise OptionError("is not there", where=Where(str(path)), fix="check the path")
    for one in readable():
        if path.is_dir():
            fitting = not one.patterns or Container.FOLDER in one.containers
        else:
            fitting = any(fnmatch.fnmatch(path.name, pattern) for pattern in one.patterns)
        if fitting and (one.sniff is None or _sniffs(one, path)):
            return one
    raise _unknown(path)


def _unknown(path: Path) -> DataError:
    """What is wrong with a file or folder that is of no format."""
    where, more = Where(str(path)), ""
    if path.is_file() and path.suffix in {".json", ".jsonl"}:
        try:
            first = next(read_lines(path), None) if path.suffix == ".jsonl" else read_document(path)
        except DataError as error:
            return DataError("is empty", where=where) if not path.stat().st_size else error
        if first is None:
            return DataError("is empty, but for empty lines" if path.stat().st_size else "is empty", where=where)
        where, more = first.where, f"is {kind_of(first.value)}, and "
        if isinstance(first.value, dict):
            more = f"has the fields {', '.join(map(repr, list(first.value)[:8])) or '(none)'}, and "
    names = ", ".join(one.name for one in readable())
    return DataError(f"{more}is of no format that is known", where=where, fix=f"name it with format (--from): {names}")


def _sniffs(one: Codec, path: Path) -> bool:
    try:
        return one.sniff is None or one.sniff(path)
    except MissingExtraError:
        raise
    except (DataError, OSError):
        return False


def read(path: Path, *, format: str = "", report: Report | None = None) -> Iterator[Record]:  # noqa: A002
    """Trajectories of a file or folder, one after another.

    Args:
        path: what to read.
        format: its format; empty: the one that its name and beginning tell.
        report: collects what could not be carried.

    Raises:
        DataError: something in it is wrong; the error names file, line and field.
    """
    one, reader = reader_of(format) if format else reader_of(detect(path).name)
    if not path.exists():
        raise OptionError("is not there", where=Where(str(path)), fix="check the path")
    return _reading(one, reader, path, report or Report())


def reader_of(name: str) -> tuple[Codec, Reader]:
    """A format that can be read, and what reads it.

    Raises:
        OptionError: there is none of this name, or it can only be written.
    """
    fix = f"use one of {', '.join(one.name for one in readable())}"
    if name not in codecs():
        raise OptionError(f"there is no format {name!r}", fix=fix)
    one = codecs()[name]
    if one.read is None:
        raise OptionError(f"the format {name!r} can be written, not read", fix=fix)
    return one, one.read


def _reading(one: Codec, reader: Reader, path: Path, report: Report) -> Iterator[Record]:
    try:
        for record in reader(path, report):
            yield record if record.where.file else replace(record, where=Where(str(path)))
    except DataError as error:
        other = _other_format(one, path, error.where)
        if other is None:
            raise
        raise DataError(
            f"is of the format {other!r}, where the lines before are of {one.name!r}",
            where=error.where.whole,
            fix="give each format a file of its own",
        ) from error


def _other_format(one: Codec, path: Path, where: Where) -> str | None:
    """The format of a line that is none of its file's; None: of no other either."""
    if where.line <= 1 or where.file != str(path) or path.suffix != ".jsonl" or one.fits is None:
        return None
    value = next((line.value for line in read_lines(path) if line.where.line == where.line), None)
    if one.fits(value):
        return None
    return next((other.name for other in readable() if other.fits is not None and other.fits(value)), None)


def container_of(one: Codec, output: Path) -> Container:
    """What an output is written into, by its name.

    Raises:
        DataError: the format cannot be written, or not into this.
    """
    if not one.writes:
        fix = f"use one of {', '.join(codec.name for codec in writable())}"
        raise OptionError(f"the format {one.name!r} can be read, not written", fix=fix)
    suffix = output.suffix
    found = next((container for container in one.containers if container.value and container.value == suffix), None)
    if found is None and Container.FOLDER in one.containers and not suffix:
        found = Container.FOLDER
    if found is None:
        ends = ", ".join(f"*{container.value}" if container.value else "a folder" for container in one.containers)
        raise OptionError(f"{one.name} is not written into {output.name!r}", fix=f"write {ends}")
    return found
