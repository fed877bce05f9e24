"""One batch in which judges fail in every way that they can: each item has its state and reason, and the rest go on."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from orchard.rewards.scores import Excluded, Score, Scored

from services.judge.backends.limits import Amount
from services.judge.backends.settings import JudgeSettings
from services.judge.batches import Given
from services.judge.model import Kind, Role, Step, Task, Verdict
from services.judge.requests import Request
from services.judge.rubrics import SOFTWARE_ENGINEERING
from services.judge.store.verdicts import Batch
from tests.integration.judge.test_asking import ATTEMPTS, FAILURES, KINDS
from tests.integration.judge.test_repeats import batches_of
from tests.support.judge_server import GOOD, JudgeServer

WAYS: list[tuple[str, Score, int]] = [*FAILURES, ("hang", Excluded("JUDGE_TIMEOUT"), ATTEMPTS)]
BESIDE = 4
"""Items whose judge does well, behind each of which that is not so: no endpoint is left alone for failing in a row."""
STEPS = (Step(0, Role.USER, "Do it."), Step(1, Role.ASSISTANT, "Done."))


def mark(item_id: str) -> str:
    """What the prompt of an item has, and that of no other."""
    return f"[item {item_id}]"


@pytest.mark.parametrize("kind", KINDS)
async def test_each_item_has_its_end_and_the_batch_goes_on(
    database: str, tmp_path: Path, server: JudgeServer, kind: str
) -> None:
    expected: dict[str, tuple[Score, int]] = {}
    for number, (behaviour, score, calls) in enumerate(WAYS):
        server.by_text[mark(f"way-{number}")] = behaviour
        expected[f"way-{number}"] = (score, calls)
        expected |= {f"beside-{number}-{other}": (Scored(1), 1) for other in range(BESIDE)}
    expected |= {f"last-{number}": (Scored(1), 1) for number in range(len(WAYS))}

    async def given() -> AsyncIterator[Given]:
        for item_id in expected:
            task = Task(f"Do it. {mark(item_id)}")
            request = Request(Kind.RUBRIC, task, (STEPS,), {}, rubric_name=SOFTWARE_ENGINEERING.name)
            yield Given(item_id, request, lambda: None)

    settings = JudgeSettings(
        name="j",
        kind=kind,
        model="judge-1",
        base_url=server.url,
        attempts=ATTEMPTS,
        first_delay_seconds=0.01,
        timeout_seconds=5,
        concurrency=8,
    )
    server.behave(GOOD)
    found: dict[str, Verdict] = {}
    progress: Batch | None = None
    async with batches_of(database, tmp_path, settings) as batches, asyncio.timeout(110):
        async for results in batches.run(f"mixed-{kind}", "b", Amount(), given()):
            if isinstance(results, Batch):
                progress = results
            else:
                found |= {item.item_id: item.verdict for item in results}
    assert {item_id: found[item_id].reading.score for item_id in found} == {
        item_id: score for item_id, (score, _calls) in expected.items()
    }
    calls = Counter(item_id for body in server.requests for item_id in expected if mark(item_id) in json.dumps(body))
    assert calls == {item_id: calls for item_id, (_score, calls) in expected.items()}
    assert progress is not None
    scored = sum(isinstance(score, Scored) for score, _calls in expected.values())
    assert (progress.scored, progress.scored + progress.excluded + progress.abstained) == (scored, len(expected))
