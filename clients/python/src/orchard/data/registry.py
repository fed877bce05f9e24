"""The one list of formats."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from orchard.data.codecs.base import Codec, Container
from orchard.data.errors import DataError, MissingExtraError, Where
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
        raise DataError(f"there is no format {name!r}", fix=f"use one of {', '.join(codecs())}")
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
        raise DataError("is not there", where=Where(str(path)), fix="check the path")
    for one in readable():
        named = any(fnmatch.fnmatch(path.name, pattern) for pattern in one.patterns)
        if (named or (not one.patterns and path.is_dir())) and (one.sniff is None or _sniffs(one, path)):
            return one
    names = ", ".join(one.name for one in readable())
    raise DataError(
        "is of no format that is known", where=Where(str(path)), fix=f"name it with format (--from): {names}"
    )


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
    fix = f"use one of {', '.join(one.name for one in readable())}"
    if format and format not in codecs():
        raise DataError(f"there is no format {format!r}", fix=fix)
    one = codecs()[format] if format else detect(path)
    if one.read is None:
        raise DataError(f"the format {one.name!r} can be written, not read", fix=fix)
    if not path.exists():
        raise DataError("is not there", where=Where(str(path)), fix="check the path")
    return one.read(path, report or Report())


def container_of(one: Codec, output: Path) -> Container:
    """What an output is written into, by its name.

    Raises:
        DataError: the format cannot be written, or not into this.
    """
    if not one.writes:
        fix = f"use one of {', '.join(codec.name for codec in writable())}"
        raise DataError(f"the format {one.name!r} can be read, not written", fix=fix)
    suffix = output.suffix
    found = next((container for container in one.containers if container.value and container.value == suffix), None)
    if found is None and Container.FOLDER in one.containers and not suffix:
        found = Container.FOLDER
    if found is None:
        ends = ", ".join(f"*{container.value}" if container.value else "a folder" for container in one.containers)
        raise DataError(f"{one.name} is not written into {output.name!r}", fix=f"write {ends}")
    return found
