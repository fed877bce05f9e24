"""Training data of a value model: a row for each decision, with its target where values are known.

Source: the paper (GAE with gamma 0.98 and lambda 0.95; the value is read just before each action).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from orchard.data import schemas
from orchard.data.codecs.base import Carries, Codec, Container, Row
from orchard.data.errors import NoExampleError
from orchard.data.options import ExportOptions
from orchard.data.record import Record, parent_of
from orchard.data.report import Report
from orchard.data.training.conversations import VALUE, conversations
from orchard.data.training.examples import described, plain_messages, refuse_unusable
from orchard.rewards.values import gae_targets
from orchard.trajectory.v1 import trajectory_pb2 as pb


def decisions(record: Record) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What led to each decision, and the response: messages of the model that follow one another are one decision."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    owners: dict[int, tuple[int, ...]] = {}
    for conversation in conversations(record):
        for position, loss in enumerate(conversation.loss):
            if loss:
                owners[conversation.path[position]] = conversation.path[:position]
    for index in sorted(owners):
        if found and parent_of(record.steps[index]) == found[-1][1][-1]:
            before, response = found[-1]
            found[-1] = (before, (*response, index))
        else:
            found.append((owners[index], (index,)))
    return found


def rows(record: Record, options: ExportOptions, report: Report) -> Iterator[Row]:
    """A row for each decision. The reward, +1 or -1, comes with the last."""
    del options
    refuse_unusable(record)
    if record.resolved is None:
        raise NoExampleError("it has no verdict")
    if record.trajectory.status not in {pb.TRAJECTORY_STATUS_COMPLETED, pb.TRAJECTORY_STATUS_FAILED}:
        raise NoExampleError("it has not ended")
    found = decisions(record)
    if not found:
        raise NoExampleError("the model wrote nothing in it")
    made = [(plain_messages(record, before), plain_messages(record, response)[0]) for before, response in found]
    reward = 1.0 if record.resolved else -1.0
    known = record.values_named(VALUE)
    values = [_value(record, known, response[0]) for _, response in found]
    complete = [value for value in values if value is not None]
    targets: list[float | None] = [None] * len(found)
    if len(complete) == len(values):
        targets = list(gae_targets(complete, reward))
    elif complete:
        report.lost("target", "not every decision has a value", record.id)
    for turn, ((messages, images), response) in enumerate(made):
        value: dict[str, Any] = {
            "id": f"{record.id}.d{turn}",
            "turn": turn,
            "messages": messages,
            "response": response,
            "images": images,
            "reward": reward if turn == len(made) - 1 else 0.0,
            "value": values[turn],
            "target": targets[turn],
        }
        yield Row(value | described(record), f"{record.id}.d{turn}")


def _value(record: Record, known: dict[int, float], index: int) -> float | None:
    """V of the state in which a step acts: given at the step, or at the observation just before it."""
    before = parent_of(record.steps[index])
    if index not in known and before >= 0 and record.steps[before].role == pb.ROLE_TOOL:
        return known.get(before)
    return known.get(index)


CODEC: Final = Codec(
    name="value",
    summary="Value models: a decision a row, with reward, value and GAE target.",
    carries=frozenset(
        {
            Carries.TOOLS,
            Carries.TOOL_CALLS,
            Carries.REASONING,
            Carries.IMAGES,
            Carries.REWARDS,
            Carries.VALUES,
        }
    ),
    rows=rows,
    containers=(Container.JSONL, Container.PARQUET),
    schema=schemas.value,
)
