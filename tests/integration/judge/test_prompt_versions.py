"""Another version of a prompt is another judge: nothing of the old one is served, and what it changed can be told."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from orchard.rewards.agreement import Confusion, drift
from orchard.rewards.scores import Scored

from services.judge.backends.limits import Amount
from services.judge.backends.settings import JudgeSettings
from services.judge.batches import Batches, Given
from services.judge.model import Kind, Role, Step, Task, Verdict
from services.judge.prompting import prompts
from services.judge.requests import Request
from services.judge.store.verdicts import Batch
from tests.integration.judge.test_repeats import batches_of
from tests.support.judge_server import JudgeServer

ITEMS = ("a", "b", "c", "d")
STEPS = (Step(0, Role.USER, "Do it."), Step(1, Role.ASSISTANT, "Done."))


async def judged(batches: Batches, batch_id: str) -> dict[str, Verdict]:
    async def given() -> AsyncIterator[Given]:
        for name in ITEMS:
            yield Given(name, Request(Kind.OUTCOME, Task(f"Do it. [item {name}]"), (STEPS,), {}), lambda: None)

    found: dict[str, Verdict] = {}
    async for results in batches.run("versions", batch_id, Amount(), given()):
        if not isinstance(results, Batch):
            found |= {item.item_id: item.verdict for item in results}
    return found


def values(found: dict[str, Verdict]) -> dict[str, float | None]:
    scores = {name: verdict.reading.score for name, verdict in found.items()}
    return {name: score.value if isinstance(score, Scored) else None for name, score in scores.items()}


async def test_two_versions_judge_the_same_set_and_their_drift_is_told(
    database: str, tmp_path: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = JudgeSettings(name="j", kind="openai", model="m", base_url=f"{server.url}/v1")
    async with batches_of(database, tmp_path, settings) as batches:
        server.by_text = {"[item c]": "bad", "[item d]": "refusal"}
        before = await judged(batches, "before")
        again = await judged(batches, "again")
        # The same version finds its verdicts; what has no number is asked for again.
        assert {name: before[name].verdict_id == again[name].verdict_id for name in ITEMS} == {
            name: name != "d" for name in ITEMS
        }
        asked = len(server.requests)
        monkeypatch.setitem(prompts.VERSIONS, Kind.OUTCOME, "outcome/next")  # type: ignore[index]
        server.by_text = {"[item a]": "bad", "[item c]": "bad"}
        after = await judged(batches, "after")
        assert len(server.requests) == asked + len(ITEMS)
    assert {verdict.provenance.prompt_version for verdict in before.values()} != {"outcome/next"}
    assert {verdict.provenance.prompt_version for verdict in after.values()} == {"outcome/next"}
    assert not {verdict.verdict_id for verdict in before.values()} & {one.verdict_id for one in after.values()}
    found = drift(values(before), values(after))
    # a: yes, then no. b: yes in both. c: no in both. d: no number, then yes.
    assert (found.items, found.scored, found.gained, found.lost) == (4, 3, 1, 0)
    assert found.decisions == Confusion(1, 0, 1, 1)
    assert found.mean_change == pytest.approx(-1 / 3, abs=1e-9)
