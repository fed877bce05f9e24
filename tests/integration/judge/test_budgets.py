"""Budgets: of a batch one, however many streams spend it, at once, one after the other, and at several replicas."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from orchard.judge.v1 import judge_pb2
from orchard.rewards.scores import Excluded, Scored

from services.judge.backends.limits import Amount, Meter
from services.judge.backends.settings import JudgeSettings
from services.judge.batches import Batches, Given
from services.judge.model import Kind, Role, Step, Task
from services.judge.requests import Request
from services.judge.store.verdicts import Batch
from tests.integration.judge.conftest import Calls
from tests.integration.judge.test_asking import ask, question, settings
from tests.integration.judge.test_repeats import batches_of
from tests.integration.judge.test_service import SCORED
from tests.support.judge_server import JudgeServer

BUDGET = 4000
"""Tokens: a call takes 1,100, and its room is its prompt, of a few hundred, and an answer of up to 1,000."""
STEPS = (Step(0, Role.USER, "Do it."), Step(1, Role.ASSISTANT, "Done."))


def asked(name: str, count: int = 4) -> dict[str, dict[str, Any]]:
    parameters = judge_pb2.JudgementParameters(max_output_tokens=1000)
    return {f"{name}{number}": {"instruction": f"{name} {number}", "parameters": parameters} for number in range(count)}


async def test_streams_at_once_share_it(calls: Calls, server: JudgeServer) -> None:
    budget = judge_pb2.Budget(tokens=BUDGET)
    server.behave("wait")
    streams = [asyncio.create_task(calls.batch("b", asked(name), budget=budget)) for name in ("one", "two", "three")]
    await asyncio.wait_for(server.arrived.wait(), 110)
    server.go_on.set()
    found = [verdict for stream in streams for verdict in (await stream)[0].values()]
    assert {verdict.reason for verdict in found if verdict.state != SCORED} == {"BUDGET_EXHAUSTED"}
    assert 1 <= len(server.requests) <= BUDGET // 1100


async def test_calls_under_way_of_a_stream_that_broke_count(calls: Calls, server: JudgeServer) -> None:
    """They come to their end, and are paid for."""
    budget = judge_pb2.Budget(tokens=BUDGET)
    server.behave("wait")
    broken = asyncio.create_task(calls.batch("b", asked("one"), budget=budget))
    await asyncio.wait_for(server.arrived.wait(), 110)
    broken.cancel()
    await asyncio.wait({broken}, timeout=110)
    going_on = asyncio.create_task(calls.batch("b", asked("two"), budget=budget))
    server.go_on.set()
    _verdicts, progress = await going_on
    assert 1 <= len(server.requests) <= BUDGET // 1100
    assert progress[-1].usage.prompt_tokens + progress[-1].usage.completion_tokens <= BUDGET


async def test_a_replica_knows_what_another_has_spent(database: str, tmp_path: Path, server: JudgeServer) -> None:
    """Also where that was after its own stream had begun."""
    judge = JudgeSettings(name="j", kind="openai", model="m", base_url=f"{server.url}/v1")

    async def given(name: str) -> AsyncIterator[Given]:
        for number in range(4):
            task = Task(f"{name} {number}")
            request = Request(Kind.OUTCOME, task, (STEPS,), {}, max_output_tokens=1000)
            yield Given(f"{name}{number}", request, lambda: None)

    def begun(batches: Batches, name: str) -> Any:
        return aclosing(batches.run("replicas", "b", Amount(tokens=BUDGET), given(name)))

    async with batches_of(database, tmp_path, judge) as one, batches_of(database, tmp_path, judge) as other:
        async with begun(one, "one") as first, begun(other, "two") as second:
            assert (await anext(first)).usage.calls == (await anext(second)).usage.calls == 0
            found = [
                item
                for result in [result async for result in first]
                if not isinstance(result, Batch)
                for item in result
            ]
            scored = sum(isinstance(item.verdict.reading.score, Scored) for item in found)
            assert 1 <= scored == len(server.requests) <= BUDGET // 1100
            async for result in second:
                last = result
        assert isinstance(last, Batch)
        assert last.budget_exhausted
        assert last.usage.tokens == 1100 * len(server.requests) <= BUDGET


async def test_a_budget_stops_before_the_call_that_does_not_fit(server: JudgeServer) -> None:
    """Each call takes 1,100 tokens; the room of a call is its prompt and 1,000 more."""
    meter = Meter(Amount(tokens=5000))
    votes = await ask(settings(server, concurrency=1), question(), votes=8, meters=[meter])
    scored = [vote for vote in votes if vote.reading.score == Scored(1)]
    assert {vote.reading.score for vote in votes} == {Scored(1), Excluded("BUDGET_EXHAUSTED")}
    assert len(scored) == len(server.requests)
    assert meter.spent.tokens == 1100 * len(scored) <= 5000
    assert meter.exhausted


async def test_a_budget_in_money(server: JudgeServer) -> None:
    meter = Meter(Amount(cost_usd=0.02))
    votes = await ask(settings(server), question(), votes=8, meters=[meter])
    assert {vote.reading.score for vote in votes} == {Scored(1), Excluded("BUDGET_EXHAUSTED")}
    assert meter.spent.cost_usd == pytest.approx(0.0026 * len(server.requests), abs=1e-12)
    assert meter.spent.cost_usd <= 0.02
