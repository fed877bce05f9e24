"""The object store: a folder, S3, GCS or Azure. What was put is durable when `put` returns."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import from_url

from services.common.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK_BYTES: Final = 1 << 20
_SECONDS: Final = 300.0
# Whoever asks holds what others wait for, and repeats what is UNAVAILABLE: better soon told than long tried.
_RETRIES: Final[Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}


class ObjectNotFoundError(Exception):
    """There is no object of this name."""


@contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotFoundError):
        raise ObjectNotFoundError(name) from None
    except (BaseError, OSError, TimeoutError) as error:
        raise _unavailable(f"does not work now ({type(error).__name__})") from error


def _unavailable(why: str) -> UnavailableError:
    return UnavailableError(f"the object store {why}; retry", reason="OBJECT_STORE_UNAVAILABLE")


class ObjectStore:
    """Objects by name.

    Args:
        url: file:///folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix; credentials come from the
            environment, as each provider's own tools read them.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._folder = Path(unquote(parts.path)) if parts.scheme == "file" else None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        remote: dict[str, Any] = {} if self._folder is not None else {"retry_config": _RETRIES}
        self._store: Any = from_url(url, **remote)

    async def put(self, name: str, body: bytes | IO[bytes]) -> None:
        """Store an object, over one of the same name.

        Raises:
            UnavailableError: the store does not take it now, or is not there itself.
        """
        try:
            with _translated(name):
                async with asyncio.timeout(_SECONDS):
                    await obstore.put_async(self._store, name, body)
                    if self._folder is not None:
                        await asyncio.to_thread(_sync, self._folder, name)
        except ObjectNotFoundError as error:
            raise _unavailable("has no such bucket or folder") from error

    async def exists(self, name: str) -> bool:
        """Whether there is an object of this name."""
        try:
            with _translated(name):
                async with asyncio.timeout(_SECONDS):
                    await obstore.head_async(self._store, name)
        except ObjectNotFoundError:
            return False
        return True

    async def small(self, names: Sequence[str], most_bytes: int) -> list[bytes | None]:
        """Whole objects; None for one that has more than `most_bytes`, or is not there.

        Raises:
            UnavailableError: they cannot be read now.
        """
        if self._folder is not None:
            with _translated(""):
                return await asyncio.to_thread(_read_all, [self._folder / name for name in names], most_bytes)
        found = await asyncio.gather(*(self._small(name, most_bytes) for name in names), return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if not isinstance(one, BaseException)]

    async def _small(self, name: str, most_bytes: int) -> bytes | None:
        try:
            with _translated(name):
                async with asyncio.timeout(_SECONDS):
                    found = await obstore.get_async(self._store, name)
                    return bytes(await found.bytes_async()) if found.meta["size"] <= most_bytes else None
        except ObjectNotFoundError:
            return None

    async def chunks(self, name: str, offset: int = 0) -> AsyncIterator[bytes]:
        """An object's bytes from `offset` on, about a megabyte at a time.

        Raises:
            ObjectNotFoundError: there is none.
            UnavailableError: it cannot be read now.
        """
        options: Any = {"range": {"offset": offset}} if offset else None
        with _translated(name):
            async with asyncio.timeout(_SECONDS):
                found = await obstore.get_async(self._store, name, options=options)
            stream = aiter(found.stream(min_chunk_size=_CHUNK_BYTES))
            while True:
                async with asyncio.timeout(_SECONDS):
                    chunk = await anext(stream, None)
                if chunk is None:
                    return
                yield bytes(chunk)

    async def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""
        for name in names:
            try:
                with _translated(name):
                    async with asyncio.timeout(_SECONDS):
                        await obstore.delete_async(self._store, name)
            except ObjectNotFoundError:
                continue


def _read_all(paths: Sequence[Path], most_bytes: int) -> list[bytes | None]:
    return [_read(path, most_bytes) for path in paths]


def _read(path: Path, most_bytes: int) -> bytes | None:
    try:
        with path.open("rb", buffering=0) as file:
            return file.read() if os.fstat(file.fileno()).st_size <= most_bytes else None
    except FileNotFoundError:
        return None


def _sync(root: Path, name: str) -> None:
    """Bring a file and the folders that name it to the disk: the library's own local store leaves that out."""
    path = root / name
    for synced in (path, *path.parents):
        descriptor = os.open(synced, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if synced == root:
            return
