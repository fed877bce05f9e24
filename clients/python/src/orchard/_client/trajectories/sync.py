"""The synchronous trajectories: a thin typed face of the asynchronous ones."""

from __future__ import annotations

import asyncio
import builtins
import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from orchard._client.arguments import explained
from orchard._client.options import with_options
from orchard._client.portal import Portal
from orchard._client.trajectories.export import ExportedTrajectory
from orchard._client.trajectories.groups import AsyncGroups, ClaimedSample, Following, Group, GroupStart, RolloutPlan
from orchard._client.trajectories.groups import SampleOutcome as Outcome
from orchard._client.trajectories.options import TrajectoryFilter, TrajectoryOptions
from orchard._client.trajectories.recording import AsyncRecording
from orchard._client.trajectories.types import (
    Annotation,
    Blob,
    Deleted,
    Reward,
    StatsDimension,
    Step,
    StepValue,
    Task,
    TrajectoryInfo,
    TrajectoryOrder,
    TrajectoryStats,
    TrajectoryStatus,
)
from orchard._client.trajectories.writer import AnyStep, AsyncTrajectory
from orchard._client.units import Seconds
from orchard.trajectory.v1 import trajectory_service_pb2 as pb

if TYPE_CHECKING:
    from orchard._client.sync_sandbox import Sandbox
    from orchard._client.trajectories.bodies import AsyncBodies
    from orchard._client.trajectories.client import AsyncTrajectories


@explained
class Trajectories:
    """Trajectories of one's tenant. See AsyncTrajectories."""

    def __init__(self, portal: Portal, trajectories: AsyncTrajectories) -> None:
        self._portal = portal
        self._async = trajectories
        self.bodies = Bodies(portal, trajectories.bodies)
        """Images, large texts and other bodies that steps refer to."""
        self.groups = Groups(portal, trajectories.groups)
        """The attempts at one prompt: balanced rollout, advantages, verdicts."""

    @with_options(TrajectoryOptions)
    def create(self, task: Task | str | None = None, **given: Unpack[TrajectoryOptions]) -> Trajectory:
        """Open a trajectory to append to. See AsyncTrajectories.create."""
        return Trajectory(self._portal, self._portal.run(self._async.create(task, **given)))

    def open(self, trajectory_id: str, *, take_over: bool = False, writer: str = "") -> Trajectory:
        """Go on with an open trajectory, behind its last step. See AsyncTrajectories.open."""
        opening = self._async.open(trajectory_id, take_over=take_over, writer=writer)
        return Trajectory(self._portal, self._portal.run(opening))

    def seal(
        self,
        trajectory_id: str,
        status: TrajectoryStatus | str = TrajectoryStatus.COMPLETED,
        message: str = "",
        *,
        expected_steps: int | None = None,
    ) -> TrajectoryInfo:
        """End a trajectory; nothing can be appended afterwards. See AsyncTrajectories.seal."""
        return self._portal.run(self._async.seal(trajectory_id, status, message, expected_steps=expected_steps))

    def store(self, trajectories: Sequence[pb.NewTrajectory]) -> Sequence[pb.StoredTrajectory]:
        """Store whole trajectories in one call. See AsyncTrajectories.store."""
        return self.begin_store(trajectories).result()

    def begin_store(self, trajectories: Sequence[pb.NewTrajectory]) -> Storing:
        """As `store`, without waiting for it: the next call can be made ready meanwhile."""

        async def begin() -> asyncio.Task[Sequence[pb.StoredTrajectory]]:
            call = asyncio.create_task(self._async.store(trajectories), name="store trajectories")
            # Ctrl-C may leave it to nobody; how it ended is then nobody's error, and asyncio has nothing to tell of it.
            call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            return call

        return Storing(self._portal, self._portal.run(begin()))

    def get(self, trajectory_id: str) -> TrajectoryInfo:
        """All that is known of a trajectory but its steps."""
        return self._portal.run(self._async.get(trajectory_id))

    def values(self, trajectory_id: str) -> builtins.list[StepValue]:
        """The newest value of each step, name and judge, by index."""
        return self._portal.run(self._async.values(trajectory_id))

    def steps(self, trajectory_id: str, *, start: int = 0) -> Iterator[Step]:
        """The steps of a trajectory by index, from `start` on; of an open one those that are there now."""
        return self._portal.iterate(self._async.steps(trajectory_id, start=start))

    def follow(self, trajectory_id: str, *, start: int = 0) -> Iterator[Step]:
        """As `steps`, going on with what is appended until the trajectory is sealed."""
        return self._portal.iterate(self._async.follow(trajectory_id, start=start))

    @with_options(TrajectoryFilter)
    def list(
        self,
        *,
        order: TrajectoryOrder | str = TrajectoryOrder.CREATED,
        ascending: bool = False,
        page_size: int = 1000,
        **given: Unpack[TrajectoryFilter],
    ) -> Iterator[TrajectoryInfo]:
        """Trajectories by filter, page by page; newest (largest) first by default. See AsyncTrajectories.list."""
        return self._portal.iterate(self._async.list(order=order, ascending=ascending, page_size=page_size, **given))

    @with_options(TrajectoryFilter)
    def export(
        self, *, resume_token: str = "", metadata_only: bool = False, **given: Unpack[TrajectoryFilter]
    ) -> Iterator[ExportedTrajectory]:
        """Whole trajectories by filter, in the order of their creation. See AsyncTrajectories.export."""
        return self._portal.iterate(self._async.export(resume_token=resume_token, metadata_only=metadata_only, **given))

    def annotate(
        self,
        trajectory_id: str,
        *,
        rewards: Reward | Sequence[Reward] = (),
        values: Sequence[StepValue] = (),
        labels: Mapping[str, str] | None = None,
        annotation_id: str = "",
    ) -> TrajectoryInfo:
        """Add judgements and labels to a trajectory, open or sealed. See AsyncTrajectories.annotate."""
        return self._portal.run(
            self._async.annotate(
                trajectory_id, rewards=rewards, values=values, labels=labels, annotation_id=annotation_id
            )
        )

    def annotations(self, trajectory_id: str) -> Iterator[Annotation]:
        """The history of a trajectory's judgements, newest first."""
        return self._portal.iterate(self._async.annotations(trajectory_id))

    @with_options(TrajectoryFilter)
    def delete(
        self,
        *,
        all: bool = False,  # noqa: A002 (as on the command line)
        dry_run: bool = False,
        include_open: bool = False,
        **given: Unpack[TrajectoryFilter],
    ) -> Deleted:
        """Delete by filter, for good. See AsyncTrajectories.delete."""
        return self._portal.run(self._async.delete(all=all, dry_run=dry_run, include_open=include_open, **given))

    @with_options(TrajectoryFilter)
    def stats(
        self,
        *,
        group_by: StatsDimension | str = "",
        label: str = "",
        ks: Sequence[int] = (),
        **given: Unpack[TrajectoryFilter],
    ) -> builtins.list[TrajectoryStats]:
        """Counts by filter. See AsyncTrajectories.stats."""
        return self._portal.run(self._async.stats(group_by=group_by, label=label, ks=ks, **given))

    def message(self, step: Step) -> dict[str, Any]:
        """A step as a message in OpenAI's form: role, content, tool_calls, tool_call_id. Images are left out."""
        return self._portal.run(self._async.message(step))

    def text(self, step: Step) -> str:
        """The whole text of a step, with what is stored as a body."""
        return self._portal.run(self._async.text(step))


