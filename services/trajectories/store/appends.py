"""Appending steps: many trajectories in one transaction, so that a thousand writers share the cost of a commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.common.db import Database
from services.common.errors import (
    AbortedError,
    FailedPreconditionError,
    OrchardError,
    ResourceExhaustedError,
)
from services.trajectories.model import NewStep, Status, Totals
from services.trajectories.refusals import not_found, written_by_another
from services.trajectories.store.changes import NOTIFY, payloads, told
from services.trajectories.store.rows import Connection, columns_of
from services.trajectories.store.tables import COUNTS, SCHEMA

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

    async def append(
        self, appends: Sequence[Append], early: Callable[[Mapping[int, int]], None] | None = None
    ) -> list[int | OrchardError]:
        """Add the steps of each; when this returns they are durable. `early` is told of those that are so before the
        others, by their places, with the indices as below.

        Returns, for each, the index of the trajectory's next step, or why not: UnavailableError where the database does
        not answer for that one, so that it is not known whether anything was added. A repeat is safe.

        Raises:
            UnavailableError: the same of all of them.
        """
        results: dict[int, int | OrchardError] = {}
        plain = _plain(appends)
        if plain:
            added = await self._append_plain(plain)
            results |= added
            if early is not None:
                early(added)
        rest = {position: append for position, append in enumerate(appends) if position not in results}
        if rest:
            try:
                results |= zip(rest, await self._append_any(list(rest.values())), strict=True)
            except OrchardError as error:
                # Of these alone: the ones above are durable.
                results |= dict.fromkeys(rest, error)
        return [results[position] for position in range(len(appends))]

    async def _append_plain(self, appends: Mapping[int, Append]) -> dict[int, int]:
        """Add what simply goes on where its trajectory ends, by one statement; returns what was added."""
        steps = [(position, step) for position, append in appends.items() for step in append.steps]
        totals = [sum_of([step.totals for step in append.steps]) for append in appends.values()]
        columns: list[list[Any]] = [
            list(appends),
            [append.tenant for append in appends.values()],
            [append.trajectory_id for append in appends.values()],
            [append.writer for append in appends.values()],
            [append.steps[0].index for append in appends.values()],
            [one.cost_usd for one in totals],
            *([getattr(one, name) for one in totals] for name in COUNTS),
            [position for position, _step in steps],
            [step.index for _position, step in steps],
            [step.body for _position, step in steps],
        ]
        async with self._database.driver(autocommit=True) as connection:
            cursor = await connection.execute(_PLAIN, columns)
            added = [row[0] for row in await cursor.fetchall()]
        return {position: appends[position].steps[-1].index + 1 for position in added}

    async def _append_any(self, appends: Sequence[Append]) -> list[int | OrchardError]:
        """Add the steps of each, or say why not."""
        async with self._database.driver() as connection:
            return await append_all(connection, appends)


async def append_all(connection: Connection, appends: Sequence[Append]) -> list[int | OrchardError]:
    """Add the steps of each within a transaction: the index of the trajectory's next step, or why not."""
    targets = await _targets(connection, {(append.tenant, append.trajectory_id) for append in appends})
    blobs = await _hold_blobs(connection, appends)
    results = [
        await _apply(connection, targets.get((append.tenant, append.trajectory_id)), append, blobs)
        for append in appends
    ]
    changed = [target for target in targets.values() if target.added]
    if changed:
        await _insert_steps(connection, changed)
        await _refer(connection, changed)
        for payload in payloads([target.key for target in changed]):
            await connection.execute(NOTIFY, [payload])
    await _update(connection, [target for target in targets.values() if target.status is Status.OPEN])
    return results


def _plain(appends: Sequence[Append]) -> dict[int, Append]:
    """Those that may be added without a look at what is there: steps, no bodies, one append for a trajectory."""
    times = Counter((append.tenant, append.trajectory_id) for append in appends)
    return {
        position: append
        for position, append in enumerate(appends)
        if append.steps
        and not append.take_over
        and times[append.tenant, append.trajectory_id] == 1
        and append.steps[-1].index < STEPS_MOST
        and not any(step.blobs for step in append.steps)
    }


