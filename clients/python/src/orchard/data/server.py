"""Trajectories of a platform: read for exports and curation, and stored from files."""

from __future__ import annotations

import datetime as dt
import enum
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from orchard._client.errors import NotFound, TrajectoryNotFound, TrajectorySealed, WriterConflict
from orchard.data.nodes import compact
from orchard.data.record import Record, blob_of, body_of
from orchard.data.sources import hash_of
from orchard.trajectory.v1 import trajectory_pb2 as pb

if TYPE_CHECKING:
    from orchard import SandboxClient, Trajectory

_APPEND_STEPS: Final = 500
_WRITER: Final = "import"
"""Of every import: one that broke off is gone on with, and a recording is nobody's but its own."""
_TEXT_BYTES: Final = 64 << 10
"""Larger texts are stored apart."""
_ANNOTATE_VALUES: Final = 10_000
_STATUSES: Final = {
    pb.TRAJECTORY_STATUS_COMPLETED: "completed",
    pb.TRAJECTORY_STATUS_FAILED: "failed",
    pb.TRAJECTORY_STATUS_ABORTED: "aborted",
}


class ServerBodies(Mapping[str, bytes]):
    """Bodies that a platform keeps, fetched when they are asked for."""

    def __init__(self, client: SandboxClient) -> None:
        self._client = client

    def __getitem__(self, sha256: str) -> bytes:
        try:
            return self._client.trajectories.bodies.get(sha256)
        except NotFound:
            raise KeyError(sha256) from None

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat()


@dataclass(frozen=True, slots=True)
class ServerSource:
    """Trajectories of a platform by filter, as of a moment, so that what is added meanwhile changes nothing.

    Attributes:
        client: of the platform.
        filters: which ones; see orchard.TrajectoryFilter.
        as_of: those that were created before this; ISO 8601.
    """

    client: SandboxClient
    filters: Mapping[str, Any]
    as_of: str = field(default_factory=_now)

    @property
    def identity(self) -> str:
        """A hash of the filters."""
        return hashlib.sha256(compact({"filters": _plain(self.filters)}).encode()).hexdigest()

    def at(self, as_of: str) -> ServerSource:
        """The same as of another moment."""
        return replace(self, as_of=as_of)

    def records(self, after: str = "") -> Iterator[tuple[Record, str]]:
        """Trajectories after a place: the token of the export."""
        bodies = ServerBodies(self.client)
        for one in self.client.trajectories.export(resume_token=after, **self._filters()):
            yield Record(one.message, one.step_messages, one.value_messages, bodies), one.resume_token

    def headers(self) -> Iterator[pb.Trajectory]:
        """The descriptions of all trajectories."""
        found = self.client.trajectories.export(metadata_only=True, **self._filters())
        return (one.message for one in found)

    def _filters(self) -> dict[str, Any]:
        before = dt.datetime.fromisoformat(self.as_of)
        given = self.filters.get("created_before")
        return {**self.filters, "created_before": min(before, given) if given else before}


