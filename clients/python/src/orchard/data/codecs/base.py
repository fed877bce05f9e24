"""What a codec is: a named format, what it can carry, and how trajectories come out of it or go into it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchard.data.errors import DataError, NoExampleError
from orchard.data.record import Record
from orchard.data.report import Report

if TYPE_CHECKING:
    import pyarrow as pa

    from orchard.data.counting import TokenCounter


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


LOSSES: Final = ("resolved", "rises", "all")
TRUNCATIONS: Final = ("drop", "left")
RECIPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "swe": {"advantage": "grpo", "needs_positive": True},
    "gui": {
        "advantage": "grpo",
        "needs_positive": False,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "length_normalisation": False,
        "step_budgets": [15, 30],
    },
    "claw": {
        "advantage": "grpo",
        "needs_positive": False,
        "group_size": 8,
        "step_limit": None,
        "wall_clock_seconds": 600,
    },
}
"""Settings of the paper's trainings; they are the trainer's to apply, and stated beside its data."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How an export is made.

    Attributes:
        loss: which actions have loss: "resolved" those of successes and of what nothing judged, "rises" those of
            successes and, of failures, those that raised the value, "all" every one, whatever the outcome.
        reward: name of the reward that groups are trained on; whether an attempt is a success goes by its outcome.
        max_tokens: longest example, in tokens; None: any.
        truncate: what happens to a longer one: "drop" leaves it out, "left" cuts messages off its beginning.
        counter: counts tokens where a trajectory does not know them; None: the stated estimate.
        recipe: whose training settings are stated in rows of groups: "swe", "gui" or "claw".
        environment: name that trainers show, where they have a place for one.
        files: folder beside the output for bodies.

    Raises:
        DataError: an option has no such value.
    """

    loss: str = "resolved"
    reward: str = "outcome"
    max_tokens: int | None = None
    truncate: str = "drop"
    counter: TokenCounter | None = None
    recipe: str = "swe"
    environment: str = "orchard"
    files: str = "files"

    def __post_init__(self) -> None:
        known = {"loss": LOSSES, "truncate": TRUNCATIONS, "recipe": tuple(RECIPES)}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise DataError(f"{name} is {getattr(self, name)!r}", fix=f"use one of {', '.join(values)}")


@dataclass(frozen=True, slots=True)
class Group:
    """Attempts at one prompt, in their order.

    Attributes:
        key: their group, or dataset and instance where they have none.
        number: of the group in this export, from 0.
        first: members of the groups before it.
        members: the attempts.
    """

    key: str
    number: int
    first: int
    members: Sequence[Record]


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
