"""AsyncTrajectories: keeps, finds, reads, judges, exports and deletes trajectories."""

from __future__ import annotations

import builtins
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, Unpack

from orchard._client.arguments import explained
from orchard._client.options import with_options
from orchard._client.paging import paged
from orchard._client.trajectories import convert, options
from orchard._client.trajectories import writer as writing
from orchard._client.trajectories.bodies import AsyncBodies
from orchard._client.trajectories.export import ExportedTrajectory, export
from orchard._client.trajectories.groups import AsyncGroups
from orchard._client.trajectories.options import TrajectoryFilter, TrajectoryOptions
from orchard._client.trajectories.types import (
    Annotation,
    Body,
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
from orchard._client.trajectories.writer import AsyncTrajectory
from orchard._client.transport import Transport
from orchard.trajectory.v1 import trajectory_service_pb2 as pb

_DELETED_AT_ONCE: Final = 1000


@explained
class AsyncTrajectories:
    """Trajectories of one's tenant; needs the scopes trajectories:read and trajectories:write.

    `client.record(...)` is the short way to keep one; these are the calls behind it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.bodies = AsyncBodies(transport)
        """Images, large texts and other bodies that steps refer to."""
        self.groups = AsyncGroups(transport)
        """The attempts at one prompt: balanced rollout, advantages, verdicts."""

    @with_options(TrajectoryOptions)
    async def create(self, task: Task | str | None = None, **given: Unpack[TrajectoryOptions]) -> AsyncTrajectory:
        """Open a trajectory to append to.

        Args:
            task: what it is an attempt at; a string is an instance's id.
            given: see TrajectoryOptions: group_id, attempt, harness, model, tools, labels, sandbox_id, ...

        Raises:
            AlreadyExists: the id is taken, with another description.
            InvalidArgument: a value breaks a rule.
        """
        request = pb.CreateTrajectoryRequest(trajectory=options.trajectory_message(task, given))
        response = await self._transport.unary(lambda c: c.trajectory.CreateTrajectory, request)
        info = convert.trajectory_of(response.trajectory)
        return AsyncTrajectory(self._transport, info, options.new_writer(), info.totals.steps)

    async def open(self, trajectory_id: str, *, take_over: bool = False, writer: str = "") -> AsyncTrajectory:
        """Go on with an open trajectory, behind its last step.

        Args:
            trajectory_id: which one.
            take_over: write in the place of whoever has it; that one's next append fails with WriterConflict.
            writer: who writes, 1 to 64 of A-Z, a-z, 0-9, '-', '_'. A program that was restarted goes on under the name
                that it had. Default: a new one.

        Raises:
            WriterConflict: another writer has it.
            TrajectorySealed, TrajectoryNotFound: as their names say.
        """
        name = writer or options.new_writer()
        following = await writing.append(self._transport, trajectory_id, name, (), take_over=take_over)
        return AsyncTrajectory(self._transport, await self.get(trajectory_id), name, following)

    async def seal(
        self,
        trajectory_id: str,
        status: TrajectoryStatus | str = TrajectoryStatus.COMPLETED,
        message: str = "",
        *,
        expected_steps: int | None = None,
    ) -> TrajectoryInfo:
        """End a trajectory; nothing can be appended afterwards. A repeat with the same status does nothing.

        Args:
            trajectory_id: which one.
            status: "completed" (the agent came to its own end), "failed" (it could not go on) or "aborted" (something
                that is not its fault ended it).
            message: why it failed or was aborted.
            expected_steps: how many steps it must have, so that none that is still under way is lost.

        Raises:
            TrajectorySealed: it was sealed with another status.
            FailedPrecondition: it has fewer steps (STEPS_MISSING).
        """
        return await writing.seal(self._transport, trajectory_id, status, message, expected_steps=expected_steps)

    async def store(self, trajectories: Sequence[pb.NewTrajectory]) -> Sequence[pb.StoredTrajectory]:
        """Store whole trajectories in one call: made, written, judged and sealed, each all or nothing.

        `orchard.data.server.store_all` makes such calls of any number of trajectories, of any size.

        Args:
            trajectories: in the wire's form (see NewTrajectory in the reference), at most 1 MiB in all.

        Raises:
            OrchardError: as the calls of their own do, of the first one that is refused; its metadata has the
                trajectory_id. Those before it are stored, and none behind it is.
            Unimplemented: the platform is of an earlier version; use `create` and what follows it.
        """
        return await writing.store(self._transport, trajectories)

    async def get(self, trajectory_id: str) -> TrajectoryInfo:
        """All that is known of a trajectory but its steps.

        Raises:
            TrajectoryNotFound: there is none of this id.
        """
        return convert.trajectory_of((await self._get(trajectory_id)).trajectory)

    async def values(self, trajectory_id: str) -> builtins.list[StepValue]:
        """The newest value of each step, name and judge, by index.

        Raises:
            TrajectoryNotFound: there is none of this id.
        """
        return [convert.value_of(value) for value in (await self._get(trajectory_id)).step_values]

    async def _get(self, trajectory_id: str) -> pb.GetTrajectoryResponse:
        return await self._transport.unary(
            lambda c: c.trajectory.GetTrajectory, pb.GetTrajectoryRequest(trajectory_id=trajectory_id)
        )

    def steps(self, trajectory_id: str, *, start: int = 0) -> AsyncGenerator[Step, None]:
        """The steps of a trajectory by index, from `start` on; of an open one those that are there now.

        Raises, while it is iterated:
            TrajectoryNotFound: there is none of this id.
        """
        return writing.read_steps(self._transport, trajectory_id, start, follow=False)

    def follow(self, trajectory_id: str, *, start: int = 0) -> AsyncGenerator[Step, None]:
        """As `steps`, going on with what is appended until the trajectory is sealed."""
        return writing.read_steps(self._transport, trajectory_id, start, follow=True)

    @with_options(TrajectoryFilter)
    def list(
        self,
        *,
        order: TrajectoryOrder | str = TrajectoryOrder.CREATED,
        ascending: bool = False,
        page_size: int = 1000,
        **given: Unpack[TrajectoryFilter],
    ) -> AsyncGenerator[TrajectoryInfo, None]:
        """Trajectories by filter, page by page; newest (largest) first by default.

        Args:
            order: "created", "outcome" (those without one last), "turns", "tokens" or "cost".
            ascending: oldest or smallest first.
            page_size: how many are asked for at once, at most 1,000.
            given: see TrajectoryFilter: datasets, models, statuses, labels, outcome_least, created_from, ...
        """
        request = pb.ListTrajectoriesRequest(
            page_size=page_size,
            filter=options.filter_message("list", given),
            order=convert.number_of("order", pb.TrajectoryOrder, "TRAJECTORY_ORDER_", TrajectoryOrder, order),
            ascending=ascending,
        )
        return paged(
            self._transport,
            lambda c: c.trajectory.ListTrajectories,
            request,
            lambda page: page.trajectories,
            convert.trajectory_of,
        )

    @with_options(TrajectoryFilter)
    def export(
        self, *, resume_token: str = "", metadata_only: bool = False, **given: Unpack[TrajectoryFilter]
    ) -> AsyncGenerator[ExportedTrajectory, None]:
        """Whole trajectories by filter, in the order of their creation; goes on where it was when a connection breaks.

        Args:
            resume_token: of the last trajectory that was received, to go on behind it later.
            metadata_only: leave the steps out.
            given: see TrajectoryFilter.
        """
        request = pb.ExportTrajectoriesRequest(
            filter=options.filter_message("export", given), resume_token=resume_token, metadata_only=metadata_only
        )
        return export(self._transport, request)

    async def annotate(
        self,
        trajectory_id: str,
        *,
        rewards: Reward | Sequence[Reward] = (),
        values: Sequence[StepValue] = (),
        labels: Mapping[str, str] | None = None,
        annotation_id: str = "",
    ) -> TrajectoryInfo:
        """Add judgements and labels to a trajectory, open or sealed. Nothing is overwritten: a reward supersedes the
        one of the same name, judge and rubric, and the history keeps both.

        Args:
            trajectory_id: which one.
            rewards: of the whole trajectory.
            values: of its steps.
            labels: labels to set; an empty value removes one.
            annotation_id: names this annotation, so that another program's repeat adds nothing. Default: a new one.

        Raises:
            TrajectoryNotFound: there is none of this id.
            AlreadyExists: the annotation id was used with other content.
            InvalidArgument: a value breaks a rule.
        """
        request = pb.AnnotateTrajectoryRequest(
            trajectory_id=trajectory_id,
            annotation_id=annotation_id or options.new_annotation_id(),
            rewards=[
                convert.reward_message(reward) for reward in ((rewards,) if isinstance(rewards, Reward) else rewards)
            ],
            step_values=[convert.value_message(value) for value in values],
            labels=labels,
        )
        response = await self._transport.unary(lambda c: c.trajectory.AnnotateTrajectory, request)
        return convert.trajectory_of(response.trajectory)

    def annotations(self, trajectory_id: str) -> AsyncGenerator[Annotation, None]:
        """The history of a trajectory's judgements, newest first.

        Raises:
            TrajectoryNotFound: there is none of this id.
        """
        request = pb.ListAnnotationsRequest(trajectory_id=trajectory_id, page_size=1000)
        return paged(
            self._transport,
            lambda c: c.trajectory.ListAnnotations,
            request,
            lambda page: page.annotations,
            convert.annotation_of,
        )

    @with_options(TrajectoryFilter)
    async def delete(
        self,
        *,
        all: bool = False,  # noqa: A002 (as on the command line)
        dry_run: bool = False,
        include_open: bool = False,
        **given: Unpack[TrajectoryFilter],
    ) -> Deleted:
        """Delete by filter, for good. Bodies that nothing refers to any more go a day later.

        Args:
            all: every trajectory of the tenant; otherwise at least one condition must be given.
            dry_run: count only.
            include_open: also those that are still written.
            given: see TrajectoryFilter.

        Raises:
            InvalidArgument: there is neither a condition nor `all`.
        """
        request = pb.DeleteTrajectoriesRequest(
            filter=options.filter_message("delete", given),
            all=all,
            dry_run=dry_run,
            include_open=include_open,
            limit=_DELETED_AT_ONCE,
        )
        deleted = text_bytes = 0
        while True:
            response = await self._transport.unary(lambda c: c.trajectory.DeleteTrajectories, request)
            deleted += response.deleted
            text_bytes += response.text_bytes
            if dry_run or not response.deleted or not response.remaining:
                return Deleted(deleted, text_bytes, response.open_skipped)

    @with_options(TrajectoryFilter)
    async def stats(
        self,
        *,
        group_by: StatsDimension | str = "",
        label: str = "",
        ks: Sequence[int] = (),
        **given: Unpack[TrajectoryFilter],
    ) -> builtins.list[TrajectoryStats]:
        """Counts by filter: how many, how many of them resolved, turns, tokens, cost and the pass@k family.

        Args:
            group_by: one row for each "harness", "model", "repo", "dataset", "website", "policy_version" or value of
                `label`, most first. Default: one row in all.
            label: group by the values of this label.
            ks: values of k for pass@k, at most 10.
            given: see TrajectoryFilter.
        """
        dimension = str(group_by) or ("label" if label else "")
        request = pb.GetStatsRequest(filter=options.filter_message("stats", given), label=label, ks=ks)
        if dimension:
            request.group_by = convert.number_of(
                "group_by", pb.StatsDimension, "STATS_DIMENSION_", StatsDimension, dimension
            )
        response = await self._transport.unary(lambda c: c.trajectory.GetStats, request)
        return [convert.stats_of(row) for row in response.rows]

    async def message(self, step: Step) -> dict[str, Any]:
        """A step as a message in OpenAI's form: role, content, tool_calls, tool_call_id. Images are left out."""
        return convert.openai_message(step, str(step.role), await self.text(step))

    async def text(self, step: Step) -> str:
        """The whole text of a step, with what is stored as a body."""
        pieces = []
        for part in step.parts:
            if isinstance(part, str):
                pieces.append(part)
            elif part.media_type == "text/plain":
                data = part.data if isinstance(part, Body) else await self.bodies.get(part)
                pieces.append(data.decode(errors="replace"))
        return "".join(pieces)
