"""Rubrics by tenant, name and version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from services.common.db import Database
from services.judge.codec import rubric_json, rubric_of
from services.judge.rubrics import Rubric
from services.judge.store.tables import RUBRICS

_R: Final = RUBRICS.c


@dataclass(frozen=True, slots=True)
class StoredRubric:
    """A rubric. `create_time`: None of a built-in one."""

    rubric: Rubric
    used: bool
    create_time: datetime | None


class RubricStore:
    """Rows of RUBRICS."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, tenant: str, name: str, version: int) -> StoredRubric | None:
        """A version, 0 for the newest."""
        query = sa.select(RUBRICS).where(_R.tenant == tenant, _R.name == name).order_by(_R.version.desc()).limit(1)
        if version:
            query = query.where(_R.version == version)
        async with self._database.transaction() as connection:
            row = (await connection.execute(query)).mappings().first()
        return None if row is None else _stored(row)

    async def put(self, tenant: str, rubric: Rubric, now: datetime) -> StoredRubric:
        """Store a rubric as the newest version; see JudgeService.PutRubric."""
        lock = sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(f"rubric/{tenant}/{rubric.name}", 0)))
        newest = sa.select(RUBRICS).where(_R.tenant == tenant, _R.name == rubric.name)
        async with self._database.transaction() as connection:
            await connection.execute(lock)
            newest = newest.order_by(_R.version.desc()).limit(1).with_for_update()
            row = (await connection.execute(newest)).mappings().first()
            if row is not None and row["hash"] == rubric.hash:
                return _stored(row)
            version = 1 if row is None else row["version"] + int(row["used"])
            values = {"body": rubric_json(rubric), "hash": rubric.hash, "used": False, "create_time": now}
            statement = insert(RUBRICS).values(tenant=tenant, name=rubric.name, version=version, **values)
            statement = statement.on_conflict_do_update(index_elements=["tenant", "name", "version"], set_=values)
            await connection.execute(statement)
        return StoredRubric(replace(rubric, version=version), used=False, create_time=now)

    async def use(self, tenant: str, rubric: Rubric) -> bool:
        """From now on it cannot be changed. False: it was changed in the meantime."""
        statement = (
            sa.update(RUBRICS)
            .where(_R.tenant == tenant, _R.name == rubric.name, _R.version == rubric.version)
            .where(_R.hash == rubric.hash)
            .values(used=True)
        )
        async with self._database.transaction() as connection:
            return bool((await connection.execute(statement)).rowcount)

    async def page(self, tenant: str, after: str, count: int) -> Sequence[StoredRubric]:
        """The newest versions by name, behind a name."""
        query = (
            sa.select(RUBRICS)
            .distinct(_R.name)
            .where(_R.tenant == tenant, _R.name > after)
            .order_by(_R.name, _R.version.desc())
            .limit(count)
        )
        async with self._database.transaction() as connection:
            return [_stored(row) for row in (await connection.execute(query)).mappings()]


def _stored(row: sa.RowMapping) -> StoredRubric:
    rubric = rubric_of(row["name"], row["version"], row["body"])
    return StoredRubric(rubric, row["used"], row["create_time"])
