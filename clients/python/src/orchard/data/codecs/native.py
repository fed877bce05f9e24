"""The format of this project: a trajectory a line, in protobuf's JSON, and bodies beside it. It loses nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from orchard.data.bodies import FolderBodies, extension
from orchard.data.codecs.base import EVERYTHING, Codec, Container, Row
from orchard.data.nodes import read_lines
from orchard.data.options import ExportOptions
from orchard.data.protos import from_plain, to_plain, trajectory_of
from orchard.data.record import Record, body_of, valid_id
from orchard.data.report import Report
from orchard.trajectory.v1 import trajectory_pb2 as pb

_VERSION: Final = "orchard-trajectory-1"


def read(path: Path, report: Report) -> Iterator[Record]:
    """Trajectories of a file; their bodies are read when they are asked for."""
    del report  # nothing is lost
    for line in read_lines(path):
        version = line.need("format")
        if version.text() != _VERSION:
            version.fail(f"is {version.text()!r}", f"this version reads {_VERSION!r}")
        folder = line.text_of("files", "files")
        if Path(folder).name != folder:
            line.need("files").fail(f"is {folder!r}", "it must be the name of a folder beside the file")
        bodies = FolderBodies(path.parent / folder)
        trajectory = trajectory_of(line.need("trajectory"))
        if valid_id(trajectory.trajectory_id) != trajectory.trajectory_id:
            fix = "use 1 to 128 of A-Z, a-z, 0-9, '-', '_', '.', beginning with a letter or digit"
            line.need("trajectory").need("trajectory_id").fail(f"is {trajectory.trajectory_id!r}", fix)
        steps = [from_plain(step, pb.Step()) for step in line.items_of("steps")]
        for position, step in enumerate(steps):
            if step.index != position:
                line.need("steps").fail(f"has index {step.index} at position {position}", "steps have no holes")
        values = [from_plain(value, pb.StepValue()) for value in line.items_of("values")]
        yield Record(trajectory, steps, values, bodies, line.where)


def rows(record: Record, options: ExportOptions, report: Report) -> Iterator[Row]:
    """One row."""
    del report
    value: dict[str, Any] = {"format": _VERSION, "files": options.files, "trajectory": to_plain(record.trajectory)}
    value["steps"] = [to_plain(step) for step in record.steps]
    value["values"] = [to_plain(one) for one in record.values]
    yield Row(value, record.id, files_of(record, options))


def files_of(record: Record, options: ExportOptions) -> Mapping[str, bytes]:
    """The bodies of a record by their path."""
    blobs = [part.blob for step in record.steps for part in step.content if part.HasField("blob")]
    return {
        f"{options.files}/{blob.sha256}{extension(blob.media_type)}": body_of(blob, record.bodies) for blob in blobs
    }


def sniff(path: Path) -> bool:
    """Whether the first line says so."""
    with path.open("rb") as file:
        line = file.readline(1 << 20)
    return b'"format"' in line[:200] and _VERSION.encode() in line[:200]


def fits(value: Any) -> bool:
    """Whether the value of a line says so."""
    return isinstance(value, dict) and value.get("format") == _VERSION


CODEC: Final = Codec(
    name="orchard",
    summary="This project's own: a trajectory a line, bodies in a folder beside it. Loses nothing.",
    carries=EVERYTHING,
    lossless=True,
    patterns=("*.jsonl",),
    sniff=sniff,
    fits=fits,
    read=read,
    rows=rows,
    containers=(Container.JSONL,),
)
