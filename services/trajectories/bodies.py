"""Bodies: images, large texts and anything else that is stored once, by the hash of its bytes."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tempfile
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import IO, Final

from services.common.errors import InvalidArgumentError, NotFoundError, UnavailableError
from services.common.objects import ObjectNotFoundError, ObjectStore
from services.trajectories.model import BlobReference
from services.trajectories.store.blobs import BlobIndex

MOST_BYTES: Final = 1 << 30
_IN_MEMORY_BYTES: Final = 1 << 20
_UPLOADS: Final = 64
_STORED_AT_ONCE: Final = 4  # each holds a connection to the database until the object store has it


class Bodies:
    """Stores and returns bodies. Each acts within a tenant: what one tenant stored says nothing to another."""

    def __init__(self, index: BlobIndex, objects: ObjectStore, clock: Callable[[], datetime]) -> None:
        self._index = index
        self._objects = objects
        self._clock = clock
        self._uploads = asyncio.Semaphore(_UPLOADS)
        self._stores = asyncio.Semaphore(_STORED_AT_ONCE)

    async def put(self, tenant: str, wanted: BlobReference, chunks: AsyncIterator[bytes]) -> BlobReference:
        """Store a body; it is durable when this returns.

        Raises:
            InvalidArgumentError: it is not what `wanted` says, or too large.
        """
        async with self._uploads:
            with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) as file:
                digest, size = hashlib.sha256(), 0
                async for chunk in chunks:
                    size += len(chunk)
                    if size > MOST_BYTES:
                        raise InvalidArgumentError.of("data", f"a body has at most {MOST_BYTES:,} bytes")
                    digest.update(chunk)
                    file.write(chunk)
                stored = BlobReference(digest.hexdigest(), size, wanted.media_type)
                if wanted.sha256 and wanted.sha256 != stored.sha256:
                    raise InvalidArgumentError.of("blob.sha256", f"the data's hash is {stored.sha256}")
                if wanted.size and wanted.size != size:
                    raise InvalidArgumentError.of("blob.size", f"the data has {size} bytes")
                file.seek(0)
                await self._store(tenant, stored, file)
        return stored

    async def put_text(self, tenant: str, text: str) -> BlobReference:
        """Store a text that is too large to stand in a step."""
        body = text.encode()
        stored = BlobReference(hashlib.sha256(body).hexdigest(), len(body), "text/plain")
        await self._store(tenant, stored, io.BytesIO(body))
        return stored

    async def get(self, tenant: str, sha256: str, offset: int) -> AsyncIterator[bytes]:
        """A body from a byte on.

        Raises:
            NotFoundError: there is none.
            UnavailableError: it is stored, and the object store does not give it.
        """
        found = await self._find(tenant, sha256)
        if offset >= found.size:
            return
        try:
            async for chunk in self._objects.chunks(blob_name(tenant, sha256), offset):
                yield chunk
        except ObjectNotFoundError:
            await self._find(tenant, sha256)  # it may just have been removed
            raise UnavailableError("the body's object is not to be found; retry", reason="OBJECT_LOST") from None

    async def _find(self, tenant: str, sha256: str) -> BlobReference:
        found = await self._index.get(tenant, sha256)
        if found is None:
            raise NotFoundError(f"there is no body {sha256}", reason="BLOB_NOT_FOUND", sha256=sha256)
        return found

    async def _store(self, tenant: str, blob: BlobReference, body: IO[bytes]) -> None:
        name = blob_name(tenant, blob.sha256)
        async with self._stores, self._index.storing(tenant, blob, self._clock()):
            if not await self._objects.exists(name):
                await self._objects.put(name, body)


def blob_name(tenant: str, sha256: str) -> str:
    """The object of a body."""
    return f"blobs/{tenant}/{sha256[:2]}/{sha256}"
