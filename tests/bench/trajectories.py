"""Trajectories by the ten thousand: written turn by turn and in bulk, found, counted, exported, and what they take."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import orchard
from orchard import Reward, Step, Task, ToolCall

from tests.bench.measure import Figures, percentile, timed
from tests.support.platform import PlatformProcess

# Of the paper's set: 47.5 turns on average, 30 to 100 KB each.
TURNS: Final = (15, 80)
WRITERS: Final = 64
BULK_STEPS: Final = 200
SMALL: Final = (2000, 200)
"""How many, and how many of them turn by turn."""
FULL: Final = (100_000, 1000)
PACK_SECONDS: Final = 3600.0
MODELS: Final = ("small", "medium", "large")


class Generator:
    """Trajectories that read like those of a coding agent: the same for the same number."""

    def __init__(self) -> None:
        sources = sorted(Path(os.__file__).parent.glob("*.py"))
        self._lines = [line for path in sources for line in path.read_text(errors="replace").splitlines() if line]

    def steps(self, number: int) -> list[Step]:
        """A system prompt, a task, and turns of a call and its output."""
        rng = random.Random(number)
        made = [Step.system("You fix bugs in a repository."), Step.user(self._text(rng, 1500))]
        for turn in range(rng.randint(*TURNS)):
            call = ToolCall(f"c{turn}", "bash", f'{{"command": "sed -n {rng.randint(1, 999)},+40p f{turn % 7}.py"}}')
            made.append(Step.assistant(self._text(rng, 200), tool_calls=[call]))
            made.append(Step.tool(call.call_id, self._text(rng, rng.randint(50, 1600))))
        return made

    def _text(self, rng: random.Random, length: int) -> str:
        start, pieces, size = rng.randrange(len(self._lines)), [], 0
        while size < length:
            line = self._lines[(start + len(pieces)) % len(self._lines)]
            pieces.append(line)
            size += len(line) + 1
        return "\n".join(pieces)


class Writing:
    """Writers that share the work."""

    def __init__(self, client: orchard.AsyncSandboxClient, dataset: str) -> None:
        self._client = client
        self._dataset = dataset
        self._generator = Generator()
        self.appends: list[float] = []

    async def one(self, number: int, *, turn_by_turn: bool) -> None:
        task = Task(f"i-{number // 4}", self._dataset, f"repo-{number % 50}")
        trajectory = await self._client.trajectories.create(
            task, trajectory_id=f"{self._dataset}-{number}", model=MODELS[number % 3], attempt=number % 4
        )
        steps = self._generator.steps(number)
        size = 2 if turn_by_turn else BULK_STEPS
        for start in range(0, len(steps), size):
            took = await timed(lambda start=start: trajectory.append(*steps[start : start + size]))  # type: ignore[misc]
            if turn_by_turn:
                self.appends.append(took)
        await trajectory.seal()
        score = Reward.scored(float(number % 3 == 0), judge="tests")
        await self._client.trajectories.annotate(trajectory.trajectory_id, rewards=score)

    async def all(self, numbers: range, *, turn_by_turn: bool) -> float:
        """Seconds that it took."""
        waiting = iter(numbers)

        async def writer() -> None:
            for number in waiting:
                await self.one(number, turn_by_turn=turn_by_turn)

        started = time.perf_counter()
        await asyncio.gather(*(writer() for _ in range(WRITERS)))
        return time.perf_counter() - started


async def measure(platform: PlatformProcess, client: orchard.AsyncSandboxClient, *, full: bool) -> Figures:
    """The figures, over 100,000 trajectories or 2,000."""
    count, by_turns = FULL if full else SMALL
    dataset = f"bench-{secrets.token_hex(4)}"
    writing = Writing(client, dataset)
    turn_seconds = await writing.all(range(by_turns), turn_by_turn=True)
    bulk_seconds = await writing.all(range(by_turns, count), turn_by_turn=False)
    packed_started = time.perf_counter()
    raw = await _all_packed(client, dataset)
    packing_seconds = time.perf_counter() - packed_started
    stored = sum(path.stat().st_size for path in (platform.data / "trajectories").rglob("*.zst"))
    rows, exported, export_seconds = await _export(client, dataset)
    repeats = 30
    return {
        "rows": rows,
        "appends_per_second": round(len(writing.appends) / turn_seconds, 1),
        "append_p50": percentile(writing.appends, 0.50),
        "append_p99": percentile(writing.appends, 0.99),
        "bulk_trajectories_per_second": round((count - by_turns) / bulk_seconds, 1),
        "packing_behind_seconds": round(packing_seconds, 1),
        "query_p50": await _p50(repeats, lambda number: _first_page(client, dataset, number)),
        "stats_p50": await _p50(repeats, lambda _: client.trajectories.stats(group_by="model", ks=[1, 4])),
        "export_megabytes_per_second": round(exported / 1e6 / export_seconds, 1),
        "storage_share_of_raw": round(stored / raw, 4),
    }


async def _all_packed(client: orchard.AsyncSandboxClient, dataset: str) -> int:
    """Wait until every step has left the database; returns the bytes of text."""
    async with asyncio.timeout(PACK_SECONDS):
        while True:
            text = waiting = 0
            async for one in client.trajectories.export(metadata_only=True, datasets=dataset):
                text += one.info.totals.text_bytes
                waiting += not one.info.content_hash
            if not waiting:
                return text
            await asyncio.sleep(1.0)


async def _export(client: orchard.AsyncSandboxClient, dataset: str) -> tuple[int, int, float]:
    rows = size = 0
    started = time.perf_counter()
    async for one in client.trajectories.export(datasets=dataset):
        rows += 1
        size += sum(step.ByteSize() for step in one.step_messages)
    return rows, size, time.perf_counter() - started


async def _first_page(client: orchard.AsyncSandboxClient, dataset: str, number: int) -> None:
    filters = ({"repos": f"repo-{number % 50}"}, {"models": MODELS[number % 3]}, {"outcome_least": 1.0})[number % 3]
    order = ("created", "tokens", "outcome")[number % 3]
    async for _ in client.trajectories.list(order=order, page_size=100, datasets=dataset, **filters):  # type: ignore[arg-type]
        return


async def _p50(repeats: int, work: Callable[[int], Awaitable[object]]) -> float:
    return percentile([await timed(lambda number=number: work(number)) for number in range(repeats)], 0.50)  # type: ignore[misc]
