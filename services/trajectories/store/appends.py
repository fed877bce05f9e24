"""Appending steps: many trajectories in one transaction, so that a thousand writers share the cost of a commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.common.db import Database
from services.common.errors import (
    AbortedError,
    FailedPreconditionError,
    NotFoundError,
    OrchardError,
    ResourceExhaustedError,
)
from services.trajectories.model import NewStep, Status, Totals
from services.trajectories.store.changes import announce
from services.trajectories.store.tables import BLOB_REFERENCES, BLOBS, COUNTS, SCHEMA, STEPS, TRAJECTORIES

STEPS_MOST: Final = 100_000
_SUMS: Final = tuple(name for name in COUNTS if name != "longest_tokens")


@dataclass(frozen=True, slots=True)
class Append:
    """Steps of one writer for one trajectory, by index without holes."""

    tenant: str
    trajectory_id: str
    writer: str
    take_over: bool
    steps: tuple[NewStep, ...] = field(repr=False)


@dataclass(slots=True)
class _Target:
    """A locked trajectory, and what the batch adds to it."""

    key: int
    tenant: str
    status: Status
    writer: str
    next_index: int
    totals: Totals
    added: list[NewStep] = field(default_factory=list)


class AppendStore:
    """Writes steps."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def append(self, appends: Sequence[Append]) -> list[int | OrchardError]:
        """Add the steps of each; when this returns they are durable.

        Returns, for each, the index of the trajectory's next step, or why nothing of it was added.

        Raises:
            UnavailableError: the database does not answer. Whether anything was added is not known; a repeat is safe.
        """
        async with self._database.transaction() as connection:
            targets = await _targets(connection, {(append.tenant, append.trajectory_id) for append in appends})
            blobs = await _hold_blobs(connection, appends)
            results = [
                await _apply(connection, targets.get((append.tenant, append.trajectory_id)), append, blobs)
                for append in appends
            ]
            changed = [target for target in targets.values() if target.added]
            if changed:
                await _copy_steps(connection, changed)
                await announce(connection, [target.key for target in changed])
                await _refer(connection, changed)
            await _update(connection, [target for target in targets.values() if target.status is Status.OPEN])
        return results


def _named() -> sa.Select[Any]:
    """What a target is made of, of the trajectories that are named."""
    table = TRAJECTORIES.c
    wanted = sa.select(
        sa.func.unnest(sa.bindparam("tenants", type_=sa.ARRAY(sa.Text))).label("tenant"),
        sa.func.unnest(sa.bindparam("ids", type_=sa.ARRAY(sa.Text))).label("id"),
    ).subquery()
    return (
        sa.select(table.key, table.tenant, table.trajectory_id, table.status, table.writer, table.cost_usd)
        .add_columns(*(table[name] for name in COUNTS))
        .join(wanted, sa.and_(table.tenant == wanted.c.tenant, table.trajectory_id == wanted.c.id))
    )


# Statements are built once: to build one and find it in SQLAlchemy's cache again costs more than to run it.
_OPEN: Final = TRAJECTORIES.c.status == Status.OPEN.value
# In the order of their keys, so that two batches never wait for each other in a ring. One that is sealed is not locked:
# whoever packs it holds it for as long as the object store takes.
_LOCK: Final = _named().where(_OPEN).order_by(TRAJECTORIES.c.key).with_for_update(of=TRAJECTORIES)
_SEALED: Final = _named().where(~_OPEN)


async def _targets(connection: AsyncConnection, names: set[tuple[str, str]]) -> dict[tuple[str, str], _Target]:
    """Lock those that are open; the sealed ones are there too."""
    found = await _find(connection, _LOCK, names)
    missing = names - found.keys()
    return found | await _find(connection, _SEALED, missing) if missing else found


async def _find(
    connection: AsyncConnection, query: sa.Select[Any], names: set[tuple[str, str]]
) -> dict[tuple[str, str], _Target]:
    ordered = sorted(names)
    values = {"tenants": [name[0] for name in ordered], "ids": [name[1] for name in ordered]}
    found = {}
    for row in (await connection.execute(query, values)).mappings():
        totals = Totals(cost_usd=row["cost_usd"], **{name: row[name] for name in COUNTS})
        found[row["tenant"], row["trajectory_id"]] = _Target(
            row["key"], row["tenant"], Status(row["status"]), row["writer"], row["steps"], totals
        )
    return found


async def _hold_blobs(connection: AsyncConnection, appends: Sequence[Append]) -> set[tuple[str, str]]:
    """Of the bodies that the steps refer to, those that are stored; none of them is removed before the commit."""
    wanted = sorted(
        {(append.tenant, blob.sha256) for append in appends for step in append.steps for blob in step.blobs}
    )
    if not wanted:
        return set()
    query = (
        sa.select(BLOBS.c.tenant, BLOBS.c.sha256)
        .where(sa.tuple_(BLOBS.c.tenant, BLOBS.c.sha256).in_(wanted))
        .order_by(BLOBS.c.tenant, BLOBS.c.sha256)
        .with_for_update(key_share=True, read=True)
    )
    return {(row[0], row[1]) for row in await connection.execute(query)}


