"""Sealed trajectories whose steps are still rows, for one packer alone.

A packer has them by advisory locks, which stand in nobody's way but another packer's: an object store may take minutes,
and whoever annotates or deletes meanwhile is not to wait for it. Rows are locked only while it is noted where they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from services.common.db import Database
from services.trajectories.store.rows import Connection, steps_of
from services.trajectories.store.tables import SCHEMA

_SECONDS: Final = 600.0
_AT_ONCE: Final = 32
_LOOKED_AT: Final = 512  # more than several packers have at once, so that each finds some that are nobody's
_CLASS: Final = 0x7061636B  # of advisory locks: "pack"; the judge's and the migrations' have one number, not two
# The condition takes a lock, so it stands where it is asked of no more rows than are wanted: behind the order. Two keys
# may share a lock; then the second waits for a later turn.
_TRY: Final = f"""
    WITH waiting AS MATERIALIZED (
        SELECT key FROM {SCHEMA}.trajectories
        WHERE object_name = '' AND seal_time IS NOT NULL AND key {{which}} ORDER BY seal_time LIMIT {_LOOKED_AT}
    )
    SELECT key FROM waiting WHERE pg_try_advisory_xact_lock({_CLASS}, hashint8(key)) LIMIT {_AT_ONCE}
"""  # noqa: S608 (names of our own, here and below)
_OTHERS: Final = _TRY.format(which="<> ALL(%s::bigint[])")
_THESE: Final = _TRY.format(which="= ANY(%s::bigint[])")
# A statement of its own: another packer may have packed them, and let go, since the one above began.
_LOOK: Final = f"""
    SELECT key, tenant,
        (SELECT coalesce(sum(octet_length(body)), 0) FROM {SCHEMA}.steps WHERE trajectory_key = t.key)
    FROM {SCHEMA}.trajectories t WHERE key = ANY(%s) AND object_name = '' ORDER BY seal_time
"""  # noqa: S608
_STEPS: Final = (
    f'SELECT trajectory_key, body FROM {SCHEMA}.steps WHERE trajectory_key = ANY(%s) ORDER BY trajectory_key, "index"'  # noqa: S608
)
# In the order of their keys, as whoever deletes many locks them.
_LOCK: Final = f"SELECT key FROM {SCHEMA}.trajectories WHERE key = ANY(%s) AND object_name = '' ORDER BY key FOR UPDATE"  # noqa: S608
_PACKED: Final = f"""
    UPDATE {SCHEMA}.trajectories t SET object_name = packed.name, content_hash = packed.hash
    FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS packed (key, name, hash) WHERE t.key = packed.key
"""  # noqa: S608
# Never what a trajectory is in, whoever put it there.
_GARBAGE: Final = f"""
    INSERT INTO {SCHEMA}.garbage (object_name, time)
    SELECT lost.name, %s FROM unnest(%s::bigint[], %s::text[]) AS lost (key, name)
    WHERE NOT EXISTS (SELECT FROM {SCHEMA}.trajectories t WHERE t.key = lost.key AND t.object_name = lost.name)
    ON CONFLICT DO NOTHING
"""  # noqa: S608
_GONE: Final = f"DELETE FROM {SCHEMA}.steps WHERE trajectory_key = ANY(%s)"  # noqa: S608


@dataclass(frozen=True, slots=True)
class Packed:
    """Where steps are now, durably."""

    object_name: str
    content_hash: str


class Packing:
    """Sealed trajectories that wait to be packed; no other packer has them while this is open.

    They do not change, but they may be deleted meanwhile: then their steps are not there, in part or at all.

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

    async def packed(self, packed: Mapping[int, Packed], now: datetime) -> None:
        """Their steps are in objects, durably: the rows go. The objects of those that were deleted meanwhile go too."""
        rows = await (await self._connection.execute(_LOCK, [list(packed)])).fetchall()
        there = {key: packed[key] for (key,) in rows}
        names, hashes = [one.object_name for one in there.values()], [one.content_hash for one in there.values()]
        await self._connection.execute(_PACKED, [list(there), names, hashes])
        await self._connection.execute(_GONE, [list(there)])
        if lost := {key: one.object_name for key, one in packed.items() if key not in there}:
            await self._connection.execute(_GARBAGE, [now, list(lost), list(lost.values())])


@asynccontextmanager
async def packing(database: Database, most_bytes: int, later: Collection[int]) -> AsyncIterator[Packing | None]:
    """Some that wait, longest first, those of `later` only where there are no others; None: there is none. What
    `packed` noted is committed on the way out.
    """
    async with database.transaction(timeout_seconds=_SECONDS) as connection:
        raw: Any = (await connection.get_raw_connection()).driver_connection
        rows = await _locked(raw, later)
        if not rows:
            yield None
            return
        yield Packing(raw, _fitting(rows, most_bytes), is_large=rows[0][2] > most_bytes)


async def _locked(connection: Connection, later: Collection[int]) -> Sequence[tuple[int, str, int]]:
    """Key, tenant and bytes of steps."""
    for query in (_OTHERS, _THESE) if later else (_OTHERS,):
        while keys := [row[0] for row in await (await connection.execute(query, [list(later)])).fetchall()]:
            if rows := await (await connection.execute(_LOOK, [keys])).fetchall():
                return rows
    return ()


def _fitting(rows: Sequence[tuple[int, str, int]], most_bytes: int) -> dict[int, str]:
    chosen, left = {rows[0][0]: rows[0][1]}, most_bytes - rows[0][2]
    for key, tenant, size in rows[1:]:
        left -= size
        if left < 0:
            break
        chosen[key] = tenant
    return chosen
