"""Bodies: images, large texts and anything else that is stored once by the hash of its bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Final

from orchard._client.arguments import explained
from orchard._client.status import CallFailed
from orchard._client.threads import in_thread
from orchard._client.trajectories.convert import blob_message, blob_of
from orchard._client.trajectories.types import Blob, Body
from orchard._client.transport import Retry, Transport
from orchard.trajectory.v1 import trajectory_service_pb2 as pb

_BLOCK: Final = 512 << 10
_HASHED_IN_PLACE: Final = 1 << 20


@explained
class AsyncBodies:
    """Bodies of the tenant. One that no trajectory refers to is removed after a day."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def put(self, data: bytes | str | os.PathLike[str], media_type: str = "application/octet-stream") -> Blob:
        """Store bytes, or a file by its path; what is there already is not stored again. It is durable on return.

        Args:
            data: at most 1 GiB.
            media_type: what it is, for instance "image/png".

        Raises:
            InvalidArgument: it is too large.
            OSError: the file cannot be read.
        """
        path = None if isinstance(data, bytes) else Path(data)
        if path is not None:
            size = (await in_thread(path.stat)).st_size
            return await self._put(Blob("", size, media_type), path)
        body = Body(bytes(data), media_type)  # type: ignore[arg-type]
        digest = await in_thread(_digest, body.data) if len(body.data) > _HASHED_IN_PLACE else _digest(body.data)
        return await self._put(Blob(digest, len(body.data), media_type), body.data)

    async def store(self, body: Body, retry: Retry | None = None) -> Blob:
        """Store the body of a step."""
        return await self._put(Blob(_digest(body.data), len(body.data), body.media_type), body.data, retry)

    async def _put(self, blob: Blob, source: bytes | Path, retry: Retry | None = None) -> Blob:
        async def requests() -> AsyncIterator[pb.PutBlobRequest]:
            yield pb.PutBlobRequest(blob=blob_message(blob))
            async with aclosing(_pieces(source)) as pieces:
                async for data in pieces:
                    yield pb.PutBlobRequest(data=data)
            yield pb.PutBlobRequest(data=b"", end=True)

        with self._transport.operation("PutBlob") as operation:
            response = await self._transport.upload(
                lambda c: c.trajectory.PutBlob,
                requests,
                sandbox_id="",
                context=self._transport.context(operation),
                retry=retry or self._transport.retry(),
            )
        return blob_of(response.blob)

    async def get(self, blob: Blob | str) -> bytes:
        """A body by its reference or hash.

        Raises:
            NotFound: there is none.
        """
        async with aclosing(self.iterate(blob)) as pieces:
            return b"".join([data async for data in pieces])

    async def iterate(self, blob: Blob | str, *, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """A body piece by piece, from the byte at `offset` on; goes on where it was when a connection breaks.

        Raises:
            NotFound: there is none.
        """
        sha256 = blob if isinstance(blob, str) else blob.sha256
        retry, context = self._transport.retry(), self._transport.context()
        while True:
            request = pb.GetBlobRequest(sha256=sha256, offset=offset)
            try:
                async with self._transport.stream(lambda c: c.trajectory.GetBlob, request, context) as stream:
                    async for response in stream:
                        retry.succeeded()
                        offset += len(response.data)
                        yield response.data
            except CallFailed as error:
                await self._transport.pause_or_raise(error, retry, "")
            else:
                return


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def _pieces(source: bytes | Path) -> AsyncGenerator[bytes, None]:
    if isinstance(source, bytes):
        for offset in range(0, len(source), _BLOCK):
            yield source[offset : offset + _BLOCK]
        return
    with await in_thread(source.open, "rb") as file:
        while data := await in_thread(file.read, _BLOCK):
            yield data
