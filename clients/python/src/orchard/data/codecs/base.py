"""What a codec is: a named format, what it can carry, and how trajectories come out of it or go into it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchard.data.errors import NoExampleError
from orchard.data.options import ExportOptions
from orchard.data.record import Record
from orchard.data.report import Report
from orchard.data.training.groups import Group

if TYPE_CHECKING:
    import pyarrow as pa


class Carries(enum.StrEnum):
    """What a format has a place for."""

    TOOLS = "tools"
    TOOL_CALLS = "tool calls"
    REASONING = "reasoning"
    IMAGES = "images"
    TOKENS = "tokens"
    LOGPROBS = "log-probs"
    REWARDS = "rewards"
    VALUES = "values"
    TIMES = "times"
    COSTS = "costs"
    BRANCHES = "branches"
    METADATA = "metadata"
    SUBMISSION = "submission"
    LOSS = "loss"
    ADVANTAGES = "advantages"


class Container(enum.StrEnum):
    """What rows are written into, by the end of the output's name."""

    JSONL = ".jsonl"
    PARQUET = ".parquet"
    JSON = ".json"
    FOLDER = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of an export.

    Attributes:
        value: what is written: plain values, no bytes.
        name: of its file, where each row is a file.
        files: bodies that it refers to, by path beside the output.
    """

    value: Mapping[str, Any]
    name: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)


Reader = Callable[[Path, Report], Iterator[Record]]
Rows = Callable[[Record, ExportOptions, Report], Iterator[Row]]
GroupRows = Callable[[Group, ExportOptions, Report], Iterator[Row]]


@dataclass(frozen=True, slots=True)
class Codec:
    """A format.

    Attributes:
        name: as it is asked for.
        summary: what it is, in a line.
        carries: what it has a place for.
        lossless: whether what it carries comes back as it was: written and read, or read and written.
        patterns: names of files that are of this format.
        sniff: whether a file with such a name is; None: the name says it.
        fits: whether the value of a line is of this format, where it is one of lines.
        read: the trajectories of a file or folder, one after another.
        rows: the rows of a trajectory, apart from all others.
        group_rows: the rows of a group.
        containers: what it can be written into, the usual one first.
        schema: its columns; needed for Parquet.
    """

    name: str
    summary: str
    carries: frozenset[Carries]
    lossless: bool = False
    patterns: tuple[str, ...] = ()
    sniff: Callable[[Path], bool] | None = None
    fits: Callable[[Any], bool] | None = None
    read: Reader | None = None
    rows: Rows | None = None
    group_rows: GroupRows | None = None
    containers: tuple[Container, ...] = ()
    schema: Callable[[], pa.Schema] | None = None

    @property
    def writes(self) -> bool:
        """Whether it can be exported."""
        return self.rows is not None or self.group_rows is not None


def rows_of(codec: Codec, unit: Record | Group, options: ExportOptions, report: Report) -> list[Row]:
    """All rows of a trajectory or a group; none, with the reason in the report, where it gives none."""
    name = unit.id if isinstance(unit, Record) else unit.key
    try:
        if isinstance(unit, Group):
            return list(codec.group_rows(unit, options, report)) if codec.group_rows else []
        return list(codec.rows(unit, options, report)) if codec.rows else []
    except NoExampleError as error:
        report.left_out(name, str(error))
        return []


EVERYTHING: Final = frozenset(Carries) - {Carries.LOSS, Carries.ADVANTAGES}
