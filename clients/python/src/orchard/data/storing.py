"""Trajectories of files, stored on a platform: several small ones in a call, long ones piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from orchard._client.errors import (
    OrchardError,
    TrajectoryNotFound,
    TrajectorySealed,
    Unimplemented,
    WriterConflict,
)
from orchard.data.record import Record, blob_of, body_of
from orchard.data.sources import hash_of
from orchard.trajectory.v1 import trajectory_pb2 as pb
from orchard.trajectory.v1 import trajectory_service_pb2 as service_pb

if TYPE_CHECKING:
    from orchard import SandboxClient, Trajectory, TrajectoryOptions
    from orchard._client.trajectories.sync import Storing

_APPEND_STEPS: Final = 500
_WRITER: Final = "import"
"""Of every import: one that broke off is gone on with, and a recording is nobody's but its own."""
_TEXT_BYTES: Final = 64 << 10
"""Larger texts are stored apart."""
_ANNOTATE_VALUES: Final = 10_000
_CALL_BYTES: Final = 512 << 10
_LONGEST_BYTES: Final = (1 << 20) - (16 << 10)
"""Of one trajectory that goes into a call; with what is around it, a call has at most 1 MiB."""
_HELD_BYTES: Final = 16 << 20
"""Of bodies of the trajectories of a call. They go apart, and stay at hand for a platform without such calls."""
_CALL_TRAJECTORIES: Final = 500
_CALL_REWARDS: Final = 100
_STATUSES: Final = {
    pb.TRAJECTORY_STATUS_COMPLETED: "completed",
    pb.TRAJECTORY_STATUS_FAILED: "failed",
    pb.TRAJECTORY_STATUS_ABORTED: "aborted",
}


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
        Each names the file and the line that the trajectory was read from.
    """
    with _placed(record):
        return _store(client, record, take_over)


def _store(client: SandboxClient, record: Record, take_over: bool) -> Stored:
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


def store_all(client: SandboxClient, records: Iterable[Record], *, take_over: bool = False) -> Iterator[Stored]:
    """Store trajectories in their order, several small ones in a call; each as `store` does, and all of it or nothing.
    A platform of an earlier version, and what is too long for a call, is given each by itself.

    Args:
        client: of the platform.
        records: the trajectories.
        take_over: see `store`.

    Raises, while it is iterated:
        OrchardError: as `store`, of the first that is refused. Those before it are stored.
    """
    together = _Together(client, take_over)
    try:
        for record in records:
            if not together.takes(record):
                yield from together.send()
            if not together.add(record):
                yield from together.send()
                yield from together.settle()
                yield store(client, record, take_over=take_over)
        yield from together.send()
        yield from together.settle()
    except Exception:
        # What was read before a mistake in a file is stored, as it would be one by one.
        yield from together.send()
        yield from together.settle()
        raise
    finally:
        together.cancel()


class _Together:
    """Small trajectories that go into one call, while the call before is under way."""

    def __init__(self, client: SandboxClient, take_over: bool) -> None:
        self._client = client
        self._take_over = take_over
        self._possible = True
        self._records: dict[str, Record] = {}
        self._messages: list[service_pb.NewTrajectory] = []
        self._size = self._held = 0
        self._under_way: tuple[Storing, dict[str, Record]] | None = None

    def takes(self, record: Record) -> bool:
        """Whether there is room: what goes by itself comes behind those before it, and an id goes once into a call."""
        return (
            self._possible
            and record.id not in self._records
            and len(self._records) < _CALL_TRAJECTORIES
            and self._size + _size_of(record) <= _CALL_BYTES
            and self._held + _held_of(record) <= _HELD_BYTES
        )

    def add(self, record: Record) -> bool:
        """Have it go with the next call; False if it is too long for that, or the platform has no such call."""
        size = _size_of(record)
        judged = len(record.trajectory.rewards) <= _CALL_REWARDS and len(record.values) <= _ANNOTATE_VALUES
        if not self._possible or size > _LONGEST_BYTES or not judged:
            return False
        with _placed(record):
            self._messages.append(_message_of(self._client, record, self._take_over))
        self._records[record.id] = record
        self._size += size
        self._held += _held_of(record)
        return True

    def send(self) -> Iterator[Stored]:
        """Begin to store those that are there, behind those before them; what became of the latter."""
        # Taken first: where one of those before them is refused, they are not stored.
        records, messages = self._records, self._messages
        self._records, self._messages, self._size, self._held = {}, [], 0, 0
        yield from self.settle()
        if not self._possible:
            yield from self._each(records)
        elif messages:
            self._under_way = self._client.trajectories.begin_store(messages), records

    def settle(self) -> Iterator[Stored]:
        """What became of those that are under way."""
        if self._under_way is None:
            return
        (call, records), self._under_way = self._under_way, None
        try:
            stored = call.result()
        except Unimplemented:
            self._possible = False
            yield from self._each(records)
        except OrchardError as error:
            refused = error.metadata.get("trajectory_id", "")
            with _placed(records.get(refused)):
                if isinstance(error, WriterConflict):
                    raise _taken(refused) from error
                raise
        else:
            for one in stored:
                yield Stored(one.trajectory_id, len(records[one.trajectory_id].steps), not one.was_sealed)

    def _each(self, records: Mapping[str, Record]) -> Iterator[Stored]:
        for record in records.values():
            yield store(self._client, record, take_over=self._take_over)

    def cancel(self) -> None:
        """Wait no longer for those that are under way."""
        if self._under_way is not None:
            self._under_way[0].cancel()


@contextmanager
def _placed(record: Record | None) -> Iterator[None]:
    """What is wrong with a trajectory names the file and the line that it was read from."""
    try:
        yield
    except OrchardError as error:
        where = record.where if record is not None else None
        if where is not None and where.file and "file" not in error.metadata:
            error.message = f"{where}: {error.message}"
            error.metadata = {**error.metadata, "file": where.file, "line": str(where.line)}
        raise


def _size_of(record: Record) -> int:
    """Bytes on the wire, at least; large texts among them, which go apart."""
    parts = (*record.steps, *record.values)
    return record.trajectory.ByteSize() + sum(part.ByteSize() + 8 for part in parts)


def _held_of(record: Record) -> int:
    """Bytes of its bodies."""
    return sum(part.blob.size for step in record.steps for part in step.content if part.HasField("blob"))


def _message_of(client: SandboxClient, record: Record, take_over: bool) -> service_pb.NewTrajectory:
    """A trajectory as it goes into a call: what the calls of `store` say, together."""
    from orchard._client.trajectories import convert
    from orchard._client.trajectories.options import trajectory_message
    from orchard._client.trajectories.writer import end_message

    trajectory, options = record.trajectory, _options(record.trajectory)
    task = options.pop("task")
    made = service_pb.NewTrajectory(
        trajectory=trajectory_message(task, cast("TrajectoryOptions", options)),
        writer=_WRITER,
        take_over=take_over,
        status=trajectory.status if trajectory.status in _STATUSES else pb.TRAJECTORY_STATUS_OPEN,
        message=end_message(trajectory.status_message),
        rewards=[convert.reward_message(convert.reward_of(reward)) for reward in _rewards_of(trajectory)],
        step_values=record.values,
    )
    if made.rewards or made.step_values:
        made.annotation_id = _annotation_id(record, 0)
    for index, step in enumerate(record.steps):
        made.steps.append(_with_bodies(client, record, step))
        made.steps[index].index = index
    return made


def _open(client: SandboxClient, record: Record, take_over: bool) -> Trajectory:
    """The trajectory to append to, made unless it is there."""
    try:
        begun = client.trajectories.get(record.id)
    except TrajectoryNotFound:
        begun = None
    client.trajectories.create(**_options(record.trajectory))
    # Where nothing was written yet, whoever began it is not known, and may be about to.
    if begun is not None and begun.status == "open" and not begun.totals.steps and not take_over:
        raise _taken(record.id)
    try:
        return client.trajectories.open(record.id, take_over=take_over, writer=_WRITER)
    except WriterConflict as error:
        raise _taken(record.id) from error


def _taken(trajectory_id: str) -> WriterConflict:
    return WriterConflict(
        f"trajectory {trajectory_id!r} is open on the platform and somebody may be writing it; import it once it is "
        f"sealed, or take it over (--take-over), which ends that recording",
        metadata={"trajectory_id": trajectory_id},
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
    rewards = _rewards_of(record.trajectory)
    values = [convert.value_of(value) for value in record.values]
    for number, start in enumerate(range(0, max(len(values), 1 if rewards else 0), _ANNOTATE_VALUES)):
        client.trajectories.annotate(
            record.id,
            rewards=[convert.reward_of(reward) for reward in rewards] if not number else (),
            values=values[start : start + _ANNOTATE_VALUES],
            annotation_id=_annotation_id(record, number),
        )


def _rewards_of(trajectory: pb.Trajectory) -> list[pb.Reward]:
    rewards = list(trajectory.rewards)
    return [trajectory.outcome] if not rewards and trajectory.HasField("outcome") else rewards


def _annotation_id(record: Record, number: int) -> str:
    return f"import-{hash_of(record)[:40]}-{number}"