class Storing:
    """A call that stores trajectories, under way."""

    def __init__(self, portal: Portal, call: asyncio.Task[Sequence[pb.StoredTrajectory]]) -> None:
        self._portal = portal
        self._call = call

    def result(self) -> Sequence[pb.StoredTrajectory]:
        """Wait for its answer; raises what it raised. If the wait is interrupted, the call is cancelled."""

        async def wait() -> Sequence[pb.StoredTrajectory]:
            return await self._call

        return self._portal.run(wait())

    def cancel(self) -> None:
        """Wait for it no longer; what it stored is not known. A repeat is safe."""

        async def cancel() -> None:
            self._call.cancel()
            await asyncio.gather(self._call, return_exceptions=True)

        self._portal.run(cancel())


@explained
class Trajectory:
    """A trajectory to append to. See AsyncTrajectory."""

    def __init__(self, portal: Portal, trajectory: AsyncTrajectory) -> None:
        self._portal = portal
        self._async = trajectory

    def __repr__(self) -> str:
        return repr(self._async).replace("AsyncTrajectory", "Trajectory")

    @property
    def trajectory_id(self) -> str:
        """Its id."""
        return self._async.trajectory_id

    @property
    def info(self) -> TrajectoryInfo:
        """What was known of it last."""
        return self._async.info

    @property
    def next_index(self) -> int:
        """Index of the next step."""
        return self._async.next_index

    def append(self, *steps: AnyStep) -> int:
        """Add steps; on return they are durable. Gives the index of the next one. See AsyncTrajectory.append."""
        return self._portal.run(self._async.append(*steps))

    def seal(self, status: TrajectoryStatus | str = TrajectoryStatus.COMPLETED, message: str = "") -> TrajectoryInfo:
        """End it: nothing can be appended afterwards."""
        return self._portal.run(self._async.seal(status, message))


