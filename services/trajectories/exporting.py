"""Exports: many trajectories in a row, the next ones unpacked while the ones before go out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from services.common.objects import ObjectStore
from services.trajectories.model import Filter, StepValue, Trajectory
from services.trajectories.packing import count_of, unpacked_whole
from services.trajectories.store.trajectories import TrajectoryStore

WHOLE_BYTES: Final = 960 << 10  # of steps; with all else it still is one message
_PAGE: Final = 128
_PART: Final = 16  # in memory: the part that goes out and the one behind it, so 30 MiB of steps at most
_Part = Sequence["Exported"]


@dataclass(frozen=True, slots=True)
class Exported:
    """A trajectory on its way out.

    Attributes:
        trajectory: all but its steps.
        values: the newest values of its steps.
        framed: all of its steps, framed (packing.py); None where they were not asked for or are to be read apart: they
            are many, or still rows.
    """

    trajectory: Trajectory
    values: Sequence[StepValue]
    framed: bytes | None = field(repr=False)


class Exporter:
    """Reads trajectories in bulk."""

    def __init__(self, store: TrajectoryStore, objects: ObjectStore) -> None:
        self._store = store
        self._objects = objects

    async def export(
        self, tenant: str, wanted: Filter, after: int, *, with_steps: bool
    ) -> AsyncGenerator[Exported, None]:
        """Trajectories by key behind the position `after`."""
        async with aclosing(_ahead(self._parts(tenant, wanted, after, with_steps))) as parts:
            async for part in parts:
                for one in part:
                    yield one

    async def _parts(self, tenant: str, wanted: Filter, after: int, with_steps: bool) -> AsyncGenerator[_Part, None]:
        while True:
            page, values = await self._store.export_page(tenant, wanted, after, _PAGE)
            for start in range(0, len(page), _PART):
                part = page[start : start + _PART]
                framed = await self._unpack(part) if with_steps else {}
                yield [Exported(one, values.get(one.key, ()), framed.get(one.key)) for one in part]
            if len(page) < _PAGE:
                return
            after = page[-1].key

    async def _unpack(self, part: Sequence[Trajectory]) -> dict[int, bytes | None]:
        packed = [one for one in part if one.object_name]
        objects = await self._objects.small([one.object_name for one in packed], WHOLE_BYTES)
        framed = await asyncio.to_thread(_unpack_all, objects, [one.totals.steps for one in packed])
        return {one.key: steps for one, steps in zip(packed, framed, strict=True)}


def _unpack_all(objects: Sequence[bytes | None], steps: Sequence[int]) -> list[bytes | None]:
    return [None if one is None else _whole(one, count) for one, count in zip(objects, steps, strict=True)]


def _whole(packed: bytes, steps: int) -> bytes | None:
    """None also of what has not all steps: who reads it piece by piece is told of that."""
    framed = unpacked_whole(packed, WHOLE_BYTES)
    return framed if framed is not None and count_of(framed) == steps else None


async def _ahead(parts: AsyncGenerator[_Part, None]) -> AsyncGenerator[_Part, None]:
    """The same parts, each made while the one before it is used."""
    following = asyncio.ensure_future(anext(parts, None))
    try:
        while (part := await following) is not None:
            following = asyncio.ensure_future(anext(parts, None))
            yield part
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await parts.aclose()
