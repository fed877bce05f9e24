"""Judgements by the id that their caller chose."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from services.common.db import Database
from services.judge.model import Verdict
from services.judge.store.tables import REQUESTS, VERDICTS
from services.judge.store.verdicts import Statement, verdict_of_row

_R: Final = REQUESTS.c
_V: Final = VERDICTS.c


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request. `asked`: its hash; `verdict`: None until there is one; `cached`: it was found then."""

    asked: str
    verdict: Verdict | None
    cached: bool


class RequestStore:
    """Rows of REQUESTS; they stay as long as the verdicts do."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin(self, tenant: str, request_id: str, asked: str, now: datetime) -> StoredRequest:
        """The request of this id, which this one becomes where there is none."""
        values = {"asked": asked, "verdict_id": "", "cached": False, "create_time": now}
        statement = insert(REQUESTS).values(tenant=tenant, request_id=request_id, **values)
        query = (
            sa.select(_R.asked, _R.cached.label("was_cached"), VERDICTS)
            .join_from(
                REQUESTS, VERDICTS, sa.and_(_V.tenant == _R.tenant, _V.verdict_id == _R.verdict_id), isouter=True
            )
            .where(_R.tenant == tenant, _R.request_id == request_id)
        )
        async with self._database.transaction() as connection:
            await connection.execute(statement.on_conflict_do_nothing())
            row = (await connection.execute(query)).mappings().one()
        verdict = None if row["verdict_id"] is None else verdict_of_row(row)
        return StoredRequest(row["asked"], verdict, row["was_cached"])

    @staticmethod
    def finishing(tenant: str, request_id: str, verdict: Verdict) -> Statement | None:
        """A request has its verdict; the first one stays. None: the budget left it out."""
        if verdict.is_unpaid:
            return None
        return (
            sa.update(REQUESTS)
            .where(_R.tenant == tenant, _R.request_id == request_id, _R.verdict_id == "")
            .values(verdict_id=verdict.verdict_id, cached=verdict.cached)
        )
