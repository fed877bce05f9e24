"""Use cases of trajectories: create, append, seal, read, list, annotate, delete. Each acts within a tenant."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from services.common.errors import InternalError, UnavailableError
from services.common.hub import Hubs
from services.common.logs import get_logger
from services.common.objects import ObjectNotFoundError, ObjectStore
from services.trajectories.appender import Appender
from services.trajectories.model import (
    Annotation,
    Description,
    Dimension,
    Filter,
    Order,
    Stats,
    Status,
    StepValue,
    Trajectory,
)
from services.trajectories.packing import DamagedError, Run, frame, runs, unpacked
from services.trajectories.refusals import described_otherwise, not_annotated, not_found, not_sealed
from services.trajectories.store.annotations import AnnotationStore
from services.trajectories.store.appends import Append
from services.trajectories.store.stats import StatsStore
from services.trajectories.store.trajectories import Deleted, End, TrajectoryStore

_log = get_logger(__name__)

_BATCH_BYTES: Final = 512 << 10
_FOLLOW_SECONDS: Final = 4.0


class Trajectories:
    """Trajectories of every tenant."""

    def __init__(  # noqa: PLR0917
        self,
        store: TrajectoryStore,
        annotations: AnnotationStore,
        stats: StatsStore,
        appender: Appender,
        objects: ObjectStore,
        clock: Callable[[], datetime],
        *,
        sealed: Callable[[], None],
    ) -> None:
        self._store = store
        self._annotations = annotations
        self._stats = stats
        self._appender = appender
        self._objects = objects
        self._clock = clock
        self._sealed = sealed
        self._changes: Hubs[int, int] = Hubs()

    # Writing

    async def create(self, tenant: str, description: Description) -> Trajectory:
        """Open a trajectory; see TrajectoryService.CreateTrajectory."""
        if not description.trajectory_id:
            description = replace(description, trajectory_id=f"tr-{secrets.token_hex(12)}")
        found, same = await self._store.create(tenant, description, self._clock())
        if not same:
            raise described_otherwise(description.trajectory_id)
        return found

    async def append(self, append: Append) -> int:
        """Add steps; they are durable when this returns the index of the next one."""
        return await self._appender.append(append)

    async def seal(
        self, tenant: str, trajectory_id: str, status: Status, message: str, expected_steps: int | None
    ) -> Trajectory:
        """End a trajectory; see TrajectoryService.SealTrajectory."""
        end = End(trajectory_id, status, message, expected_steps)
        found, sealed = await self._store.seal(tenant, end, self._clock())
        if found is None:
            raise not_found(trajectory_id)
        if sealed:
            self._sealed()
            return found
        refused = not_sealed(
            trajectory_id, now=found.status, steps=found.totals.steps, wanted=status, expected=expected_steps
        )
        if refused is not None:
            raise refused
        return found

    async def annotate(self, tenant: str, trajectory_id: str, annotation: Annotation) -> Trajectory:
        """Add judgements; see TrajectoryService.AnnotateTrajectory."""
        named = annotation if annotation.annotation_id else replace(annotation, annotation_id=secrets.token_hex(12))
        outcome, found = await self._annotations.add(tenant, trajectory_id, named, self._clock())
        if found is None:
            raise not_found(trajectory_id)
        refused = not_annotated(outcome, trajectory_id, named, found.totals.steps)
        if refused is not None:
            raise refused
        return found

    async def delete(self, tenant: str, wanted: Filter, *, include_open: bool, limit: int, dry_run: bool) -> Deleted:
        """Delete by filter; see TrajectoryService.DeleteTrajectories."""
        return await self._store.delete(
            tenant, wanted, include_open=include_open, limit=limit, dry_run=dry_run, now=self._clock()
        )

    # Reading

    async def get(self, tenant: str, trajectory_id: str) -> Trajectory:
        """One trajectory.

        Raises:
            NotFoundError: there is none of this id.
        """
        found = await self._store.get(tenant, trajectory_id)
        if found is None:
            raise not_found(trajectory_id)
        return found

    async def step_values(self, keys: Sequence[int]) -> dict[int, list[StepValue]]:
        """The newest values of steps, by trajectory."""
        return await self._store.step_values(keys)

    async def page(
        self,
        tenant: str,
        wanted: Filter,
        order: Order,
        *,
        ascending: bool,
        after: tuple[bool, Any, int] | None,
        count: int,
    ) -> tuple[Sequence[Trajectory], tuple[bool, Any, int] | None]:
        """A page of trajectories."""
        return await self._store.page(tenant, wanted, order, ascending=ascending, after=after, count=count)

    async def history(
        self, tenant: str, trajectory_id: str, before: int | None, count: int
    ) -> tuple[Sequence[Annotation], int | None]:
        """A page of a trajectory's annotations."""
        trajectory = await self.get(tenant, trajectory_id)
        return await self._annotations.page(trajectory.key, before, count)

    async def stats(
        self, tenant: str, wanted: Filter, dimension: Dimension, label: str, ks: Sequence[int]
    ) -> Sequence[Stats]:
        """Counts."""
        return await self._stats.stats(tenant, wanted, dimension, label, ks)

    async def read(self, trajectory: Trajectory, first: int) -> AsyncGenerator[Run, None]:
        """The steps from `first` on, framed (packing.py).

        Raises:
            InternalError: OBJECT_DAMAGED: these are not all of them, and what is missing is nowhere.
            UnavailableError: read on from the next one.
        """
        while not trajectory.object_name:
            rows = await self._store.steps(trajectory.key, first - 1, _BATCH_BYTES)
            if rows:
                yield Run(rows[0][0], len(rows), b"".join(frame(body) for _index, body in rows))
                first = rows[-1][0] + 1
                continue
            # At the end; unless they were packed while they were read.
            trajectory = await self._again(trajectory)
            if not trajectory.object_name or first >= trajectory.totals.steps:
                return
        chunks = unpacked(self._objects.chunks(trajectory.object_name))
        try:
            async for run in runs(chunks, first=first, most_bytes=_BATCH_BYTES):
                yield run
                first = run.first + run.count
        except DamagedError:
            raise _damaged(trajectory) from None
        except ObjectNotFoundError:
            await self._again(trajectory)  # it may just have been deleted
            raise UnavailableError("the trajectory's object is not to be found; retry", reason="OBJECT_LOST") from None
        if first < trajectory.totals.steps:
            raise _damaged(trajectory)

    async def follow(self, trajectory: Trajectory, first: int, stopped: Callable[[], bool]) -> AsyncIterator[bytes]:
        """As `read`, going on with what is appended until the seal. Empty bytes are a sign of life."""
        with self._changes.subscribe(trajectory.key) as changes:
            while True:
                trajectory = await self._again(trajectory)
                if first < trajectory.totals.steps:
                    async with aclosing(self.read(trajectory, first)) as found:
                        async for run in found:
                            yield run.framed
                            first = run.first + run.count
                elif trajectory.status is not Status.OPEN:
                    return
                else:
                    yield b""
                    await changes.next(_FOLLOW_SECONDS)
                if stopped():
                    raise UnavailableError("the service stops; read on from the next step", reason="SERVER_STOPPING")

    async def _again(self, trajectory: Trajectory) -> Trajectory:
        """What it is now. One that was made under its id after it was deleted is another."""
        found = await self.get(trajectory.tenant, trajectory.description.trajectory_id)
        if found.key != trajectory.key:
            raise not_found(trajectory.description.trajectory_id)
        return found

    async def count(self, tenant: str, wanted: Filter) -> int:
        """How many a filter selects."""
        return await self._store.count(tenant, wanted)

    def changed(self, keys: Sequence[int]) -> None:
        """Trajectories changed."""
        for key in keys:
            self._changes.publish(key, key)

    def wake(self) -> None:
        """Any trajectory may have changed, or the server stops."""
        self._changes.wake()


def _damaged(trajectory: Trajectory) -> InternalError:
    trajectory_id = trajectory.description.trajectory_id
    _log.error("a packed object is damaged", trajectory_id=trajectory_id, object_name=trajectory.object_name)
    return InternalError(
        f"the stored steps of trajectory {trajectory_id!r} are damaged; retrying does not help: have their object "
        "restored, the service's log names it, or delete the trajectory",
        reason="OBJECT_DAMAGED",
        trajectory_id=trajectory_id,
    )