_BIGINTS: Final = ", ".join("%s::bigint[]" for _ in COUNTS)
# SQL for the driver itself: what SQLAlchemy costs a statement is more than the statement does.
_NAMED: Final = f"""
    SELECT t.key, t.tenant, t.trajectory_id, t.status, t.writer, t.cost_usd, {", ".join(f"t.{name}" for name in COUNTS)}
    FROM {SCHEMA}.trajectories t
    JOIN unnest(%s::text[], %s::text[]) AS wanted (tenant, id)
    ON t.tenant = wanted.tenant AND t.trajectory_id = wanted.id
"""  # noqa: S608 (names of our own, here and below)
# In the order of their keys, so that two batches never wait for each other in a ring. One that is sealed is not locked:
# nothing is added to it, and whoever packs or deletes it may hold it for a while.
_LOCK: Final = f"{_NAMED} WHERE t.status = {Status.OPEN.value} ORDER BY t.key FOR UPDATE OF t"
_SEALED: Final = f"{_NAMED} WHERE t.status <> {Status.OPEN.value}"
# What is open, its writer's own, and ends where the steps begin, gets them; of anything else nothing is told, nor of
# what somebody else has locked: who waits for that does so with all else that has to be looked at.
_PLAIN: Final = f"""
    WITH news AS (
        SELECT * FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::bigint[], %s::float8[], {_BIGINTS})
        AS n (place, tenant, id, writer, first, cost_usd, {", ".join(COUNTS)})
    ), locked AS (
        SELECT t.key FROM {SCHEMA}.trajectories t JOIN news ON t.tenant = news.tenant AND t.trajectory_id = news.id
        WHERE t.status = {Status.OPEN.value} AND t.steps = news.first AND t.writer IN ('', news.writer)
        FOR UPDATE OF t SKIP LOCKED
    ), changed AS (
        UPDATE {SCHEMA}.trajectories t SET writer = news.writer, cost_usd = t.cost_usd + news.cost_usd,
            {", ".join(f"{name} = t.{name} + news.{name}" for name in _SUMS)},
            longest_tokens = greatest(t.longest_tokens, news.longest_tokens)
        FROM locked, news WHERE t.key = locked.key AND t.tenant = news.tenant AND t.trajectory_id = news.id
        RETURNING t.key, news.place
    ), added AS (
        INSERT INTO {SCHEMA}.steps (trajectory_key, "index", body)
        SELECT changed.key, s."index", s.body
        FROM unnest(%b::bigint[], %b::bigint[], %b::bytea[]) AS s (place, "index", body) JOIN changed USING (place)
    ), told AS ({told("changed")})
    SELECT place, (SELECT count(*) FROM told) FROM changed
"""  # noqa: S608
_HOLD: Final = f"""
    SELECT b.tenant, b.sha256 FROM {SCHEMA}.blobs b
    JOIN unnest(%s::text[], %s::text[]) AS wanted (tenant, sha256)
    ON b.tenant = wanted.tenant AND b.sha256 = wanted.sha256
    ORDER BY b.tenant, b.sha256 FOR KEY SHARE OF b
"""  # noqa: S608
_KNOWN: Final = f'SELECT "index", body FROM {SCHEMA}.steps WHERE trajectory_key = %s AND "index" BETWEEN %s AND %s'  # noqa: S608
# Binary, as COPY would have it: as text a body would be twice as long, and cost ten times as much to write.
_INSERT: Final = f"""
    INSERT INTO {SCHEMA}.steps (trajectory_key, "index", body)
    SELECT * FROM unnest(%b::bigint[], %b::bigint[], %b::bytea[])
"""  # noqa: S608
_REFER: Final = f"""
    INSERT INTO {SCHEMA}.blob_references (trajectory_key, sha256, tenant)
    SELECT * FROM unnest(%s::bigint[], %s::text[], %s::text[]) ON CONFLICT DO NOTHING
"""  # noqa: S608
_NEW: Final = ("writer", "cost_usd", *COUNTS)
_UPDATE: Final = f"""
    UPDATE {SCHEMA}.trajectories t SET {", ".join(f"{name} = news.{name}" for name in _NEW)}
    FROM unnest(%s::bigint[], %s::text[], %s::float8[], {_BIGINTS})
        AS news (key, {", ".join(_NEW)})
    WHERE t.key = news.key
"""  # noqa: S608


