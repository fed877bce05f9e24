"""Background work: packs what was sealed, removes what nothing refers to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from services.common.backoff import Backoff
from services.common.errors import UnavailableError
from services.common.logs import get_logger
from services.common.objects import ObjectStore
from services.trajectories.bodies import blob_name
from services.trajectories.packing import Packer
from services.trajectories.store.blobs import BlobIndex
from services.trajectories.store.trajectories import Packing, TrajectoryStore

_log = get_logger(__name__)

_IDLE_SECONDS: Final = 5.0
_SWEEP_SECONDS: Final = 60.0
_READ_BYTES: Final = 4 << 20
_SWEPT_AT_ONCE: Final = 500


class Housekeeper:
    """One replica's background work; several replicas share it by locks in the database."""

    def __init__(
        self,
        store: TrajectoryStore,
        blobs: BlobIndex,
        objects: ObjectStore,
        clock: Callable[[], datetime],
        *,
        blob_grace_seconds: float,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._objects = objects
        self._clock = clock
        self._grace = timedelta(seconds=blob_grace_seconds)
        self._sealed = asyncio.Event()

    def wake(self) -> None:
        """A trajectory was sealed."""
        self._sealed.set()

    async def run_packing(self) -> None:
        """Pack sealed trajectories for ever."""
        backoff = Backoff(0.1, 10.0)
        while True:
            self._sealed.clear()
            try:
                while await self.pack_one():
                    backoff.reset()
            except UnavailableError as error:
                _log.warning("packing was put off", why=error.message)
                await asyncio.sleep(backoff.next())
                continue
            try:
                async with asyncio.timeout(_IDLE_SECONDS):
                    await self._sealed.wait()
            except TimeoutError:
                continue

    async def pack_one(self) -> bool:
        """Pack one sealed trajectory; False if there is none."""
        async with self._store.packing() as packing:
            if packing is None:
                return False
            await self._pack(packing)
        return True

    async def _pack(self, packing: Packing) -> None:
        packer, after = Packer(), -1
        while steps := await packing.steps(after, _READ_BYTES):
            after = steps[-1][0]
            # Compressing holds the processor: in a thread, so that appends go on.
            await asyncio.to_thread(packer.add_all, [body for _index, body in steps])
        file, content_hash = packer.finish()
        with file:
            name = f"trajectories/{packing.tenant}/{packing.key % 4096:03x}/{packing.key}-{content_hash[:16]}.zst"
            # The object is durable before the rows go; one that a crash leaves without its row is written again.
            await self._objects.put(name, file)
        await packing.packed(name, content_hash)

    async def run_sweeping(self) -> None:
        """Remove bodies that nothing refers to, and objects of deleted trajectories, for ever."""
        while True:
            try:
                while await self.sweep_once():
                    pass
            except UnavailableError as error:
                _log.warning("sweeping was put off", why=error.message)
            await asyncio.sleep(_SWEEP_SECONDS)

    async def sweep_once(self) -> int:
        """Remove some; returns how many."""
        names = await self._blobs.garbage(_SWEPT_AT_ONCE)
        await self._objects.delete(names)
        await self._blobs.removed(names)
        async with self._blobs.unreferenced(self._clock() - self._grace, _SWEPT_AT_ONCE) as blobs:
            await self._objects.delete([blob_name(*blob) for blob in blobs])
        return len(names) + len(blobs)
