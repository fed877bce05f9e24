"""Whole trajectories, as they are exported."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from orchard._client.status import CallFailed
from orchard._client.trajectories import convert
from orchard._client.trajectories.types import Step, StepValue, TrajectoryInfo
from orchard._client.transport import Transport
from orchard.trajectory.v1 import trajectory_pb2
from orchard.trajectory.v1 import trajectory_service_pb2 as pb


@dataclass(frozen=True)
class ExportedTrajectory:
    """A trajectory with its steps. The messages are what came over the wire; the values are made when asked for."""

    message: trajectory_pb2.Trajectory = field(repr=False)
    step_messages: Sequence[trajectory_pb2.Step] = field(repr=False)
    value_messages: Sequence[trajectory_pb2.StepValue] = field(repr=False)
    resume_token: str
    """Where an export goes on behind it."""
    total: int
    """How many trajectories the filter selected when the export began."""

    @property
    def trajectory_id(self) -> str:
        """Its id."""
        return self.message.trajectory_id

    @cached_property
    def info(self) -> TrajectoryInfo:
        """All but its steps."""
        return convert.trajectory_of(self.message)

    @cached_property
    def steps(self) -> list[Step]:
        """Its steps by index; empty with metadata_only."""
        return [convert.step_of(message) for message in self.step_messages]

    @cached_property
    def values(self) -> list[StepValue]:
        """The newest value of each step, name and judge."""
        return [convert.value_of(message) for message in self.value_messages]


async def export(
    transport: Transport, request: pb.ExportTrajectoriesRequest
) -> AsyncGenerator[ExportedTrajectory, None]:
    """Trajectories one by one; a stream that breaks goes on behind the last whole one."""
    retry, context = transport.retry(), transport.context()
    request.several = True
    total = 0
    while True:
        try:
            async with transport.stream(lambda c: c.trajectory.ExportTrajectories, request, context) as stream:
                begun: trajectory_pb2.Trajectory | None = None
                steps: list[trajectory_pb2.Step] = []
                values: list[trajectory_pb2.StepValue] = []
                async for response in stream:
                    retry.succeeded()
                    total = total or response.total
                    for one in response.whole:
                        yield ExportedTrajectory(one.trajectory, one.steps, one.step_values, one.resume_token, total)
                        request.resume_token = one.resume_token
                    if response.HasField("trajectory"):
                        begun, steps, values = response.trajectory, [], list(response.step_values)
                    steps.extend(response.steps)
                    if response.resume_token and begun is not None:
                        yield ExportedTrajectory(begun, steps, values, response.resume_token, total)
                        request.resume_token, begun = response.resume_token, None
        except CallFailed as error:
            await transport.pause_or_raise(error, retry, "")
        else:
            return
