"""AsyncTrajectory: one trajectory that is being written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from orchard._client.arguments import explained
from orchard._client.errors import InvalidArgument
from orchard._client.status import CallFailed
from orchard._client.trajectories import convert
from orchard._client.trajectories.bodies import AsyncBodies
from orchard._client.trajectories.types import Body, Step, TrajectoryInfo, TrajectoryStatus
from orchard._client.transport import Retry, Transport
from orchard.trajectory.v1 import trajectory_pb2
from orchard.trajectory.v1 import trajectory_service_pb2 as pb

STEP_BYTES: Final = 1 << 20
"""Of one message; a step must fit into one."""
BATCH_BYTES: Final = 512 << 10
BATCH_STEPS: Final = 1000
_MESSAGE_BYTES: Final = 4096

AnyStep = Step | Mapping[str, Any] | trajectory_pb2.Step
"""A step, a message in OpenAI's form, or the message of the wire."""
Prepared = tuple[trajectory_pb2.Step, list[Body]]
"""A step on the wire, with the bodies to store before it."""


def prepared(step: AnyStep) -> Prepared:
    """A step as it goes out.

    Raises:
        InvalidArgument: a value cannot be meant, or it is over 1 MiB beside its texts and bodies.
    """
    if isinstance(step, trajectory_pb2.Step):
        made: Prepared = (trajectory_pb2.Step(), [])
        made[0].CopyFrom(step)
    elif isinstance(step, Step):
        made = convert.step_message(step)
    elif isinstance(step, Mapping):
        made = convert.step_message(convert.openai_step(step))
    else:
        raise InvalidArgument.of("step", f"must be a Step or a message in OpenAI's form, not {type(step).__name__}")
    if made[0].ByteSize() > STEP_BYTES - 1024:
        raise InvalidArgument.of("step", "is over 1 MiB; give what is large in it as texts or bodies of its content")
    return made


