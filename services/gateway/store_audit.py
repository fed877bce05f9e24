"""The audit log's table in PostgreSQL, in the gateway's schema. No call reads or waits for it but ListAudit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from services.common.db import Database
from services.gateway.audit import Entry, Wanted
from services.gateway.store import SCHEMA

_TEXTS: Final = ("tenant", "key_id", "method", "target", "request_id", "status", "client_address")
AUDIT: Final = sa.Table(
    "audit",
    sa.MetaData(schema=SCHEMA),
    sa.Column("entry_id", sa.Uuid, primary_key=True),
    sa.Column("time", sa.DateTime(timezone=True), nullable=False),
    *(sa.Column(name, sa.Text, nullable=False) for name in _TEXTS),
)
# One statement for a batch of any size; an entry that was written before an answer got lost is not written twice.
_INSERT: Final = sa.text(
    f"INSERT INTO {SCHEMA}.audit (entry_id, time, {', '.join(_TEXTS)}) "  # noqa: S608 (names of ours)
    "SELECT * FROM unnest(CAST(:entry_id AS uuid[]), CAST(:time AS timestamptz[]), "
    + ", ".join(f"CAST(:{name} AS text[])" for name in _TEXTS)
    + ") ON CONFLICT (entry_id) DO NOTHING"
)


class AuditTable(Database):
    """See audit.AuditStore."""

    async def add(self, entries: Sequence[Entry]) -> None:
        """See audit.AuditStore."""
        columns = {name: [getattr(entry, name) for entry in entries] for name in ("entry_id", "time", *_TEXTS)}
        async with self.transaction() as connection:
            await connection.execute(_INSERT, columns)

    async def page(self, wanted: Wanted, before: tuple[datetime, UUID] | None, count: int) -> list[Entry]:
        """See audit.AuditStore."""
        table = AUDIT.c
        query = sa.select(AUDIT).order_by(table.time.desc(), table.entry_id.desc()).limit(count)
        for name in ("tenant", "key_id", "target", "status"):
            if value := getattr(wanted, name):
                query = query.where(table[name] == value)
        if wanted.method:
            query = query.where(
                sa.or_(table.method == wanted.method, sa.func.split_part(table.method, "/", 2) == wanted.method)
            )
        if wanted.start is not None:
            query = query.where(table.time >= wanted.start)
        if wanted.end is not None:
            query = query.where(table.time < wanted.end)
        if before is not None:
            query = query.where(sa.tuple_(table.time, table.entry_id) < before)
        async with self.transaction() as connection:
            return [_entry(row) for row in (await connection.execute(query)).mappings()]

    async def forget(self, before: datetime, count: int) -> int:
        """See audit.AuditStore."""
        oldest = sa.select(AUDIT.c.entry_id).where(AUDIT.c.time < before).order_by(AUDIT.c.time).limit(count)
        async with self.transaction() as connection:
            return int((await connection.execute(sa.delete(AUDIT).where(AUDIT.c.entry_id.in_(oldest)))).rowcount)


def _entry(row: Mapping[Any, Any]) -> Entry:
    return Entry(row["entry_id"], row["time"], *(row[name] for name in _TEXTS))
