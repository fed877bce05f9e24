"""A batch holds as many items as it judges, however long it is and however slowly its verdicts are read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from services.judge.backends.limits import Amount
from services.judge.backends.settings import JudgeSettings
from services.judge.batches import Given
from services.judge.model import Kind, Role, Step, Task
from services.judge.requests import Request
from services.judge.store.verdicts import BatchItem
from tests.integration.judge.test_repeats import batches_of
from tests.support.judge_server import JudgeServer

AT_ONCE = 64
"""Items of a batch that are judged or whose verdict waits for the reader."""


async def test_a_batch_takes_in_no_more_than_it_judges(database: str, tmp_path: Path, server: JudgeServer) -> None:
    settings = JudgeSettings(name="j", kind="openai", model="m", base_url=f"{server.url}/v1", concurrency=AT_ONCE)
    steps = (Step(0, Role.USER, "Do it."), Step(1, Role.ASSISTANT, "Done."))
    count, taken, dropped = 5 * AT_ONCE, 0, 0

    def drop() -> None:
        nonlocal dropped
        dropped += 1

    async def given() -> AsyncIterator[Given]:
        nonlocal taken
        for number in range(count):
            taken += 1
            yield Given(f"i{number}", Request(Kind.OUTCOME, Task(f"Do {number}."), (steps,), {}), drop)

    server.behave("wait")
    read = 0
    async with (
        batches_of(database, tmp_path, settings) as batches,
        aclosing(batches.run("bounded", "b", Amount(), given())) as results,
    ):
        await asyncio.wait_for(anext(results), 110)  # how far the batch was
        reading = asyncio.ensure_future(anext(results))
        while len(server.requests) < AT_ONCE:
            server.arrived.clear()
            await asyncio.wait_for(server.arrived.wait(), 110)
        # All of them wait for the model: of the others one at most was taken in, and waits for its turn.
        assert taken <= AT_ONCE + 1
        server.go_on.set()
        item = await asyncio.wait_for(reading, 110)
        while isinstance(item, BatchItem):
            read += 1
            assert taken - read <= AT_ONCE
            item = await asyncio.wait_for(anext(results), 110)
    assert (read, taken, dropped, len(server.requests)) == (count, count, count, count)
