"""A batch: items go out as the platform takes them, verdicts come back as they are reached, over broken connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from typing import Final

from orchard._client.judge import convert, messages
from orchard._client.judge.types import ItemVerdict, Judgement
from orchard._client.status import CallFailed
from orchard._client.transport import Source, Transport
from orchard.judge.v1 import judge_service_pb2 as pb

Items = Mapping[str, Judgement] | Iterable[tuple[str, Judgement]] | AsyncIterable[tuple[str, Judgement]]
"""Judgements by item id."""

_TOGETHER: Final = 16
"""Items that share a message, and that are read ahead of it."""
_WELL_SECONDS: Final = 30.0
"""A stream that lasted so long was well, though it had nothing new to say. Each one begins with what is known already:
that alone would have a batch that cannot go on try for ever.
"""


async def run(transport: Transport, start: pb.BatchStart, items: Items) -> AsyncGenerator[ItemVerdict, None]:
    """Verdicts of a batch, those first that it had."""
    retry, context = transport.retry(), transport.context()
    feed = _Feed(items)
    try:
        while True:
            source, begun, answered = Source(feed.requests(start)), time.monotonic(), False
            try:
                async with transport.stream(lambda c: c.judge.JudgeBatch, source, context) as stream:
                    async for response in stream:
                        answered = True
                        for verdict in _verdicts(response):
                            if feed.settle(verdict.item_id):
                                retry.succeeded()
                                yield convert.item_of(verdict)
            except CallFailed as error:
                if source.error is not None:
                    raise source.error from None
                if answered and time.monotonic() - begun >= _WELL_SECONDS:
                    retry.succeeded()
                # Items that come slowly leave the stream silent; the batch goes on with the next one.
                if error.failure.reason != "STREAM_IDLE":
                    await transport.pause_or_raise(error, retry, "")
            except asyncio.CancelledError:
                if source.error is not None:
                    raise source.error from None
                raise
            else:
                return
            finally:
                feed.end_attempt()
                await source.close()
    finally:
        await feed.close()


class _Feed:
    """Items on their way. Those that have no verdict yet are kept, to be sent again on another connection."""

    def __init__(self, items: Items) -> None:
        self._unsettled: dict[str, Judgement] = {}
        self._settled: set[str] = set()
        self._coming: list[tuple[str, Judgement]] = []
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None
        self._attempt = 0
        # Read by a task of its own: a connection that breaks must not end the caller's iterator amid a step.
        self._reader = asyncio.create_task(self._read(items), name="items of a batch")

    async def requests(self, start: pb.BatchStart) -> AsyncIterator[pb.JudgeBatchRequest]:
        """The messages of one attempt, until the next one or `end_attempt`."""
        attempt = self._attempt
        yield pb.JudgeBatchRequest(start=start)
        unsettled = list(self._unsettled.items())
        for message in messages.of_items(item for item in unsettled if item[0] in self._unsettled):
            yield message
        while attempt == self._attempt:
            if self._coming:
                # Whatever is there goes together; nothing waits for company.
                given, self._coming = self._coming, []
                self._unsettled.update(item for item in given if item[0] not in self._settled)
                self._taken.set()
                for message in messages.of_items(given):
                    yield message
            elif self._error is not None:
                raise self._error
            elif self._ended:
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    def settle(self, item_id: str) -> bool:
        """An item has its verdict; whether that is news."""
        self._unsettled.pop(item_id, None)
        if item_id in self._settled:
            return False
        self._settled.add(item_id)
        return True

    def end_attempt(self) -> None:
        """The connection is gone: its requests wait for no more items."""
        self._attempt += 1
        self._changed.set()

    async def close(self) -> None:
        """Read no more."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self, items: Items) -> None:
        try:
            if isinstance(items, AsyncIterable):
                async for item in items:
                    await self._give(item)
            elif isinstance(items, (Mapping, Sequence)):
                for item in items.items() if isinstance(items, Mapping) else items:
                    await self._give(item)
            else:
                # What makes them may take its time, and may call the synchronous client.
                iterator = iter(items)
                while (made := await asyncio.to_thread(next, iterator, None)) is not None:
                    await self._give(made)
        except Exception as error:  # noqa: BLE001 (raised where the requests are made)
            self._error = error
        self._ended = True
        self._changed.set()

    async def _give(self, item: tuple[str, Judgement]) -> None:
        self._coming.append(item)
        self._changed.set()
        if len(self._coming) >= _TOGETHER:
            self._taken.clear()
            await self._taken.wait()


def _verdicts(response: pb.JudgeBatchResponse) -> Sequence[pb.ItemVerdict]:
    """Those of a message: several, or one from a service that does not send several."""
    if response.HasField("verdict"):
        return (response.verdict,)
    return response.verdicts.verdicts