@explained
class AsyncTrajectory:
    """A trajectory to append to. One writer at a time: another one that takes over makes this one's appends fail.

    Args:
        info: the trajectory as it was last seen.
        writer: who writes; kept over retries.
        next_index: index of the next step.
    """

    def __init__(self, transport: Transport, info: TrajectoryInfo, writer: str, next_index: int) -> None:
        self._transport = transport
        self._bodies = AsyncBodies(transport)
        self._writer = writer
        self._next = next_index
        self._turn = asyncio.Lock()
        self.info = info
        """What was known of it last."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.trajectory_id}, {self._next} steps>"

    @property
    def trajectory_id(self) -> str:
        """Its id."""
        return self.info.trajectory_id

    @property
    def next_index(self) -> int:
        """Index of the next step."""
        return self._next

    async def append(self, *steps: AnyStep) -> int:
        """Add steps; on return they are durable. Gives the index of the next one.

        Connections that break and stores that are away are waited for; no step is stored twice. If it fails with
        Unavailable, whether the steps are stored is not known: append the same again.

        Raises:
            WriterConflict: another writer has taken over.
            StepConflict: other steps are stored at these indices.
            TrajectorySealed: it was sealed.
            InvalidArgument: a step breaks a rule.
        """
        made = [prepared(step) for step in steps]
        async with self._turn:
            return await self.append_prepared(made)

    async def append_prepared(self, steps: Sequence[Prepared], retry: Retry | None = None) -> int:
        """Add steps that are ready to go; one call at a time. The bodies of each are stored before it."""
        for position, (message, bodies) in enumerate(steps):
            message.index = self._next + position
            for body in bodies:
                await self._bodies.store(body, retry)
        if steps:
            messages = [message for message, _bodies in steps]
            self._next = await append(self._transport, self.trajectory_id, self._writer, messages, retry=retry)
        return self._next

    async def seal(
        self, status: TrajectoryStatus | str = TrajectoryStatus.COMPLETED, message: str = ""
    ) -> TrajectoryInfo:
        """End it: nothing can be appended afterwards. Fails if it does not have exactly the steps that were appended.

        Raises:
            TrajectorySealed: it was sealed with another status.
        """
        async with self._turn:
            self.info = await seal(self._transport, self.trajectory_id, status, message, expected_steps=self._next)
        return self.info


async def append(
    transport: Transport,
    trajectory_id: str,
    writer: str,
    steps: Sequence[trajectory_pb2.Step],
    *,
    take_over: bool = False,
    retry: Retry | None = None,
) -> int:
    """Append steps whose indices are set, repeated while the service is away; returns the next index."""
    start = pb.AppendStart(trajectory_id=trajectory_id, writer=writer, take_over=take_over)

    async def requests() -> AsyncIterator[pb.AppendStepsRequest]:
        yield pb.AppendStepsRequest(start=start)
        for batch in batches(steps):
            request = pb.AppendStepsRequest()
            request.steps.steps.extend(batch)
            yield request

    with transport.operation("AppendSteps", trajectory_id=trajectory_id) as operation:
        response = await transport.upload(
            lambda c: c.trajectory.AppendSteps,
            requests,
            sandbox_id="",
            context=transport.context(operation),
            retry=retry or transport.retry(),
        )
    return response.next_index


def batches(steps: Sequence[trajectory_pb2.Step]) -> list[Sequence[trajectory_pb2.Step]]:
    """Steps cut into messages."""
    made: list[Sequence[trajectory_pb2.Step]] = []
    begin = size = 0
    for position, step in enumerate(steps):
        more = step.ByteSize() + 8
        if position > begin and (size + more > BATCH_BYTES or position - begin >= BATCH_STEPS):
            made.append(steps[begin:position])
            begin, size = position, 0
        size += more
    if begin < len(steps):
        made.append(steps[begin:])
    return made


async def seal(
    transport: Transport,
    trajectory_id: str,
    status: TrajectoryStatus | str,
    message: str,
    *,
    expected_steps: int | None,
    retry: Retry | None = None,
) -> TrajectoryInfo:
    """End a trajectory."""
    request = pb.SealTrajectoryRequest(
        trajectory_id=trajectory_id,
        status=convert.status_number("status", status),
        message=end_message(message),
        expected_steps=expected_steps,
    )
    response = await transport.unary(lambda c: c.trajectory.SealTrajectory, request, retry=retry)
    return convert.trajectory_of(response.trajectory)


def end_message(message: str) -> str:
    """Why a trajectory failed or was aborted, as far as it is kept."""
    return message.encode(errors="replace")[:_MESSAGE_BYTES].decode(errors="ignore")


async def store(transport: Transport, trajectories: Sequence[pb.NewTrajectory]) -> Sequence[pb.StoredTrajectory]:
    """Store whole trajectories in one call."""
    request = pb.StoreTrajectoriesRequest(trajectories=trajectories)
    response = await transport.unary(lambda c: c.trajectory.StoreTrajectories, request)
    return response.trajectories


async def read_messages(
    transport: Transport, trajectory_id: str, first: int, follow: bool
) -> AsyncGenerator[trajectory_pb2.Step, None]:
    """Steps by index; goes on where it was when a connection breaks."""
    retry, context = transport.retry(), transport.context()
    while True:
        request = pb.ReadStepsRequest(trajectory_id=trajectory_id, from_index=first, follow=follow)
        try:
            async with transport.stream(lambda c: c.trajectory.ReadSteps, request, context) as stream:
                async for response in stream:
                    retry.succeeded()
                    for step in response.steps:
                        first = step.index + 1
                        yield step
        except CallFailed as error:
            await transport.pause_or_raise(error, retry, "")
        else:
            return


async def read_steps(transport: Transport, trajectory_id: str, first: int, follow: bool) -> AsyncGenerator[Step, None]:
    """The same as values."""
    async with aclosing(read_messages(transport, trajectory_id, first, follow)) as messages:
        async for message in messages:
            yield convert.step_of(message)
