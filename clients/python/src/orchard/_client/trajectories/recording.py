"""Recording: one line around a rollout, which keeps what happens in it as a trajectory and seals that at the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from orchard._client import errors
from orchard._client.arguments import explained
from orchard._client.trajectories import convert
from orchard._client.trajectories.buffer import StepBuffer
from orchard._client.trajectories.commands import CommandSteps
from orchard._client.trajectories.types import Reward, StepValue, TrajectoryInfo, TrajectoryStatus
from orchard._client.trajectories.writer import AnyStep, AsyncTrajectory, Prepared, end_message, prepared, seal

if TYPE_CHECKING:
    from orchard._client.sandbox import AsyncSandbox
    from orchard._client.session import Session
    from orchard._client.trajectories.client import AsyncTrajectories
    from orchard._client.trajectories.options import TrajectoryOptions
    from orchard._client.trajectories.types import Task

_log: Final = logging.getLogger("orchard")
# A person who pressed Ctrl-C waits.
_INTERRUPTED_SECONDS: Final = 10.0
# Failures of the platform, of its stores and of the way to them say nothing of the agent. Nor does a limit of time that
# is not a command's own: cut from outside, the same rollout would end by a cancellation.
_NOT_THE_AGENT: Final = (
    errors.Unavailable,
    errors.DeadlineExceeded,
    errors.PlatformError,
    errors.ClientClosed,
    errors.ConfigurationError,
    errors.Unauthenticated,
    errors.PermissionDenied,
    errors.Unimplemented,
    errors.QuotaExceeded,
    errors.SandboxNotFound,
    errors.SandboxLost,
    errors.SandboxStartFailed,
    errors.ImageNotFound,
    errors.ExecNotFound,
    errors.ExecExpired,
    errors.CommandInterrupted,
    errors.PortInUse,
    errors.TrajectoryNotFound,
    errors.TrajectorySealed,
    errors.Conflict,
    errors.RecordingIncomplete,
    TimeoutError,
    ConnectionError,
)
# What a command, a file or a server came to is the agent's, a command's own timeout too.
_THE_AGENTS: Final = (errors.CommandFailed, errors.FilePermissionDenied, errors.PortRefused)


def status_after(error: BaseException | None) -> tuple[TrajectoryStatus, str]:
    """How a rollout ended: COMPLETED without an error, FAILED by an exception, ABORTED by a cancellation, Ctrl-C, a
    failure of the platform or a limit of time that is not a command's own.
    """
    if error is None:
        return TrajectoryStatus.COMPLETED, ""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return (TrajectoryStatus.ABORTED if _is_not_the_agents(error) else TrajectoryStatus.FAILED), text


def _is_not_the_agents(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_not_the_agents(inner) for inner in error.exceptions)
    if isinstance(error, _THE_AGENTS):
        return False
    return not isinstance(error, Exception) or isinstance(error, _NOT_THE_AGENT)


@explained
class AsyncRecording:
    """A trajectory that is recorded. Use it with `async with`; it is sealed on the way out.

    What is added is stored in the background, in order; a store that is away is waited for, up to 64 MiB of steps.
    """

    def __init__(
        self,
        session: Session,
        trajectories: AsyncTrajectories,
        task: Task | str | None,
        options: TrajectoryOptions,
        sandbox: AsyncSandbox | None,
    ) -> None:
        self._session = session
        self._trajectories = trajectories
        self._task = task
        self._options = options
        self._sandbox = sandbox
        self._trajectory: AsyncTrajectory | None = None
        self._buffer: StepBuffer | None = None
        self._commands = CommandSteps(self._take)
        self._attached: set[str] = set()
        self._end: tuple[TrajectoryStatus | str, str] | None = None
        self.info: TrajectoryInfo | None = None
        """How it was sealed, afterwards."""

    async def __aenter__(self) -> Self:
        if self._sandbox is not None:
            self._options = {"sandbox_id": self._sandbox.sandbox_id, **self._options}
        # The call itself is never cut: an open trajectory that nobody writes would be left.
        creating = self._session.background.start("record", self._trajectories.create(self._task, **self._options))
        try:
            self._trajectory = await asyncio.shield(creating)
        except asyncio.CancelledError:
            await self._session.background.shielded("undo record", self._undo(creating))
            raise
        self._buffer = StepBuffer(self._trajectory, self._session.background)
        self._session.recordings.add(self)
        if self._sandbox is not None:
            self.attach(self._sandbox)
        return self

    async def _undo(self, creating: asyncio.Task[AsyncTrajectory]) -> None:
        """Seal what was created for somebody who is gone."""
        status, message = status_after(asyncio.CancelledError())
        with suppress(errors.OrchardError, TimeoutError):
            async with asyncio.timeout(_INTERRUPTED_SECONDS):
                made = await creating
                await seal(self._session.transport, made.trajectory_id, status, message, expected_steps=0)

    def _open(self) -> tuple[AsyncTrajectory, StepBuffer]:
        if self._trajectory is None or self._buffer is None:
            raise RuntimeError("a recording is used within `async with`")
        return self._trajectory, self._buffer

    def _check_not_ended(self) -> None:
        """Raise TrajectorySealed once it has ended: what is added then would be stored by nobody."""
        if self._trajectory is not None and self not in self._session.recordings:
            trajectory_id = self.trajectory_id
            raise errors.TrajectorySealed(
                f"the recording of {trajectory_id!r} has ended, and its trajectory takes no more; add within the "
                "`with` block",
                metadata={"trajectory_id": trajectory_id},
            )

    @property
    def trajectory_id(self) -> str:
        """Its trajectory's id."""
        return self._open()[0].trajectory_id

    @property
    def next_index(self) -> int:
        """Index of the next step."""
        self._commands.make()
        return self._open()[1].next_index

    def add(self, *steps: AnyStep) -> None:
        """Add steps without waiting for them to be stored. A step without a time gets the present one.

        Raises:
            InvalidArgument: a step breaks a rule.
            TrajectorySealed: the block has ended.
        """
        self._check_not_ended()
        made = [_timed(prepared(step)) for step in steps]
        self._commands.make()
        self._take(made)

    async def append(self, *steps: AnyStep) -> int:
        """Add steps; on return they, and all before them, are durable. Gives the index of the next one.

        Raises:
            InvalidArgument: a step breaks a rule.
            TrajectorySealed: the block has ended.
            OrchardError: they cannot be stored.
        """
        self.add(*steps)
        await self.flush()
        return self.next_index

    async def flush(self) -> None:
        """Return when everything that was added is durable.

        Raises:
            OrchardError: why it is not.
        """
        self._commands.make()
        await self._open()[1].flush()

    def _take(self, steps: Sequence[Prepared]) -> None:
        self._open()[1].add(steps)

    def attach(self, sandbox: AsyncSandbox) -> None:
        """Record the sandbox's commands that are run through this client from now on: each as a tool call, its output
        as the observation. For harnesses that do not add the model's messages themselves.

        Raises:
            TrajectorySealed: the block has ended.
        """
        self._check_not_ended()
        self._attached.add(sandbox.sandbox_id)
        self._session.observers.add(sandbox.sandbox_id, self._commands)

    def detach(self, sandbox: AsyncSandbox) -> None:
        """Record the sandbox's commands no longer."""
        self._attached.discard(sandbox.sandbox_id)
        self._session.observers.remove(sandbox.sandbox_id, self._commands)

    async def annotate(
        self,
        *,
        rewards: Reward | Sequence[Reward] = (),
        values: Sequence[StepValue] = (),
        labels: Mapping[str, str] | None = None,
    ) -> TrajectoryInfo:
        """Judge it; see AsyncTrajectories.annotate. Values may be of steps that were only just added."""
        if values:
            await self.flush()
        return await self._trajectories.annotate(self.trajectory_id, rewards=rewards, values=values, labels=labels)

    async def reward(self, value: float, *, name: str = "outcome", judge: str = "", version: str = "") -> None:
        """Give it a reward that is a number. For anything else see `annotate`."""
        await self.annotate(rewards=Reward.scored(value, name=name, judge=judge, version=version))

    def end(self, status: TrajectoryStatus | str, message: str = "") -> None:
        """Say how it is to be sealed, whatever happens: "completed", "failed" (a step limit, say) or "aborted".

        Raises:
            InvalidArgument: there is no such status.
            TrajectorySealed: the block has ended.
        """
        self._check_not_ended()
        convert.status_number("status", status)
        self._end = (status, end_message(message))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status, message = self._end or status_after(error)
        interrupted = error is not None and not isinstance(error, Exception)
        try:
            await self.close(status, message, seconds=_INTERRUPTED_SECONDS if interrupted else None)
        except errors.OrchardError as failure:
            if error is None:
                raise
            _log.warning("%s", failure)

    async def close(self, status: TrajectoryStatus | str, message: str = "", *, seconds: float | None = None) -> None:
        """Store what waits and seal it; carried through even if this task is cancelled. Idempotent.

        Args:
            status: how it ended.
            message: why, if it failed or was aborted.
            seconds: how long it may take. Default: as long as this client repeats a call, for each.

        Raises:
            RecordingIncomplete: some of it could not be stored, or it could not be sealed.
        """
        if self not in self._session.recordings:
            return
        self._session.recordings.discard(self)
        self._commands.make()
        for sandbox_id in self._attached:
            self._session.observers.remove(sandbox_id, self._commands)
        await self._session.background.shielded(f"seal {self.trajectory_id}", self._close(status, message, seconds))

    async def _close(self, status: TrajectoryStatus | str, message: str, seconds: float | None) -> None:
        trajectory, buffer = self._open()
        cause: BaseException | None = None
        try:
            async with asyncio.timeout(seconds):
                cause = await self._flush_to_end(buffer)
                lost = buffer.stop()
                if lost:
                    status = TrajectoryStatus.ABORTED
                    message = f"{lost} steps could not be recorded"
                self.info = await seal(
                    self._session.transport,
                    trajectory.trajectory_id,
                    status,
                    message,
                    expected_steps=None if lost else trajectory.next_index,
                )
        except (errors.OrchardError, TimeoutError) as error:
            buffer.stop()
            cause = cause or error
        if cause is None and not buffer.lost:
            return
        how = f"{buffer.lost} steps could not be stored" if buffer.lost else "it could not be sealed"
        raise errors.RecordingIncomplete(
            f"the recording of {trajectory.trajectory_id} is not whole: {how} ({_sentence(cause)})",
            lost=buffer.lost,
            metadata={"trajectory_id": trajectory.trajectory_id, "lost": str(buffer.lost)},
        ) from cause

    @staticmethod
    async def _flush_to_end(buffer: StepBuffer) -> BaseException | None:
        try:
            await buffer.flush()
        except errors.OrchardError as error:
            return error
        return None


def _timed(step: Prepared) -> Prepared:
    message = step[0]
    if not message.HasField("time"):
        # As GetCurrentTime, in a fraction of its time.
        message.time.seconds, message.time.nanos = divmod(time.time_ns(), 1_000_000_000)
    return step


def _sentence(error: BaseException | None) -> str:
    return "too little time" if error is None or (type(error) is TimeoutError) else str(error)
