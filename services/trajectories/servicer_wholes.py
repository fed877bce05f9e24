"""Whole trajectories from the wire, by the rules of the calls that they stand for."""

from __future__ import annotations

import asyncio
from typing import Final

from orchard.trajectory.v1 import trajectory_service_pb2 as pb

from services.common.validation import Fields
from services.trajectories import servicer_values as values
from services.trajectories.bodies import Bodies
from services.trajectories.model import Status, Whole
from services.trajectories.servicer_steps import new_steps

_MOST: Final = 1000


def check_call(request: pb.StoreTrajectoriesRequest) -> None:
    """Raise InvalidArgumentError unless the call has trajectories that can be told apart."""
    given = [one.trajectory.trajectory_id for one in request.trajectories]
    fields, seen = Fields(), dict[str, int]()
    fields.check(1 <= len(given) <= _MOST, "trajectories", f"must be 1 to {_MOST:,}")
    for position, trajectory_id in enumerate(given):
        first = seen.setdefault(trajectory_id, position)
        where = f"trajectories[{position}].trajectory.trajectory_id"
        fields.check(first == position, where, f"is in this call already, as trajectories[{first}]; send it once")
    fields.done()


async def new_whole(message: pb.NewTrajectory, tenant: str, bodies: Bodies) -> Whole:
    """A checked trajectory; its large texts are stored.

    Raises:
        InvalidArgumentError: a field breaks its rule.
    """
    await asyncio.sleep(0)  # a call has hundreds: others have their turn between them
    fields = Fields()
    values.check_id(fields, "trajectory.trajectory_id", message.trajectory.trajectory_id)
    fields.token_id("writer", message.writer)
    values.check_end(fields, message.status, message.message, opened=True)
    judged = bool(message.rewards or message.step_values)
    fields.token_id("annotation_id", message.annotation_id, optional=not judged)
    fields.done()
    description = values.description(message.trajectory)
    annotation = None
    if judged:
        annotation = values.annotation(
            pb.AnnotateTrajectoryRequest(
                trajectory_id=message.trajectory.trajectory_id,
                annotation_id=message.annotation_id,
                rewards=message.rewards,
                step_values=message.step_values,
            )
        )
    # Last: what is refused for another reason leaves no bodies behind.
    steps = await new_steps(message.steps, tenant, bodies, first=0)
    return Whole(
        description=description,
        writer=message.writer,
        take_over=message.take_over,
        steps=tuple(steps),
        annotation=annotation,
        status=Status(message.status),
        message=message.message,
    )
