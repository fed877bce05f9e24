"""What judges answered and what it took. Calls that end at the same time are written together.

They all count in the same rows, of their batch and of their judge's day: one transaction each would take turns at them,
each with its own write to disk.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.judge.answers.reading import Finish
from services.judge.asking import Kept, Place
from services.judge.model import NOTHING, Usage
from services.judge.store.tables import ANSWERS, BATCHES, COUNTS, USAGE
from services.judge.store.turns import Turns

_A: Final = ANSWERS.c
_B: Final = BATCHES.c
_U: Final = USAGE.c
SUMS: Final = (*COUNTS, "cost_usd")
_TOGETHER: Final = 200
_PLACE: Final = ("tenant", "run", "judge", "vote", "swapped", "attempt")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a call is: its usage is counted by these. `batch_id` empty: of no batch."""

    tenant: str
    run: str
    judge: str
    model: str
    rubric: str
    batch_id: str = ""


@dataclass(eq=False, slots=True)
class _Call:
    """One that is to be written."""

    owner: Owner
    usage: Usage
    day: date
    kept: Kept | None
    written: bool = False
    error: BaseException | None = field(default=None, repr=False)

    def row(self) -> dict[str, Any]:
        """Of ANSWERS."""
        kept = self.kept
        assert kept is not None  # noqa: S101 (for the type checker)
        return {
            "tenant": self.owner.tenant,
            "run": self.owner.run,
            "finish": kept.finish.value,
            **{name: getattr(kept, name) for name in ("ticket", "sha256", "words", "model", "latency_seconds")},
            **kept.place._asdict(),
            **asdict(kept.usage),
        }


class CallStore:
    """Rows of ANSWERS, and the sums of BATCHES and USAGE."""

    def __init__(self, database: Turns) -> None:
        self._database = database
        self._waiting: list[_Call] = []
        self._writing = asyncio.Lock()

    async def answers(self, tenant: str, run: str) -> Sequence[Kept]:
        """What was received for a question that has no verdict yet."""
        async with self._database.reading() as connection:
            rows = await connection.execute(sa.select(ANSWERS).where(_A.tenant == tenant, _A.run == run))
            return [_kept(row) for row in rows.mappings()]

    async def called(self, owner: Owner, usage: Usage, day: date, kept: Kept | None = None) -> None:
        """Count a call, and keep its answer; it is durable on return. A repeat does nothing.

        Raises:
            UnavailableError: the database does not answer.
        """
        call = _Call(owner, usage, day, kept)
        self._waiting.append(call)
        async with self._writing:
            # Whoever is first writes for all who have come in the meantime.
            if not call.written:
                calls, self._waiting = self._waiting[:_TOGETHER], self._waiting[_TOGETHER:]
                await self._write(calls)
        if call.error is not None:
            raise call.error

    async def usage(self, tenant: str, first: date, before: date, most: int) -> list[tuple[str, str, str, Usage]]:
        """Sums by judge, model and rubric over days."""
        by = (_U.judge, _U.model, _U.rubric)
        sums = [sa.func.sum(_U[name]).label(name) for name in SUMS]
        query = sa.select(*by, *sums).where(_U.tenant == tenant, _U.day >= first, _U.day < before)
        async with self._database.reading() as connection:
            rows = await connection.execute(query.group_by(*by).order_by(*by).limit(most))
            return [(row["judge"], row["model"], row["rubric"], usage_of(row)) for row in rows.mappings()]

    async def _write(self, calls: Sequence[_Call]) -> None:
        error: BaseException | None = None
        try:
            async with self._database.transaction() as connection:
                await _count(connection, await _new(connection, calls))
        except BaseException as raised:
            error = raised
            if not isinstance(raised, Exception):
                raise
        finally:
            for call in calls:
                call.written, call.error = True, error


async def _new(connection: AsyncConnection, calls: Sequence[_Call]) -> list[_Call]:
    """Store the answers; gives the calls that are to be counted, those without an answer included."""
    answered = {tuple(call.row()[name] for name in _PLACE): call for call in calls if call.kept is not None}
    counted = [call for call in calls if call.kept is None]
    if answered:
        statement = insert(ANSWERS).values([call.row() for call in answered.values()]).on_conflict_do_nothing()
        stored = await connection.execute(statement.returning(*(_A[name] for name in _PLACE)))
        counted += [answered[tuple(row)] for row in stored]
    return counted


async def _count(connection: AsyncConnection, calls: Sequence[_Call]) -> None:
    batches: defaultdict[tuple[str, str], Usage] = defaultdict(lambda: NOTHING)
    days: defaultdict[tuple[Any, ...], Usage] = defaultdict(lambda: NOTHING)
    for call in calls:
        owner = call.owner
        days[owner.tenant, call.day, owner.judge, owner.model, owner.rubric] += call.usage
        if owner.batch_id:
            batches[owner.tenant, owner.batch_id] += call.usage
    # In one order everywhere: replicas that count in the same rows wait for each other, never in a circle.
    for (tenant, batch_id), usage in sorted(batches.items(), key=lambda item: item[0]):
        batch = sa.update(BATCHES).where(_B.tenant == tenant, _B.batch_id == batch_id)
        await connection.execute(batch.values({name: _B[name] + getattr(usage, name) for name in SUMS}))
    if days:
        keys = ["tenant", "day", "judge", "model", "rubric"]
        rows = [dict(zip(keys, key, strict=True)) | asdict(usage) for key, usage in sorted(days.items(), key=_key)]
        statement = insert(USAGE).values(rows)
        sums = {name: _U[name] + statement.excluded[name] for name in SUMS}
        await connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=sums))


def _key(item: tuple[tuple[Any, ...], Usage]) -> tuple[Any, ...]:
    return item[0]


def usage_of(row: Mapping[Any, Any]) -> Usage:
    """The sums of a row."""
    return Usage(**{name: int(row[name]) for name in COUNTS}, cost_usd=float(row["cost_usd"]))


def _kept(row: Mapping[Any, Any]) -> Kept:
    return Kept(
        place=Place(row["judge"], row["vote"], row["swapped"], row["attempt"]),
        ticket=row["ticket"],
        sha256=row["sha256"],
        finish=Finish(row["finish"]),
        words=row["words"],
        model=row["model"],
        usage=usage_of(row),
        latency_seconds=row["latency_seconds"],
    )
