"""Background work: packs what was sealed, removes what nothing refers to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from services.common.backoff import Backoff
from services.common.errors import UnavailableError
from services.common.logs import get_logger
from services.common.objects import ObjectStore
from services.trajectories.bodies import blob_name
from services.trajectories.packing import Packer, pack
from services.trajectories.store.blobs import BlobIndex
from services.trajectories.store.packing import Packed, Packing
from services.trajectories.store.trajectories import TrajectoryStore

_log = get_logger(__name__)

_IDLE_SECONDS: Final = 5.0
_SWEEP_SECONDS: Final = 60.0
_READ_BYTES: Final = 4 << 20
_BATCH_BYTES: Final = 16 << 20
_SWEPT_AT_ONCE: Final = 500
_FAILED_LATELY: Final = timedelta(minutes=1)
_FAILED_MOST: Final = 1000


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
        self._failed: dict[int, datetime] = {}  # what could not be put, the newest last

    def wake(self) -> None:
        """A trajectory was sealed."""
        self._sealed.set()

    async def run_packing(self) -> None:
        """Pack sealed trajectories for ever."""
        backoff = Backoff(0.1, 10.0)
        while True:
            self._sealed.clear()
            try:
                while await self.pack_some():
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

    async def pack_some(self) -> bool:
        """Pack some sealed trajectories; False if there is none.

        Raises:
            UnavailableError: not all of them could be packed; those that could are.
        """
        async with self._store.packing(_BATCH_BYTES, self._failed_lately()) as packing:
            if packing is None:
                return False
            packed, failure = await (self._pack_large(packing) if packing.is_large else self._pack_all(packing))
            # The objects are durable before the rows go; one that a crash leaves without its row is written again.
            if packed:
                await packing.packed(packed, self._clock())
        self._note(packing.tenants, packed)
        if failure is not None:
            raise failure
        return True

    async def _pack_all(self, packing: Packing) -> tuple[dict[int, Packed], BaseException | None]:
        # Compressing holds the processor: in a thread, so that appends go on.
        packed = await asyncio.to_thread(_pack, await packing.steps())
        names = {key: object_name(packing.tenants[key], key, content) for key, (_body, content) in packed.items()}
        failed = await self._objects.put_all({names[key]: body for key, (body, _hash) in packed.items()})
        done = {
            key: Packed(names[key], content_hash)
            for key, (_body, content_hash) in packed.items()
            if names[key] not in failed
        }
        return done, next(iter(failed.values()), None)

    async def _pack_large(self, packing: Packing) -> tuple[dict[int, Packed], BaseException | None]:
        ((key, tenant),) = packing.tenants.items()
        packer, after = Packer(), -1
        while steps := await packing.part(key, after, _READ_BYTES):
            after = steps[-1][0]
            await asyncio.to_thread(packer.add_all, [body for _index, body in steps])
        file, content_hash = packer.finish()
        with file:
            name = object_name(tenant, key, content_hash)
            try:
                await self._objects.put(name, file)
            except UnavailableError as error:
                return {}, error
        return {key: Packed(name, content_hash)}, None

    def _failed_lately(self) -> Collection[int]:
        """Those that others go before: one that cannot be put is not to stop all that were sealed after it."""
        since = self._clock() - _FAILED_LATELY
        self._failed = {key: time for key, time in self._failed.items() if time > since}
        return self._failed

    def _note(self, keys: Collection[int], packed: Collection[int]) -> None:
        for key in keys:
            self._failed.pop(key, None)
            if key not in packed:
                self._failed[key] = self._clock()
        for key in list(self._failed)[:-_FAILED_MOST]:
            del self._failed[key]

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


def _pack(steps: Mapping[int, Sequence[bytes]]) -> dict[int, tuple[bytes, str]]:
    return {key: pack(bodies) for key, bodies in steps.items()}


def object_name(tenant: str, key: int, content_hash: str) -> str:
    """The object of a packed trajectory."""
    return f"trajectories/{tenant}/{key % 4096:03x}/{key}-{content_hash[:16]}.zst"
