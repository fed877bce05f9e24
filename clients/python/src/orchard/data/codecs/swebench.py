"""Predictions as the SWE-bench harness reads them: lines, an array, or an object by instance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from orchard.data.codecs.base import Carries, Codec, Container, Row
from orchard.data.nodes import Node, compact, parse_object, read_document, read_lines
from orchard.data.options import ExportOptions
from orchard.data.record import SUBMISSION, Record, submission_of, valid_id
from orchard.data.report import Report
from orchard.trajectory.v1 import trajectory_pb2 as pb

_KNOWN: Final = frozenset({"instance_id", "model_name_or_path", "model_patch"})


def predictions(path: Path) -> Iterator[Node]:
    """Each prediction of a file."""
    if path.suffix == ".jsonl":
        yield from read_lines(path)
        return
    document = read_document(path)
    if isinstance(document.value, dict):
        for key in document.value:
            yield document.need(key)
    else:
        yield from document.array()


def read(path: Path, report: Report) -> Iterator[Record]:
    """A trajectory of each prediction: of it only what was handed in is known."""
    for prediction in predictions(path):
        instance = prediction.need("instance_id").text()
        trajectory = pb.Trajectory(
            status=pb.TRAJECTORY_STATUS_COMPLETED, model=prediction.text_of("model_name_or_path")
        )
        trajectory.trajectory_id = valid_id("-".join(filter(None, (trajectory.model, instance))).replace("/", "-"))
        trajectory.task.instance_id = instance
        if others := prediction.others(_KNOWN):
            trajectory.metadata_json = compact({"swebench": others})
        steps = []
        if "model_patch" not in prediction.object():
            prediction.need("model_patch")
        if patch := prediction.get("model_patch"):
            steps.append(submission_step(0, patch.text()))
        else:
            report.lost("model_patch", "it is null: nothing was handed in", prediction.where)
        report.records += 1
        yield Record(trajectory, steps, where=prediction.where.whole)


def submission_step(index: int, text: str) -> pb.Step:
    """The step of what an agent handed in."""
    return pb.Step(index=index, role=pb.ROLE_TOOL, name=SUBMISSION, content=[pb.Part(text=text)])


def rows(record: Record, options: ExportOptions, report: Report) -> Iterator[Row]:
    """One row, of what was handed in."""
    del options
    trajectory = record.trajectory
    if not trajectory.task.instance_id:
        report.left_out(record.id, "it names no instance")
        return
    patch = submission_of(record)
    if patch is None:
        report.lost("model_patch", "nothing was handed in: null is written", record.id)
    value = {
        "instance_id": trajectory.task.instance_id,
        "model_name_or_path": trajectory.model or trajectory.harness or "unknown",
        "model_patch": patch,
    }
    yield Row(value | parse_object(trajectory.metadata_json).get("swebench", {}), record.id)
    if any(step.name != SUBMISSION for step in record.steps):
        report.lost("steps", "predictions hold what was handed in and no more", record.id)


def sniff(path: Path) -> bool:
    """Whether the first prediction is one."""
    first = next(predictions(path), None)
    return first is not None and fits(first.value)


def fits(value: Any) -> bool:
    """Whether a value is a prediction."""
    return isinstance(value, dict) and {"instance_id", "model_patch"} <= set(value)


CODEC: Final = Codec(
    name="swebench",
    summary="SWE-bench predictions: instance, model and patch.",
    carries=frozenset({Carries.SUBMISSION}),
    lossless=True,
    patterns=("*.jsonl", "*.json"),
    sniff=sniff,
    fits=fits,
    read=read,
    rows=rows,
    containers=(Container.JSONL, Container.JSON),
)
