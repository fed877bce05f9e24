"""The store of trajectories, as it grows: steps appended, lists, counts, exports, and what is left of the text."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import orchard
from orchard import Reward, Step
from psycopg import connect

from services.local.stores.postgres import Postgres
from services.trajectories.store.tables import SCHEMA
from tests.bench.measure import Figures, percentile, rss_bytes, timed
from tests.bench.processors import Processors
from tests.bench.trajectory_imports import imports
from tests.bench.trajectory_load import Target, load, model, outcome, task
from tests.bench.trajectory_texts import Generator, compressed_share
from tests.support.platform import PlatformProcess

T = TypeVar("T")
SMALL: Final = (1_000,)
FULL: Final = (1_000, 10_000, 100_000)
"""At how many trajectories it is measured. The first size comes through the client, the rest past the wire."""
OPEN: Final = 1000
WRITERS: Final = 64
TURN_SECONDS: Final = 0.05
"""Between two turns of a recorded rollout: 1,000 rollouts offer 40,000 steps a second, more than there is room for, so
that what waits is stored together. Real ones take seconds for a turn; what a call of its own costs is measured too."""
PAGE: Final = 100
PACK_SECONDS: Final = 600.0
REPEATS: Final = 15


class Store:
    """One platform's store and the dataset in it that is measured."""

    def __init__(self, platform: PlatformProcess, client: orchard.AsyncSandboxClient) -> None:
        database = Postgres(platform.data / "postgres", platform.run / "pg", None).url
        self.platform = platform
        self.client = client
        self.target = Target(database, platform.data / "trajectories", f"bench-{secrets.token_hex(4)}")
        self.generator = Generator()

    @property
    def dataset(self) -> str:
        """What tells the measured trajectories from others."""
        return self.target.dataset

    async def keep(self, count: int) -> float:
        """Trajectories through the client, each created, appended in one call, sealed and judged; seconds it took."""
        started = time.perf_counter()

        async def one(number: int) -> None:
            trajectory = await self.client.trajectories.create(
                task(self.dataset, number),
                trajectory_id=f"{self.dataset}-{number}",
                model=model(number),
                attempt=number % 4,
            )
            await trajectory.append(*self.generator.steps(number))
            await trajectory.seal()
            score = Reward.scored(outcome(number), judge="tests")
            await self.client.trajectories.annotate(trajectory.trajectory_id, rewards=score)

        await shared(WRITERS, range(count), one)
        return time.perf_counter() - started

    async def packed(self) -> float:
        """Wait until every sealed trajectory has left the database; seconds it took."""
        query = f"SELECT count(*) FROM {SCHEMA}.trajectories WHERE object_name = '' AND seal_time IS NOT NULL"
        started = time.perf_counter()
        async with asyncio.timeout(PACK_SECONDS):
            while self.ask(query):
                await asyncio.sleep(0.1)
        return time.perf_counter() - started

    def object_names(self) -> list[str]:
        """Of the dataset's packed trajectories."""
        query = f"SELECT object_name FROM {SCHEMA}.trajectories WHERE tenant = 'default' AND dataset = %s"
        with connect(self.target.database, autocommit=True) as connection:
            return [row[0] for row in connection.execute(query, [self.dataset])]

    def ask(self, query: str, *values: object) -> Any:
        """The one answer of a query to the database."""
        with connect(self.target.database, autocommit=True) as connection:
            return connection.execute(query, values).fetchall()[0][0]


async def measure(
    platform: PlatformProcess, client: orchard.AsyncSandboxClient, *, full: bool, sizes: Sequence[int] = ()
) -> Figures:
    """The figures at the largest of the sizes, and under `growth` at each."""
    store, growth = Store(platform, client), []
    kept = loaded = 0
    for size in sizes or (FULL if full else SMALL):
        if not kept:
            kept, seconds = size, await store.keep(size)
            kept_per_second = size / seconds
        else:
            await asyncio.to_thread(load, store.target, range(loaded, size))
        loaded = size
        behind = await store.packed()
        growth.append({"trajectories": size, **await _at(store)})
        print(f"  {growth[-1]}", file=sys.stderr, flush=True)
    share = await asyncio.to_thread(compressed_share, store.generator, range(40))
    imported = await asyncio.to_thread(imports, store.platform, store.generator)
    return {
        **growth[-1],
        **imported,
        "kept_per_second": round(kept_per_second, 1),
        "packing_behind_seconds": round(behind, 1),
        "raw_share_left_by_xz": round(share, 4),
        "growth": {f"{one.pop('trajectories')}": one for one in growth},
    }


