"""Use cases of batches: many items, a bounded number at once, each verdict as soon as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from services.common.errors import NotFoundError, OrchardError, UnavailableError
from services.judge.backends.limits import Amount, Ledger, Meter
from services.judge.counted import Counted
from services.judge.requests import Request
from services.judge.service import Errand, Judging
from services.judge.store.claims import Origin
from services.judge.store.verdicts import Batch, BatchItem, VerdictStore

_PAGE: Final = 200
_AT_ONCE: Final = 64
"""Items of a batch that are judged or whose verdict waits for the reader."""


@dataclass(frozen=True, slots=True)
class Given:
    """An item as it came in. `done`: is told once nobody needs its request any more."""

    item_id: str
    request: Request
    done: Callable[[], None]


@contextmanager
def of_item(item_id: str) -> Iterator[None]:
    """Whatever is wrong says with which item: a batch has many."""
    try:
        yield
    except OrchardError as error:
        error.message = f"item {item_id!r}: {error.message}"
        error.metadata = {**error.metadata, "item_id": item_id}
        raise


class Batches:
    """Batches of every tenant."""

    def __init__(self, judging: Judging, store: VerdictStore, clock: Callable[[], datetime]) -> None:
        self._judging = judging
        self._store = store
        self._clock = clock
        self._under_way: Counted[tuple[str, str, str], str] = Counted()
        """What was asked for, of items that are judged now."""
        # Calls of a stream that broke may be under way still, and the next one must know of them.
        self._ledgers: Counted[tuple[str, str], Ledger] = Counted()
        """What is spent, of batches that run now."""

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """How far a batch is.

        Raises:
            NotFoundError: there is none.
        """
        found = await self._store.batch(tenant, batch_id)
        if found is None:
            raise NotFoundError(f"there is no batch {batch_id!r}", reason="BATCH_NOT_FOUND", batch_id=batch_id)
        return found

    async def items(self, tenant: str, batch_id: str, after: str, count: int) -> Sequence[BatchItem]:
        """Items that have their verdict, by id, behind an id."""
        return await self._store.items(tenant, batch_id, after, count)

    async def run(
        self, tenant: str, batch_id: str, budget: Amount, requests: AsyncIterator[Given]
    ) -> AsyncGenerator[Sequence[BatchItem] | Batch, None]:
        """Judge a batch, or go on with it; see JudgeService.JudgeBatch. Verdicts of one moment come together."""
        await self._store.begin_batch(tenant, batch_id, self._clock())
        with self._ledgers.held((tenant, batch_id), Ledger) as ledger:
            told: set[str] = set()
            after = ""
            while page := await self._store.items(tenant, batch_id, after, _PAGE):
                # What an outage left out is not settled: it is judged again when it is sent.
                if settled := [item for item in page if not item.again]:
                    told.update(item.item_id for item in settled)
                    yield settled
                after = page[-1].item_id
            yield await self.get(tenant, batch_id)
            meter = Meter(budget, ledger, partial(self._store.spent, tenant, batch_id))
            run = _Run(self, tenant, batch_id, meter, told)
            async with aclosing(run.verdicts(requests)) as verdicts:
                async for items in verdicts:
                    yield items
        if run.meter.exhausted:
            await self._store.exhausted(tenant, batch_id)
        yield await self.get(tenant, batch_id)

    async def judge_item(self, tenant: str, batch_id: str, item_id: str, request: Request, meter: Meter) -> BatchItem:
        """The verdict of one item.

        Raises:
            AlreadyExistsError: its id was used for something else.
        """
        with of_item(item_id):
            prepared = await self._judging.prepare(tenant, request)
        origin = Origin(prepared.asked, batch_id=batch_id, item_id=item_id)
        with self._held_to(tenant, origin):
            verdict = await self._judging.judge(tenant, prepared, Errand([meter], origin))
        return BatchItem(item_id, prepared.asked, verdict, again=verdict.is_outage)

    @contextmanager
    def _held_to(self, tenant: str, origin: Origin) -> Iterator[None]:
        """Hold an item to what it is while it is judged: only then does the store."""
        with self._under_way.held((tenant, origin.batch_id, origin.item_id), lambda: origin.asked) as asked:
            if asked != origin.asked:
                raise origin.taken()
            yield


class _Run:
    """One stream of a batch. `told`: items whose verdict was sent."""

    def __init__(self, batches: Batches, tenant: str, batch_id: str, meter: Meter, told: set[str]) -> None:
        self._batches = batches
        self._tenant = tenant
        self._batch_id = batch_id
        self.meter = meter
        self._told = told
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._done: asyncio.Queue[BatchItem | BaseException | None] = asyncio.Queue()

    async def verdicts(self, requests: AsyncIterator[Given]) -> AsyncGenerator[Sequence[BatchItem], None]:
        """Verdicts of what comes in, as they are reached."""
        name = f"batch {self._batch_id}"
        async with AsyncExitStack() as stack:
            reader = asyncio.create_task(self._read(requests), name=name)
            stack.push_async_callback(_ended, reader)
            while True:
                results = [await self._done.get()]
                while not self._done.empty():
                    results.append(self._done.get_nowait())
                reached = [result for result in results if isinstance(result, BatchItem)]
                if news := self._news(reached):
                    yield news
                for _ in reached:
                    self._slots.release()
                for result in results:
                    if isinstance(result, BaseException):
                        raise result
                if None in results:
                    return

    def _news(self, reached: Sequence[BatchItem]) -> Sequence[BatchItem]:
        """Those that were not told before; of an item that came twice, the first."""
        news = []
        for item in reached:
            if item.item_id not in self._told:
                self._told.add(item.item_id)
                news.append(item)
        return news

    async def _read(self, requests: AsyncIterator[Given]) -> None:
        judging: set[asyncio.Task[None]] = set()
        try:
            async for given in requests:
                await self._slots.acquire()
                task = asyncio.create_task(self._judge(given), name=f"item {given.item_id}")
                judging.add(task)
                task.add_done_callback(judging.discard)
            await asyncio.gather(*judging)
            self._done.put_nowait(None)
        except asyncio.CancelledError:
            # Where the stream is not over, something of ours was cancelled: it must not wait for ever.
            message = "the batch was given up; begin it again"
            self._done.put_nowait(UnavailableError(message, reason="CALL_INTERRUPTED"))
            raise
        except Exception as error:  # noqa: BLE001 (raised where the stream is)
            self._done.put_nowait(error)
        finally:
            for task in judging:
                task.cancel()
            await asyncio.gather(*judging, return_exceptions=True)

    async def _judge(self, given: Given) -> None:
        try:
            item = await self._batches.judge_item(
                self._tenant, self._batch_id, given.item_id, given.request, self.meter
            )
        except asyncio.CancelledError:
            # As in _read: no item ends without a word.
            message = f"the judgement of item {given.item_id!r} was given up; begin the batch again"
            self._done.put_nowait(UnavailableError(message, reason="CALL_INTERRUPTED"))
            raise
        except Exception as error:  # noqa: BLE001 (raised where the stream is)
            self._done.put_nowait(error)
        else:
            self._done.put_nowait(item)
        finally:
            given.done()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
