"""Sealed trajectories whose steps are still rows, for one packer alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from services.common.db import Database
from services.trajectories.store.rows import Connection, steps_of
from services.trajectories.store.tables import SCHEMA

_SECONDS: Final = 600.0
_AT_ONCE: Final = 32
# Locked, so that one packer has them. The sizes are of what is locked: nothing is added to what is sealed.
_LOCK: Final = f"""
    WITH locked AS (
        SELECT key, tenant, seal_time FROM {SCHEMA}.trajectories
        WHERE object_name = '' AND seal_time IS NOT NULL ORDER BY seal_time LIMIT {_AT_ONCE} FOR UPDATE SKIP LOCKED
    )
    SELECT key, tenant,
        (SELECT coalesce(sum(octet_length(body)), 0) FROM {SCHEMA}.steps WHERE trajectory_key = locked.key)
    FROM locked ORDER BY seal_time
"""  # noqa: S608 (names of our own, here and below)
_STEPS: Final = (
    f'SELECT trajectory_key, body FROM {SCHEMA}.steps WHERE trajectory_key = ANY(%s) ORDER BY trajectory_key, "index"'  # noqa: S608
)
_PACKED: Final = f"""
    UPDATE {SCHEMA}.trajectories t SET object_name = packed.name, content_hash = packed.hash
    FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS packed (key, name, hash) WHERE t.key = packed.key
"""  # noqa: S608
_GONE: Final = f"DELETE FROM {SCHEMA}.steps WHERE trajectory_key = ANY(%s)"  # noqa: S608


@dataclass(frozen=True, slots=True)
class Packed:
    """Where steps are now, durably."""

    object_name: str
    content_hash: str


class Packing:
    """Sealed trajectories that wait to be packed; locked while this is open.

    Attributes:
        tenants: whose they are, by key. Several together have at most `most_bytes` of steps; one alone may have more.
        is_large: whether it is one alone that has more.
    """

    def __init__(self, connection: Connection, tenants: Mapping[int, str], *, is_large: bool) -> None:
        self._connection = connection
        self.tenants = tenants
        self.is_large = is_large

    async def steps(self) -> dict[int, list[bytes]]:
        """The bodies of all steps by trajectory, in order."""
        cursor = await self._connection.execute(_STEPS, [list(self.tenants)], binary=True)
        found: dict[int, list[bytes]] = {key: [] for key in self.tenants}
        for key, rows in groupby(await cursor.fetchall(), itemgetter(0)):
            found[key] = [row[1] for row in rows]
        return found

    async def part(self, key: int, after: int, most_bytes: int) -> list[tuple[int, bytes]]:
        """Index and body of one trajectory's next steps, behind an index; `most_bytes` or little more."""
        return await steps_of(self._connection, key, after, most_bytes)

    async def packed(self, packed: Mapping[int, Packed]) -> None:
        """Their steps are in objects, durably: the rows go."""
        names, hashes = [one.object_name for one in packed.values()], [one.content_hash for one in packed.values()]
        await self._connection.execute(_PACKED, [list(packed), names, hashes])
        await self._connection.execute(_GONE, [list(packed)])


@asynccontextmanager
async def packing(database: Database, most_bytes: int) -> AsyncIterator[Packing | None]:
    """Some that wait, longest first; None: there is none. What `packed` noted is committed on the way out."""
    async with database.transaction(timeout_seconds=_SECONDS) as connection:
        raw: Any = (await connection.get_raw_connection()).driver_connection
        rows = await (await raw.execute(_LOCK)).fetchall()
        if not rows:
            yield None
            return
        yield Packing(raw, _fitting(rows, most_bytes), is_large=rows[0][2] > most_bytes)


def _fitting(rows: Sequence[tuple[int, str, int]], most_bytes: int) -> dict[int, str]:
    chosen, left = {rows[0][0]: rows[0][1]}, most_bytes - rows[0][2]
    for key, tenant, size in rows[1:]:
        left -= size
        if left < 0:
            break
        chosen[key] = tenant
    return chosen
