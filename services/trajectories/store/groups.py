"""Groups and their samples."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from orchard.rewards.balanced_rollout import Outcome, RolloutPlan
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.common.db import Database
from services.trajectories.store.tables import GROUPS, SAMPLES

_G: Final = GROUPS.c
_S: Final = SAMPLES.c
TASK_FIELDS: Final = ("dataset", "instance_id", "repo", "website", "split")
_PLAN_FIELDS: Final = ("group_size", "maximum", "stride", "low", "high", "eager")
_OUTCOMES: Final = {Outcome.POSITIVE: 1, Outcome.NEGATIVE: 2, Outcome.UNSCORED: 3}
_OUTCOME_OF: Final = {number: outcome for outcome, number in _OUTCOMES.items()}
CREATED: Final = -1
"""The cause of a group's first samples."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An attempt that ended; see orchard.trajectory.v1.Sample."""

    index: int
    outcome: Outcome
    reward: float | None = None
    reason: str = ""
    trajectory_id: str = ""


@dataclass(frozen=True, slots=True)
class Member:
    """A sample in a closed group."""

    sample: Sample
    advantage: float
    trainable: bool


@dataclass(frozen=True, slots=True)
class NewGroup:
    """What a create says. `task`: TASK_FIELDS by name."""

    group_id: str
    task: dict[str, str]
    plan: RolloutPlan
    need_positive: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's wish for samples.

    Attributes:
        group_id: of which group; empty: of any open one.
        count: at most so many.
        worker: who asks.
        lease_seconds: how long it may take.
        request_id: names the claim; empty: it cannot be repeated.
    """

    group_id: str
    count: int
    worker: str
    lease_seconds: float
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Closed:
    """What closes a group."""

    members: tuple[Member, ...]
    short: bool
    fallback: bool
    keep: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Group:
    """A stored group. Samples are in the order of their arrival, members in that of the group."""

    key: int
    group_id: str
    task: dict[str, str]
    plan: RolloutPlan
    need_positive: bool
    started: int
    closed: bool
    short: bool
    fallback: bool
    keep: bool
    verdict_reason: str
    create_time: datetime
    close_time: datetime | None
    samples: tuple[Sample, ...] = ()
    members: tuple[Member, ...] = ()

    @property
    def running(self) -> tuple[int, ...]:
        """Samples that were asked for and have not ended."""
        ended = {sample.index for sample in self.samples}
        return tuple(index for index in range(self.started) if index not in ended)


@dataclass(slots=True)
class LockedGroup:
    """A group that nobody else changes meanwhile."""

    group: Group
    _tenant: str
    _connection: AsyncConnection = field(repr=False)

    async def ended(self, sample: Sample) -> None:
        """Note a sample's end."""
        change = sa.update(SAMPLES).where(_S.group_key == self.group.key, _S["index"] == sample.index)
        await self._connection.execute(
            change.values(
                outcome=_OUTCOMES[sample.outcome],
                reward=sample.reward,
                reason=sample.reason,
                trajectory_id=sample.trajectory_id,
                arrival=len(self.group.samples),
            )
        )

    async def ask_for(self, indices: Iterable[int], cause: int) -> None:
        """More samples are wanted, because of the end of another."""
        rows = [_new_sample(self.group.key, index, cause) for index in indices]
        await self._connection.execute(insert(SAMPLES), rows)
        change = sa.update(GROUPS).where(_G.key == self.group.key)
        await self._connection.execute(change.values(started=self.group.started + len(rows)))

    async def close(self, closed: Closed, now: datetime) -> None:
        """Choose the members."""
        change = sa.update(GROUPS).where(_G.key == self.group.key)
        values = {"short": closed.short, "fallback": closed.fallback, "keep": closed.keep}
        await self._connection.execute(
            change.values(closed=True, close_time=now, verdict_reason=closed.reason, **values)
        )
        for place, member in enumerate(closed.members):
            here = sa.update(SAMPLES).where(_S.group_key == self.group.key, _S["index"] == member.sample.index)
            await self._connection.execute(
                here.values(place=place, advantage=member.advantage, trainable=member.trainable)
            )

    async def as_it_is(self, *, cause: int) -> tuple[Group, list[int]]:
        """The group with the changes, and the samples that were asked for because of one sample's end."""
        found = await _one(self._connection, self._tenant, self.group.group_id)
        query = sa.select(_S["index"]).where(_S.group_key == self.group.key, _S.cause == cause).order_by(_S["index"])
        indices = [row[0] for row in await self._connection.execute(query)]
        return found or self.group, indices