async def _apply(
    connection: AsyncConnection, target: _Target | None, append: Append, blobs: set[tuple[str, str]]
) -> int | OrchardError:
    """Note what an append adds; checks first, so that a refused one adds nothing."""
    refused = _refusal(target, append, blobs)
    if refused is not None or target is None:
        return refused or _not_found(append.trajectory_id)
    repeated = [step for step in append.steps if step.index < target.next_index]
    if repeated and not await _same(connection, target, repeated):
        return AbortedError(
            f"trajectory {append.trajectory_id!r} has other steps at {repeated[0].index} and after; read them, and "
            f"append from {target.next_index}",
            reason="STEP_CONFLICT",
            trajectory_id=append.trajectory_id,
            next_index=target.next_index,
        )
    new = append.steps[len(repeated) :]
    if new and new[0].index != target.next_index:
        return FailedPreconditionError(
            f"step {new[0].index} of trajectory {append.trajectory_id!r} would leave a hole; the next is "
            f"{target.next_index}",
            reason="STEP_GAP",
            trajectory_id=append.trajectory_id,
            next_index=target.next_index,
        )
    target.writer = append.writer
    target.added += new
    target.next_index += len(new)
    for step in new:
        target.totals = _sum(target.totals, step.totals)
    return target.next_index


def _refusal(target: _Target | None, append: Append, blobs: set[tuple[str, str]]) -> OrchardError | None:
    name = append.trajectory_id
    if target is None:
        return _not_found(name)
    if target.status is not Status.OPEN:
        return FailedPreconditionError(
            f"trajectory {name!r} is sealed; nothing can be appended", reason="TRAJECTORY_SEALED", trajectory_id=name
        )
    if target.writer not in ("", append.writer) and not append.take_over:
        return AbortedError(
            f"another writer has trajectory {name!r}; set take_over to write in its place",
            reason="WRITER_CONFLICT",
            trajectory_id=name,
        )
    if append.steps and append.steps[-1].index >= STEPS_MOST:
        return ResourceExhaustedError(
            f"a trajectory has at most {STEPS_MOST:,} steps; begin another one", reason="TOO_MANY_STEPS"
        )
    for step in append.steps:
        for blob in step.blobs:
            if (append.tenant, blob.sha256) not in blobs:
                return FailedPreconditionError(
                    f"step {step.index} refers to a body {blob.sha256} that is not stored; store it with PutBlob first",
                    reason="BLOB_NOT_FOUND",
                    sha256=blob.sha256,
                )
    return None


async def _same(connection: AsyncConnection, target: _Target, steps: Sequence[NewStep]) -> bool:
    """Whether steps that are there already are the same."""
    known = {step.index: step.body for step in target.added}
    missing = [step.index for step in steps if step.index not in known]
    if missing:
        query = sa.select(STEPS.c["index"], STEPS.c.body).where(
            STEPS.c.trajectory_key == target.key, STEPS.c["index"].between(missing[0], missing[-1])
        )
        known |= {row[0]: bytes(row[1]) for row in await connection.execute(query)}
    return all(known.get(step.index) == step.body for step in steps)


async def _copy_steps(connection: AsyncConnection, targets: Sequence[_Target]) -> None:
    # COPY costs a fifth of what inserts of the same rows do.
    raw: Any = (await connection.get_raw_connection()).driver_connection
    async with (
        raw.cursor() as cursor,
        cursor.copy(f'COPY {SCHEMA}.steps (trajectory_key, "index", body) FROM STDIN (FORMAT BINARY)') as copy,
    ):
        copy.set_types(["int8", "int8", "bytea"])
        for target in targets:
            for step in target.added:
                await copy.write_row((target.key, step.index, step.body))


async def _refer(connection: AsyncConnection, targets: Sequence[_Target]) -> None:
    rows = {
        (target.key, blob.sha256): {"trajectory_key": target.key, "sha256": blob.sha256, "tenant": target.tenant}
        for target in targets
        for step in target.added
        for blob in step.blobs
    }
    if rows:
        await connection.execute(insert(BLOB_REFERENCES).on_conflict_do_nothing(), list(rows.values()))


def _write_back() -> sa.Update:
    kinds: dict[str, Any] = {"key": sa.BigInteger, "writer": sa.Text, "cost_usd": sa.Double}
    kinds |= dict.fromkeys(COUNTS, sa.BigInteger)
    news = sa.select(
        *(sa.func.unnest(sa.bindparam(f"new_{name}", type_=sa.ARRAY(kind))).label(name) for name, kind in kinds.items())
    ).subquery("news")
    return (
        sa.update(TRAJECTORIES)
        .where(TRAJECTORIES.c.key == news.c.key)
        .values({name: news.c[name] for name in kinds if name != "key"})
    )


_UPDATE: Final = _write_back()


async def _update(connection: AsyncConnection, targets: Sequence[_Target]) -> None:
    """Write counts and writers back, of all trajectories by one statement."""
    if not targets:
        return
    values: dict[str, list[Any]] = {
        "new_key": [target.key for target in targets],
        "new_writer": [target.writer for target in targets],
        "new_cost_usd": [target.totals.cost_usd for target in targets],
        **{f"new_{name}": [getattr(target.totals, name) for target in targets] for name in COUNTS},
    }
    await connection.execute(_UPDATE, values)


def _sum(totals: Totals, more: Totals) -> Totals:
    return replace(
        totals,
        cost_usd=totals.cost_usd + more.cost_usd,
        longest_tokens=max(totals.longest_tokens, more.longest_tokens),
        **{name: getattr(totals, name) + getattr(more, name) for name in _SUMS},
    )


def _not_found(trajectory_id: str) -> NotFoundError:
    return NotFoundError(
        f"there is no trajectory {trajectory_id!r}", reason="TRAJECTORY_NOT_FOUND", trajectory_id=trajectory_id
    )