@explained
class Recording:
    """A trajectory that is recorded. Use it with `with`; it is sealed on the way out. See AsyncRecording."""

    def __init__(self, portal: Portal, recording: AsyncRecording) -> None:
        self._portal = portal
        self._async = recording

    def __enter__(self) -> Self:
        self._portal.run(self._async.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._portal.run(self._async.__aexit__(kind, error, traceback))

    @property
    def trajectory_id(self) -> str:
        """Its trajectory's id."""
        return self._async.trajectory_id

    @property
    def next_index(self) -> int:
        """Index of the next step."""

        async def ask() -> int:
            return self._async.next_index

        return self._portal.run(ask())

    @property
    def info(self) -> TrajectoryInfo | None:
        """How it was sealed, afterwards."""
        return self._async.info

    def add(self, *steps: AnyStep) -> None:
        """Add steps without waiting for them to be stored. A step without a time gets the present one."""

        async def add() -> None:
            self._async.add(*steps)

        self._portal.run(add())

    def append(self, *steps: AnyStep) -> int:
        """Add steps; on return they, and all before them, are durable. Gives the index of the next one."""
        return self._portal.run(self._async.append(*steps))

    def flush(self) -> None:
        """Return when everything that was added is durable."""
        self._portal.run(self._async.flush())

    def attach(self, sandbox: Sandbox) -> None:
        """Record the sandbox's commands that are run through this client from now on. See AsyncRecording.attach."""

        async def attach() -> None:
            self._async.attach(sandbox.asynchronous)

        self._portal.run(attach())

    def detach(self, sandbox: Sandbox) -> None:
        """Record the sandbox's commands no longer."""

        async def detach() -> None:
            self._async.detach(sandbox.asynchronous)

        self._portal.run(detach())

    def annotate(
        self,
        *,
        rewards: Reward | Sequence[Reward] = (),
        values: Sequence[StepValue] = (),
        labels: Mapping[str, str] | None = None,
    ) -> TrajectoryInfo:
        """Judge it; see AsyncTrajectories.annotate."""
        return self._portal.run(self._async.annotate(rewards=rewards, values=values, labels=labels))

    def reward(self, value: float, *, name: str = "outcome", judge: str = "", version: str = "") -> None:
        """Give it a reward that is a number. For anything else see `annotate`."""
        self._portal.run(self._async.reward(value, name=name, judge=judge, version=version))

    def end(self, status: TrajectoryStatus | str, message: str = "") -> None:
        """Say how it is to be sealed, whatever happens: "completed", "failed" or "aborted"."""
        self._async.end(status, message)


@explained
class Bodies:
    """See AsyncBodies."""

    def __init__(self, portal: Portal, bodies: AsyncBodies) -> None:
        self._portal = portal
        self._async = bodies

    def put(self, data: bytes | str | os.PathLike[str], media_type: str = "application/octet-stream") -> Blob:
        """Store bytes, or a file by its path; what is there already is not stored again. It is durable on return."""
        return self._portal.run(self._async.put(data, media_type))

    def get(self, blob: Blob | str) -> bytes:
        """A body by its reference or hash."""
        return self._portal.run(self._async.get(blob))

    def iterate(self, blob: Blob | str, *, offset: int = 0) -> Iterator[bytes]:
        """A body piece by piece, from the byte at `offset` on."""
        return self._portal.iterate(self._async.iterate(blob, offset=offset))


@explained
class Groups:
    """See AsyncGroups."""

    def __init__(self, portal: Portal, groups: AsyncGroups) -> None:
        self._portal = portal
        self._async = groups

    def create(self, group_id: str, *, task: Task | str | None = None, plan: RolloutPlan | None = None) -> GroupStart:
        """Begin a group. A repeat returns it as it is, with the samples that are still to start."""
        return self._portal.run(self._async.create(group_id, task=task, plan=plan))

    def claim(
        self,
        group_id: str = "",
        *,
        count: int = 1,
        worker: str = "",
        lease: Seconds = 3600.0,
        request_id: str = "",
    ) -> builtins.list[ClaimedSample]:
        """Take samples to make, each for one worker alone. See AsyncGroups.claim."""
        return self._portal.run(
            self._async.claim(group_id, count=count, worker=worker, lease=lease, request_id=request_id)
        )

    def report(
        self,
        group_id: str,
        index: int,
        *,
        reward: float | None = None,
        outcome: Outcome | str = "",
        trajectory_id: str = "",
        reason: str = "",
    ) -> Following:
        """Tell what a sample came to, and learn how many more to start and which to cancel. See AsyncGroups.report."""
        return self._portal.run(
            self._async.report(
                group_id, index, reward=reward, outcome=outcome, trajectory_id=trajectory_id, reason=reason
            )
        )

    def get(self, group_id: str) -> Group:
        """A group with its members, advantages and verdict."""
        return self._portal.run(self._async.get(group_id))

    def list(self, *, closed: bool | None = None, datasets: Sequence[str] = ()) -> Iterator[Group]:
        """Groups, newest first, page by page, without samples and members."""
        return self._portal.iterate(self._async.list(closed=closed, datasets=datasets))
