"""Texts of answers that are on their way to the object store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from services.judge.store.lanes import recordset
from services.judge.store.turns import Turns


class WaitingText(NamedTuple):
    """The text of an answer. It never changes: `sha256` is its own."""

    tenant: str
    sha256: str
    text: str


class TextStore:
    """Rows of WAITING_TEXTS; CallStore writes them, with the answers that they are of."""

    def __init__(self, database: Turns) -> None:
        self._database = database

    async def get(self, tenant: str, sha256: str) -> str | None:
        """A text, if it waits."""
        async with self._database.driver(autocommit=True) as connection:
            row = await (await connection.execute(_GET, [tenant, sha256])).fetchone()
        return None if row is None else str(row[0])

    async def some(self, count: int) -> list[WaitingText]:
        """So many of those that wait."""
        async with self._database.driver(autocommit=True) as connection:
            return [WaitingText(*row) for row in await (await connection.execute(_SOME, [count])).fetchall()]

    async def moved(self, texts: Sequence[WaitingText]) -> None:
        """These are in the object store."""
        rows = [{"tenant": text.tenant, "sha256": text.sha256} for text in texts]
        async with self._database.driver(autocommit=True) as connection:
            await connection.execute(_MOVED, [recordset(rows)])


_GET: Final = "SELECT text FROM judge.waiting_texts WHERE tenant = %s AND sha256 = %s"
_SOME: Final = "SELECT tenant, sha256, text FROM judge.waiting_texts LIMIT %s"
# Another replica may move the same ones: whoever comes second finds nothing to do.
_MOVED: Final = """
DELETE FROM judge.waiting_texts WHERE (tenant, sha256) IN (
    SELECT tenant, sha256 FROM judge.waiting_texts
    JOIN json_to_recordset(%s::json) AS moved(tenant text, sha256 text) USING (tenant, sha256)
    ORDER BY tenant, sha256 FOR UPDATE OF waiting_texts SKIP LOCKED
)
"""
