"""Which bodies are stored, who refers to them, and what may go."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from services.common.db import Database
from services.trajectories.model import BlobReference
from services.trajectories.store.tables import BLOB_REFERENCES, BLOBS, GARBAGE

_B: Final = BLOBS.c
_G: Final = GARBAGE.c
_STORE_SECONDS: Final = 600.0


class BlobIndex:
    """Rows about bodies. The bodies themselves are in the object store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, tenant: str, sha256: str) -> BlobReference | None:
        """A stored body."""
        query = sa.select(_B.size, _B.media_type).where(_B.tenant == tenant, _B.sha256 == sha256)
        async with self._database.transaction() as connection:
            row = (await connection.execute(query)).first()
        return None if row is None else BlobReference(sha256, row[0], row[1])

    @asynccontextmanager
    async def storing(self, tenant: str, blob: BlobReference, now: datetime) -> AsyncIterator[None]:
        """Note a body that the caller stores within the context, where nobody removes it under its hands."""
        values = {
            "tenant": tenant,
            "sha256": blob.sha256,
            "size": blob.size,
            "media_type": blob.media_type,
            "put_time": now,
        }
        statement = insert(BLOBS).values(values)
        statement = statement.on_conflict_do_update(index_elements=["tenant", "sha256"], set_={"put_time": now})
        async with self._database.transaction(timeout_seconds=_STORE_SECONDS) as connection:
            await connection.execute(statement)
            yield

    @asynccontextmanager
    async def unreferenced(self, before: datetime, count: int) -> AsyncIterator[Sequence[tuple[str, str]]]:
        """Tenant and hash of bodies that nothing refers to and that were stored before a time. They are forgotten when
        the context is left; the caller removes them from the object store within it.
        """
        referred = sa.exists().where(BLOB_REFERENCES.c.tenant == _B.tenant, BLOB_REFERENCES.c.sha256 == _B.sha256)
        query = (
            sa.select(_B.tenant, _B.sha256)
            .where(_B.put_time < before, sa.not_(referred))
            .order_by(_B.put_time)
            .limit(count)
            .with_for_update(skip_locked=True)
        )
        async with self._database.transaction(timeout_seconds=_STORE_SECONDS) as connection:
            rows = [(row[0], row[1]) for row in await connection.execute(query)]
            # Locked now, so nobody refers to them any more before the commit; somebody may have just before.
            if rows:
                still = sa.select(_B.tenant, _B.sha256).where(
                    sa.tuple_(_B.tenant, _B.sha256).in_(rows), sa.not_(referred)
                )
                rows = [(row[0], row[1]) for row in await connection.execute(still)]
            yield rows
            if rows:
                await connection.execute(sa.delete(BLOBS).where(sa.tuple_(_B.tenant, _B.sha256).in_(rows)))

    async def garbage(self, count: int) -> list[str]:
        """Objects of deleted trajectories."""
        async with self._database.transaction() as connection:
            rows = await connection.execute(sa.select(_G.object_name).order_by(_G.time).limit(count))
            return [row[0] for row in rows]

    async def removed(self, object_names: Sequence[str]) -> None:
        """These objects are gone."""
        async with self._database.transaction() as connection:
            await connection.execute(sa.delete(GARBAGE).where(_G.object_name.in_(object_names)))
