"""Whole trajectories: made, written, judged and sealed in one transaction, by what does each of these alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from services.common.db import Database
from services.common.errors import OrchardError
from services.trajectories.model import Status, Whole
from services.trajectories.refusals import (
    described_otherwise,
    not_annotated,
    not_found,
    not_sealed,
    written_by_another,
)
from services.trajectories.store.annotations import annotate_all
from services.trajectories.store.appends import Append, append_all
from services.trajectories.store.rows import Connection, Row
from services.trajectories.store.trajectories import End, create_all, seal_all

Placed = tuple[int, Whole]
"""One of several, with its position among them."""


class RefusedError(Exception):
    """One of several is refused, and nothing of any is stored.

    Attributes:
        position: which one.
        error: why.
    """

    def __init__(self, position: int, error: OrchardError) -> None:
        super().__init__(error.message)
        self.position = position
        self.error = error


class WholeStore:
    """Writes whole trajectories."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def store(self, tenant: str, wholes: Sequence[Whole], now: datetime) -> list[bool]:
        """Store trajectories of different ids; all are durable on return. Of each, whether it was sealed before.

        Raises:
            RefusedError: the first one that cannot be stored.
            UnavailableError: whether they are stored is not known; a repeat is safe.
        """
        async with self._database.driver() as connection:
            made = await create_all(connection, tenant, [whole.description for whole in wholes], now, hold=True)
            for position, (whole, found) in enumerate(zip(wholes, made, strict=True)):
                if (refused := _begin(whole, *found)) is not None:
                    raise RefusedError(position, refused)
            sealed = [row["status"] != Status.OPEN for row, _made, _same in made]
            placed = list(enumerate(wholes))
            writing = [(position, whole) for position, whole in placed if not sealed[position]]
            lengths = await _write(connection, tenant, writing)
            await _judge(connection, tenant, placed, now)
            await _seal(connection, tenant, writing, lengths, now)
        return sealed


def _begin(whole: Whole, row: Row, made: bool, same: bool) -> OrchardError | None:
    if not same:
        return described_otherwise(whole.trajectory_id)
    # Where nothing was written yet, whoever opened it is not known, and may be about to.
    unwritten = not made and row["status"] == Status.OPEN and not row["writer"]
    return written_by_another(whole.trajectory_id) if unwritten and not whole.take_over else None


async def _write(connection: Connection, tenant: str, writing: Sequence[Placed]) -> dict[int, int]:
    """Steps of those that are open; how many each has then."""
    appends = [
        Append(tenant, whole.trajectory_id, whole.writer, whole.take_over, whole.steps) for _position, whole in writing
    ]
    lengths: dict[int, int] = {}
    results = await append_all(connection, appends) if appends else ()
    for (position, _whole), result in zip(writing, results, strict=True):
        if isinstance(result, OrchardError):
            raise RefusedError(position, result)
        lengths[position] = result
    return lengths


async def _judge(connection: Connection, tenant: str, placed: Sequence[Placed], now: datetime) -> None:
    judged = [
        (position, whole.trajectory_id, whole.annotation) for position, whole in placed if whole.annotation is not None
    ]
    if not judged:
        return
    annotations = {name: annotation for _position, name, annotation in judged}
    results = await annotate_all(connection, tenant, annotations, now)
    for (position, name, annotation), (outcome, row) in zip(judged, results, strict=True):
        refused = not_annotated(outcome, name, annotation, 0 if row is None else row["steps"])
        if refused is not None:
            raise RefusedError(position, refused)


async def _seal(
    connection: Connection, tenant: str, writing: Sequence[Placed], lengths: Mapping[int, int], now: datetime
) -> None:
    ending = [(position, whole) for position, whole in writing if whole.status is not Status.OPEN]
    if not ending:
        return
    ends = [End(whole.trajectory_id, whole.status, whole.message, len(whole.steps)) for _position, whole in ending]
    sealed = {row["trajectory_id"] for row in await seal_all(connection, tenant, ends, now)}
    for position, whole in ending:
        if whole.trajectory_id not in sealed:
            refused = not_sealed(
                whole.trajectory_id,
                now=Status.OPEN,
                steps=lengths[position],
                wanted=whole.status,
                expected=len(whole.steps),
            )
            raise RefusedError(position, refused or not_found(whole.trajectory_id))