async def _at(store: Store) -> Figures:
    text = store.ask(
        f"SELECT sum(text_bytes)::bigint FROM {SCHEMA}.trajectories WHERE tenant = 'default' AND dataset = %s",
        store.dataset,
    )
    count = store.ask(f"SELECT count(*) FROM {SCHEMA}.trajectories")
    packed = sum((store.target.objects / name).stat().st_size for name in store.object_names())
    rows = store.ask(f"SELECT pg_total_relation_size('{SCHEMA}.trajectories')")
    processors = Processors(store.platform)
    stats = [
        await timed(lambda: store.client.trajectories.stats(group_by="model", ks=[1, 4], datasets=store.dataset))
        for _ in range(REPEATS)
    ]
    stats_cpu = processors.each(REPEATS)
    return {
        "text_bytes": text,
        "storage_share_of_raw": round(packed / text, 4),
        "database_bytes_each": round(rows / count),
        **await _lists(store),
        "stats_p50": percentile(stats, 0.5),
        "stats_cpu_each": stats_cpu,
        **await _export(store),
        **await _appends(store),
    }


async def _lists(store: Store) -> Figures:
    """Every page of three lists, from the first to the last."""
    lists: list[dict[str, Any]] = [
        {"order": "created", "repos": "repo-7"},
        {"order": "tokens", "models": "small"},
        {"order": "outcome", "outcome_least": 1.0},
    ]
    processors = Processors(store.platform)
    pages: list[list[float]] = [await _pages(store, **wanted) for wanted in lists]
    every = list(itertools.chain(*pages))
    last = list(itertools.chain(*(one[-max(1, len(one) // 10) :] for one in pages)))
    return {
        "query_p50": percentile(every, 0.5),
        "query_p99": percentile(every, 0.99),
        "query_last_pages_p50": percentile(last, 0.5),
        "query_cpu_each": processors.each(len(every)),
    }


async def _pages(store: Store, **wanted: Any) -> list[float]:
    """Milliseconds of each page."""
    took: list[float] = []
    listed = store.client.trajectories.list(page_size=PAGE, datasets=store.dataset, **wanted)
    while True:
        started, rows = time.perf_counter(), 0
        while rows < PAGE and await anext(listed, None) is not None:
            rows += 1
        if not rows:
            return took
        took.append((time.perf_counter() - started) * 1e3)


async def _export(store: Store) -> Figures:
    pid, processors = store.platform.service_pid("trajectories"), Processors(store.platform)
    rows = text = 0
    before = most = rss_bytes(pid)
    started = time.perf_counter()
    async for one in store.client.trajectories.export(datasets=store.dataset):
        text += one.message.totals.text_bytes
        if len(one.step_messages) != one.message.totals.steps:
            raise RuntimeError(f"{one.trajectory_id} came without some of its steps")
        rows += 1
        if rows % 100 == 0:
            most = max(most, rss_bytes(pid))
    seconds = time.perf_counter() - started
    return {
        "rows": rows,
        "export_megabytes_per_second": round(text / 1e6 / seconds, 1),
        "export_cpu_each": processors.each(rows),
        "export_rss_growth": most - before,
    }


async def _appends(store: Store) -> Figures:
    """Steps into 1,000 open trajectories: recorded turn by turn, as a rollout does, and in lone calls of one turn."""
    dataset = f"{store.dataset}-open"
    steps = [store.generator.steps(number) for number in range(OPEN)]
    recordings = [
        store.client.record(task(dataset, number), trajectory_id=f"{dataset}-{number}") for number in range(OPEN)
    ]
    await shared(WRITERS, recordings, lambda one: one.__aenter__())
    processors, started = Processors(store.platform), time.perf_counter()
    await asyncio.gather(*map(_rollout, recordings, steps))
    seconds, cpu = time.perf_counter() - started, processors.each(sum(map(len, steps)))
    lone: list[float] = []

    async def call(recording: orchard.AsyncRecording) -> None:
        lone.append(await timed(lambda: recording.append(Step.assistant("go on"), Step.user("why"))))

    processors, called = Processors(store.platform), time.perf_counter()
    await shared(WRITERS, recordings, call)
    lone_seconds, lone_cpu = time.perf_counter() - called, processors.each(OPEN)
    await shared(WRITERS, recordings, lambda one: one.close("completed"))
    await store.packed()
    await store.client.trajectories.delete(datasets=dataset)
    return {
        "appends_per_second": round(sum(map(len, steps)) / seconds, 1),
        "append_cpu_each": cpu,
        "lone_appends_per_second": round(OPEN / lone_seconds, 1),
        "lone_append_p50": percentile(lone, 0.5),
        "lone_append_p99": percentile(lone, 0.99),
        "lone_append_cpu_each": lone_cpu,
    }


async def _rollout(recording: orchard.AsyncRecording, steps: Sequence[Step]) -> None:
    """Two steps a turn, and on without waiting for the store; at the end all are durable."""
    for first in range(0, len(steps), 2):
        recording.add(*steps[first : first + 2])
        await asyncio.sleep(TURN_SECONDS)
    await recording.flush()


async def shared(workers: int, things: Iterable[T], work: Callable[[T], Awaitable[object]]) -> None:
    """Do something with each, some at a time."""
    waiting = iter(things)

    async def worker() -> None:
        for thing in waiting:
            await work(thing)

    await asyncio.gather(*(worker() for _ in range(workers)))
