"""Rows of a trainer's format, and what was left out of them."""

from __future__ import annotations

from typing import Any

from orchard.data import Record, Report, codec
from orchard.data.codecs.base import rows_of
from orchard.data.options import ExportOptions
from orchard.data.training.groups import Group
from orchard.trajectory.v1 import trajectory_pb2 as pb

from tests.unit.data.making import record


def rows(name: str, *units: Record | Group, **options: Any) -> tuple[list[dict[str, Any]], Report]:
    report = Report()
    made = []
    for unit in units:
        for row in rows_of(codec(name), unit, ExportOptions(**options), report):
            made.append(dict(row.value))
            report.rows += 1
    return made, report


def reasons(report: Report) -> list[str]:
    return [loss.why for loss in report.losses if loss.what == "record"]


def group(*members: Record, number: int = 0, first: int = 0) -> Group:
    return Group("g", number, first, members)


def excluded(name: str) -> Record:
    made = record(name, score=None, tokens=True)
    made.trajectory.outcome.CopyFrom(pb.Reward(name="outcome", state=pb.REWARD_STATE_EXCLUDED, reason="sandbox lost"))
    return made