async def _targets(connection: Connection, names: set[tuple[str, str]]) -> dict[tuple[str, str], _Target]:
    """Lock those that are open; the sealed ones are there too."""
    found = await _find(connection, _LOCK, names)
    missing = names - found.keys()
    return found | await _find(connection, _SEALED, missing) if missing else found


async def _find(connection: Connection, query: str, names: set[tuple[str, str]]) -> dict[tuple[str, str], _Target]:
    ordered = sorted(names)
    cursor = await connection.execute(query, [[name[0] for name in ordered], [name[1] for name in ordered]])
    found = {}
    for key, tenant, trajectory_id, status, writer, cost_usd, *counts in await cursor.fetchall():
        totals = Totals(cost_usd=cost_usd, **dict(zip(COUNTS, counts, strict=True)))
        found[tenant, trajectory_id] = _Target(key, tenant, Status(status), writer, totals.steps, totals)
    return found


async def _hold_blobs(connection: Connection, appends: Sequence[Append]) -> set[tuple[str, str]]:
    """Of the bodies that the steps refer to, those that are stored; none of them is removed before the commit."""
    wanted = sorted(
        {(append.tenant, blob.sha256) for append in appends for step in append.steps for blob in step.blobs}
    )
    if not wanted:
        return set()
    cursor = await connection.execute(_HOLD, [[blob[0] for blob in wanted], [blob[1] for blob in wanted]])
    return {(row[0], row[1]) for row in await cursor.fetchall()}


async def _apply(
    connection: Connection, target: _Target | None, append: Append, blobs: set[tuple[str, str]]
) -> int | OrchardError:
    """Note what an append adds; checks first, so that a refused one adds nothing."""
    refused = _refusal(target, append, blobs)
    if refused is not None or target is None:
        return refused or not_found(append.trajectory_id)
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
    target.totals = sum_of([target.totals, *(step.totals for step in new)])
    return target.next_index


def _refusal(target: _Target | None, append: Append, blobs: set[tuple[str, str]]) -> OrchardError | None:
    name = append.trajectory_id
    if target is None:
        return not_found(name)
    if target.status is not Status.OPEN:
        return FailedPreconditionError(
            f"trajectory {name!r} is sealed; nothing can be appended", reason="TRAJECTORY_SEALED", trajectory_id=name
        )
    if target.writer not in ("", append.writer) and not append.take_over:
        return written_by_another(name)
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


async def _same(connection: Connection, target: _Target, steps: Sequence[NewStep]) -> bool:
    """Whether steps that are there already are the same."""
    known = {step.index: step.body for step in target.added}
    missing = [step.index for step in steps if step.index not in known]
    if missing:
        cursor = await connection.execute(_KNOWN, [target.key, missing[0], missing[-1]], binary=True)
        known |= {row[0]: bytes(row[1]) for row in await cursor.fetchall()}
    return all(known.get(step.index) == step.body for step in steps)


async def _insert_steps(connection: Connection, targets: Sequence[_Target]) -> None:
    rows = [(target.key, step.index, step.body) for target in targets for step in target.added]
    await connection.execute(_INSERT, columns_of(rows))


async def _refer(connection: Connection, targets: Sequence[_Target]) -> None:
    rows = {
        (target.key, blob.sha256, target.tenant) for target in targets for step in target.added for blob in step.blobs
    }
    if rows:
        await connection.execute(_REFER, columns_of(sorted(rows)))


async def _update(connection: Connection, targets: Sequence[_Target]) -> None:
    """Write counts and writers back, of all trajectories by one statement."""
    if targets:
        columns: list[list[Any]] = [
            [target.key for target in targets],
            [target.writer for target in targets],
            [target.totals.cost_usd for target in targets],
            *([getattr(target.totals, name) for target in targets] for name in COUNTS),
        ]
        await connection.execute(_UPDATE, columns)


def sum_of(totals: Sequence[Totals]) -> Totals:
    """What several add together."""
    return Totals(
        cost_usd=sum(one.cost_usd for one in totals),
        longest_tokens=max(one.longest_tokens for one in totals),
        **{name: sum(getattr(one, name) for one in totals) for name in _SUMS},
    )