class GroupStore:
    """Reads and writes groups."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, tenant: str, new: NewGroup, first: int, now: datetime) -> tuple[Group, bool]:
        """Make a group with its first samples, or find it; and whether it has the same task and plan."""
        values = {
            "tenant": tenant,
            "group_id": new.group_id,
            **new.task,
            **{name: getattr(new.plan, name) for name in _PLAN_FIELDS},
            "need_positive": new.need_positive,
            "started": first,
            **dict.fromkeys(("closed", "short", "fallback", "keep"), False),
            "verdict_reason": "",
            "create_time": now,
        }
        async with self._database.transaction() as connection:
            made = insert(GROUPS).values(values).on_conflict_do_nothing().returning(_G.key)
            key = (await connection.execute(made)).scalar_one_or_none()
            if key is not None:
                rows = [_new_sample(key, index, CREATED) for index in range(first)]
                await connection.execute(insert(SAMPLES), rows)
            found = await _one(connection, tenant, new.group_id)
        if found is None:
            raise RuntimeError("a group vanished within the transaction that made it")
        known = NewGroup(found.group_id, found.task, found.plan, found.need_positive)
        return found, known == new

    async def get(self, tenant: str, group_id: str) -> Group | None:
        """One group."""
        async with self._database.transaction() as connection:
            return await _one(connection, tenant, group_id)

    @asynccontextmanager
    async def locked(self, tenant: str, group_id: str) -> AsyncIterator[LockedGroup | None]:
        """One group for changes, which are written together when the context is left."""
        async with self._database.transaction() as connection:
            found = await _one(connection, tenant, group_id, lock=True)
            yield None if found is None else LockedGroup(found, tenant, connection)

    async def unclaimed(self, key: int, now: datetime) -> list[int]:
        """Samples that were asked for, have not ended and are not claimed."""
        query = sa.select(_S["index"]).where(_S.group_key == key, _free(now)).order_by(_S["index"])
        async with self._database.transaction() as connection:
            return [row[0] for row in await connection.execute(query)]

    async def claim(
        self, tenant: str, claim: Claim, content_hash: str, now: datetime
    ) -> list[tuple[Group, int]] | None:
        """Give free samples of open groups, oldest first, to a worker, or find those that a repeat was given; None: the
        request id stands for another claim.
        """
        async with self._database.transaction() as connection:
            rows: list[tuple[int, int]] | None = None
            if claim.request_id:
                # A repeat that comes while the first is under way waits for it.
                lock = sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(f"{tenant}/{claim.request_id}", 0))
                await connection.execute(sa.select(lock))
                known = await _claimed(connection, tenant, claim.request_id)
                if any(row.claim_hash != content_hash for row in known):
                    return None
                if known:
                    rows = [
                        (row.group_key, row.index) for row in known if row.outcome is None and row.lease_time >= now
                    ]
            if rows is None:
                rows = await _take(connection, tenant, claim, content_hash, now)
            if not rows:
                return []
            query = sa.select(GROUPS).where(_G.key.in_({key for key, _index in rows}))
            groups = {row["key"]: _group(row) for row in (await connection.execute(query)).mappings()}
        return [(groups[key], index) for key, index in rows]

    async def page(
        self, tenant: str, *, closed: bool | None, datasets: Sequence[str], before: int | None, count: int
    ) -> tuple[list[Group], int | None]:
        """Groups behind the position `before`, newest first, without samples."""
        query = sa.select(GROUPS).where(_G.tenant == tenant).order_by(_G.key.desc()).limit(count)
        if closed is not None:
            query = query.where(_G.closed if closed else sa.not_(_G.closed))
        if datasets:
            query = query.where(_G.dataset.in_(datasets))
        if before is not None:
            query = query.where(_G.key < before)
        async with self._database.transaction() as connection:
            found = [_group(row) for row in (await connection.execute(query)).mappings()]
        return found, found[-1].key if len(found) == count else None


async def _claimed(connection: AsyncConnection, tenant: str, request_id: str) -> Sequence[Any]:
    """The samples that a request claimed and nobody after it."""
    query = (
        sa.select(_S.group_key, _S["index"], _S.claim_hash, _S.outcome, _S.lease_time)
        .join(GROUPS, _G.key == _S.group_key)
        .where(_G.tenant == tenant, _S.claim_id == request_id)
        .order_by(_S.group_key, _S["index"])
    )
    return (await connection.execute(query)).all()


async def _take(
    connection: AsyncConnection, tenant: str, claim: Claim, content_hash: str, now: datetime
) -> list[tuple[int, int]]:
    """Claim free samples."""
    where = [_G.tenant == tenant, sa.not_(_G.closed), _free(now)]
    if claim.group_id:
        where.append(_G.group_id == claim.group_id)
    free = (
        sa.select(_S.group_key, _S["index"])
        .join(GROUPS, _G.key == _S.group_key)
        .where(*where)
        .order_by(_S.group_key, _S["index"])
        .limit(claim.count)
        .with_for_update(of=SAMPLES, skip_locked=True)
    )
    rows = [(row[0], row[1]) for row in await connection.execute(free)]
    if rows:
        change = sa.update(SAMPLES).where(sa.tuple_(_S.group_key, _S["index"]).in_(rows))
        until = now + timedelta(seconds=claim.lease_seconds)
        values = {"worker": claim.worker, "lease_time": until, "claim_id": claim.request_id, "claim_hash": content_hash}
        await connection.execute(change.values(values))
    return rows


async def _one(connection: AsyncConnection, tenant: str, group_id: str, *, lock: bool = False) -> Group | None:
    which = (_G.tenant == tenant, _G.group_id == group_id)
    if lock:
        # Before the samples: whoever had the lock may have changed them too.
        await connection.execute(sa.select(_G.key).where(*which).with_for_update())
    # In one statement, which sees the group and its samples as of one moment.
    ended = sa.and_(_S.group_key == _G.key, _S.outcome.is_not(None))
    query = sa.select(GROUPS, SAMPLES).outerjoin(SAMPLES, ended).where(*which).order_by(_S.arrival)
    rows = (await connection.execute(query)).mappings().all()
    return _group(rows[0], [row for row in rows if row["outcome"] is not None]) if rows else None


def _group(row: sa.RowMapping, samples: Sequence[sa.RowMapping] = ()) -> Group:
    members = sorted((one for one in samples if one["place"] is not None), key=lambda one: one["place"])
    return Group(
        key=row["key"],
        group_id=row["group_id"],
        task={name: row[name] for name in TASK_FIELDS},
        plan=RolloutPlan(**{name: row[name] for name in _PLAN_FIELDS}),
        need_positive=row["need_positive"],
        started=row["started"],
        closed=row["closed"],
        short=row["short"],
        fallback=row["fallback"],
        keep=row["keep"],
        verdict_reason=row["verdict_reason"],
        create_time=row["create_time"],
        close_time=row["close_time"],
        samples=tuple(map(_sample, samples)),
        members=tuple(Member(_sample(one), one["advantage"], one["trainable"]) for one in members),
    )


def _sample(row: sa.RowMapping) -> Sample:
    return Sample(row["index"], _OUTCOME_OF[row["outcome"]], row["reward"], row["reason"], row["trajectory_id"])


def _new_sample(key: int, index: int, cause: int) -> dict[str, Any]:
    return {"group_key": key, "index": index, "cause": cause, "worker": "", "reason": "", "trajectory_id": ""}


def _free(now: datetime) -> sa.ColumnElement[bool]:
    return sa.and_(_S.outcome.is_(None), sa.or_(_S.lease_time.is_(None), _S.lease_time < now))
