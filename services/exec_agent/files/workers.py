"""Runs blocking file work off the event loop, in few hops: streams go through it a batch at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, ParamSpec, Protocol, TypeVar

_THREADS: Final = 16
_BATCH_BYTES: Final = 1 << 20  # of a stream per hop; one batch is worked on while the next or last one is on its way

_P = ParamSpec("_P")
_T = TypeVar("_T")
_R_co = TypeVar("_R_co", covariant=True)
_R = TypeVar("_R")


class Sink(Protocol[_R_co]):
    """Takes a stream of bytes. All of it runs in worker threads, one call at a time."""

    def open(self) -> None:
        """Begin."""

    def write(self, pieces: Sequence[bytes]) -> None:
        """Take some more."""

    def finish(self) -> _R_co:
        """The stream is complete."""

    def abort(self) -> None:
        """The stream or one of the calls above failed; leave nothing half done."""


class Workers:
    """A bounded pool of threads, started when first needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="files")

    def close(self) -> None:
        """Take no more work; what runs ends on its own."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a blocking call."""
        return await asyncio.wrap_future(self._pool.submit(work, *args, **kwargs))

    async def read_ahead(
        self, source: Generator[_T, None, None], size_of: Callable[[_T], int]
    ) -> AsyncGenerator[_T, None]:
        """Run a blocking generator, the next batch while the last one is sent."""
        pending = self._pool.submit(_next_batch, source, size_of)
        try:
            while batch := await asyncio.wrap_future(pending):
                pending = self._pool.submit(_next_batch, source, size_of)
                for item in batch:
                    yield item
        finally:
            # The batch being read cannot be stopped, and a running generator cannot be closed.
            pending.add_done_callback(lambda _: source.close())

    async def pour(self, pieces: AsyncIterator[bytes], sink: Sink[_R]) -> _R:
        """Pour a stream into a sink, one batch being written while the next one comes in.

        If the stream or the sink fails, or the caller is cancelled, the sink is aborted before the error goes on.
        """
        pending: Future[Any] = self._pool.submit(sink.open)
        try:
            await asyncio.wrap_future(pending)
            batch: list[bytes] = []
            size = 0
            async for piece in pieces:
                batch.append(piece)
                size += len(piece)
                if size >= _BATCH_BYTES:
                    await asyncio.wrap_future(pending)
                    pending = self._pool.submit(sink.write, batch)
                    batch, size = [], 0
            await asyncio.wrap_future(pending)
            pending = finishing = self._pool.submit(_finish, sink, batch)
            return await asyncio.wrap_future(finishing)
        except BaseException:
            await asyncio.shield(asyncio.wrap_future(self._pool.submit(_abort, sink, pending)))
            raise


def _next_batch(source: Generator[_T, None, None], size_of: Callable[[_T], int]) -> list[_T]:
    batch: list[_T] = []
    size = 0
    for item in source:
        batch.append(item)
        size += size_of(item)
        if size >= _BATCH_BYTES:
            break
    return batch


def _finish(sink: Sink[_R], last: Sequence[bytes]) -> _R:
    sink.write(last)
    return sink.finish()


def _abort(sink: Sink[object], pending: Future[Any]) -> None:
    with suppress(BaseException):
        pending.result()  # was submitted before this, so it runs or has run
    sink.abort()