def _plain(value: Any) -> Any:
    """Filters as JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dt.datetime):
        return value.isoformat()
    return value.value if isinstance(value, enum.Enum) else value


@dataclass(frozen=True, slots=True)
class Stored:
    """What storing a trajectory did.

    Attributes:
        id: its id.
        steps: how many steps it has.
        new: whether it was not there, whole, before.
    """

    id: str
    steps: int
    new: bool


def store(client: SandboxClient, record: Record, *, take_over: bool = False) -> Stored:
    """Store a trajectory with its bodies, rewards and values. A repeat stores nothing twice and goes on where it was.

    One that is open stays open; every other is sealed as it ended.

    Args:
        client: of the platform.
        record: the trajectory.
        take_over: write also where the platform has it open and somebody else is writing it, who is driven out.

    Raises:
        AlreadyExists: another trajectory has its id.
        WriterConflict: the platform has it open, and no import began it.
        InvalidArgument: a value breaks a rule of the platform.
    """
    from orchard._client.trajectories import convert

    trajectory = record.trajectory
    new = True
    try:
        writing = _open(client, record, take_over)
    except TrajectorySealed:
        new = False
    else:
        for start in range(writing.next_index, len(record.steps), _APPEND_STEPS):
            steps = record.steps[start : start + _APPEND_STEPS]
            writing.append(*(_with_bodies(client, record, step) for step in steps))
    _annotate(client, record, convert)
    if new and trajectory.status in _STATUSES:
        client.trajectories.seal(
            record.id, _STATUSES[trajectory.status], trajectory.status_message, expected_steps=len(record.steps)
        )
    return Stored(record.id, len(record.steps), new)


def _open(client: SandboxClient, record: Record, take_over: bool) -> Trajectory:
    """The trajectory to append to, made unless it is there."""
    try:
        begun = client.trajectories.get(record.id)
    except TrajectoryNotFound:
        begun = None
    client.trajectories.create(**_options(record.trajectory))
    # Where nothing was written yet, whoever began it is not known, and may be about to.
    if begun is not None and begun.status == "open" and not begun.totals.steps and not take_over:
        raise _taken(record)
    try:
        return client.trajectories.open(record.id, take_over=take_over, writer=_WRITER)
    except WriterConflict as error:
        raise _taken(record) from error


def _taken(record: Record) -> WriterConflict:
    return WriterConflict(
        f"trajectory {record.id!r} is open on the platform and somebody may be writing it; import it once it is "
        f"sealed, or take it over (--take-over), which ends that recording",
        metadata={"trajectory_id": record.id},
    )


def _options(trajectory: pb.Trajectory) -> dict[str, Any]:
    names = ("trajectory_id", "rollout_id", "group_id", "harness", "model", "policy_version", "teacher", "sandbox_id")
    options: dict[str, Any] = {name: value for name in names if (value := getattr(trajectory, name))}
    options["attempt"] = trajectory.attempt
    options["labels"] = dict(trajectory.labels)
    if trajectory.trace_id:
        options["trace_id"] = trajectory.trace_id
    if trajectory.tools_json:
        options["tools"] = json.loads(trajectory.tools_json)
    if trajectory.metadata_json:
        options["metadata"] = json.loads(trajectory.metadata_json)
    from orchard import Task

    task = trajectory.task
    options["task"] = Task(task.instance_id, task.dataset, task.repo, task.website, task.split)
    return options


def _with_bodies(client: SandboxClient, record: Record, step: pb.Step) -> pb.Step:
    """A step whose bodies are stored; large texts become bodies, so that the step fits into a message."""
    made = pb.Step()
    made.CopyFrom(step)
    for part in made.content:
        if part.HasField("blob"):
            client.trajectories.bodies.put(body_of(part.blob, record.bodies), part.blob.media_type)
        elif len(part.text) > _TEXT_BYTES // 4 and len(data := part.text.encode()) > _TEXT_BYTES:
            client.trajectories.bodies.put(data, "text/plain")
            part.blob.CopyFrom(blob_of(data, "text/plain"))
    return made


def _annotate(client: SandboxClient, record: Record, convert: Any) -> None:
    """Rewards and values, under a name of their content, so that a repeat adds none."""
    trajectory = record.trajectory
    rewards = list(trajectory.rewards)
    if not rewards and trajectory.HasField("outcome"):
        rewards = [trajectory.outcome]
    values = [convert.value_of(value) for value in record.values]
    digest = hash_of(record)[:40]
    for number, start in enumerate(range(0, max(len(values), 1 if rewards else 0), _ANNOTATE_VALUES)):
        client.trajectories.annotate(
            record.id,
            rewards=[convert.reward_of(reward) for reward in rewards] if not number else (),
            values=values[start : start + _ANNOTATE_VALUES],
            annotation_id=f"import-{digest}-{number}",
        )
