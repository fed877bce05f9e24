"""Judging through the gateway of `orchard up`, whose scripted judge needs neither a model nor a key."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import signal
from collections.abc import AsyncIterator
from typing import Any

import orchard
import pytest
from orchard import Body, Criterion, Judgement, Rubric, Step, ToolCall

from tests.support.health import SERVING, wait_health
from tests.support.platform import PlatformProcess

STEPS = (Step.user("Do it."), Step.assistant("Done.", tool_calls=[ToolCall("c", "bash", '{"command": "ls"}')]))


@pytest.fixture
async def client(platform: PlatformProcess) -> AsyncIterator[orchard.AsyncSandboxClient]:
    async with orchard.AsyncSandboxClient(
        endpoint=platform.endpoint, api_key=platform.api_key, retry_timeout=300
    ) as client:
        yield client


def asked(kind: str = "outcome", instruction: str = "", **given: Any) -> Judgement:
    """One that was never asked before, unless it says what."""
    return Judgement(kind, instruction or f"Do it. {secrets.token_hex(4)}", given.pop("steps", STEPS), **given)


async def test_one_outcome_with_no_configuration_at_all(
    client: orchard.AsyncSandboxClient, platform: PlatformProcess
) -> None:
    judgement = asked()
    verdict = await client.judge.run(judgement)
    assert (verdict.state, verdict.kind, verdict.cached) == ("scored", "outcome", False)
    assert verdict.value in (0.0, 1.0)
    (vote,) = verdict.votes
    assert (vote.judge, vote.evidence) == ("scripted", (1,))
    assert verdict.usage.calls == 1
    assert hashlib.sha256((await client.judge.answer(vote.answers[0])).encode()).hexdigest() == vote.answers[0]
    assert await client.judge.get(verdict.verdict_id) == verdict
    again = await client.judge.run(judgement)
    assert (again.verdict_id, again.cached, again.usage.calls) == (verdict.verdict_id, True, 0)
    # What is kept is apart from the trajectories, and the list of judges is there to be edited.
    assert (platform.data / "judge").is_dir()
    assert json.loads((platform.data / "judges.json").read_text()) == [{"name": "scripted", "kind": "scripted"}]


async def test_each_kind(client: orchard.AsyncSandboxClient) -> None:
    rubric = await client.judge.put_rubric(
        Rubric(f"r-{secrets.token_hex(4)}", (Criterion("good", "Is it good?", 0.75), Criterion("fast", "Is it?", 0.25)))
    )
    screens = [Step.tool("c", Body(bytes([number]) * 10, "image/png"), name="browser") for number in range(4)]
    kinds: dict[str, dict[str, Any]] = {
        "gui_success": {"steps": [*STEPS, *screens]},
        "rubric": {"rubric": f"{rubric.name}@{rubric.version}"},
        "value_curve": {"resolved": True},
        "pairwise": {"other_steps": STEPS},
        "claw_eval": {"tool_statuses": [("bash", 200)]},
    }
    for kind, given in kinds.items():
        verdict = await client.judge.run(asked(kind, **given))
        assert verdict.state == "scored", (kind, verdict.message)
        assert (verdict.kind, 0 <= (verdict.value or 0) <= 1) == (kind, True)
        assert bool(verdict.scores) == (kind in ("rubric", "claw_eval"))
        assert len(verdict.provenance.image_hashes) == (3 if kind == "gui_success" else 0)
    assert (await client.judge.rubric(rubric.name)).used
    # Nothing to see is no number.
    blind = await client.judge.run(asked("gui_success"))
    assert (blind.state, blind.value, blind.reason) == ("excluded", None, "EVIDENCE_MISSING")
    assert blind.reward().value is None


async def test_a_trajectory_is_judged_and_keeps_its_verdict(client: orchard.AsyncSandboxClient) -> None:
    """The client joins the two services: the judge reads no trajectory by itself."""
    trajectory = await client.trajectories.create()
    instruction = f"Do it. {secrets.token_hex(4)}"
    long = "a line\n" * 20_000
    await trajectory.append(Step.user(instruction), Step.assistant("I look."), Step.tool("c", long, name="bash"))
    await trajectory.seal()
    judgement = await client.judge.of_trajectory(trajectory.trajectory_id)
    assert judgement.instruction == instruction
    verdict = await client.judge.run(judgement)
    assert verdict.state == "scored", verdict.message
    assert ("observation", 2, len(long)) in [cut[:3] for cut in verdict.provenance.cuts]
    info = await client.trajectories.annotate(trajectory.trajectory_id, rewards=verdict.reward())
    assert info.outcome is not None
    assert (info.outcome.value, info.outcome.judge) == (verdict.value, "scripted")


async def test_a_batch_goes_on_where_it_was_and_its_verdicts_are_calibrated(client: orchard.AsyncSandboxClient) -> None:
    batch_id = f"b-{secrets.token_hex(4)}"
    items = {f"i{number}": asked() for number in range(40)}
    first = {item.item_id: item.verdict async for item in client.judge.batch(batch_id, list(items.items())[:20])}
    verdicts = {item.item_id: item.verdict async for item in client.judge.batch(batch_id, items)}
    assert verdicts.keys() == items.keys()
    assert {item_id: verdicts[item_id].verdict_id for item_id in first} == {
        item_id: verdict.verdict_id for item_id, verdict in first.items()
    }
    progress = await client.judge.progress(batch_id)
    assert (progress.scored, progress.usage.calls) == (40, 40)
    assert [item.item_id async for item in client.judge.items(batch_id)] == sorted(items)
    labels = {verdict.verdict_id: verdict.value == 1 for verdict in verdicts.values()}
    found = await client.judge.calibrate(labels)
    assert (found.accuracy, found.false_positive, found.false_negative, found.unscored) == (1.0, 0, 0, 0)
    with pytest.raises(orchard.AlreadyExists, match="i0"):
        _ = [item async for item in client.judge.batch(batch_id, {"i0": asked()})]
    assert any(one.judge == "scripted" and one.usage.calls for one in await client.judge.usage())


def test_items_may_be_made_with_the_client_itself(platform: PlatformProcess) -> None:
    """A generator that calls the synchronous client, for a batch of that client."""
    batch_id = f"b-{secrets.token_hex(4)}"
    names = [f"{batch_id}-{number}" for number in range(3)]
    with orchard.SandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client:
        for name in names:
            with client.record(name, trajectory_id=name) as trajectory:
                trajectory.add(*STEPS)
        items = ((name, client.judge.of_trajectory(name)) for name in names)
        assert sorted(item.item_id for item in client.judge.batch(batch_id, items)) == names


async def test_a_value_curve_becomes_values_of_steps(client: orchard.AsyncSandboxClient) -> None:
    verdict = await client.judge.run(asked("value_curve", resolved=False))
    ((state, value),) = [(one.state, one.value) for one in verdict.values]
    assert [(one.index, one.name, one.value) for one in verdict.step_values()] == [(1, "value", value)]
    assert (state, verdict.reward().name) == (0, "value_curve")


async def test_an_iterator_that_fails_ends_its_batch_with_its_own_error(client: orchard.AsyncSandboxClient) -> None:
    async def items() -> AsyncIterator[tuple[str, Judgement]]:
        yield "i0", asked()
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        _ = [item async for item in client.judge.batch(f"b-{secrets.token_hex(4)}", items())]


async def test_a_batch_survives_the_death_of_the_judge(
    client: orchard.AsyncSandboxClient, platform: PlatformProcess
) -> None:
    """Half of the items, kill -9, the other half: each is judged once, none is lost."""
    go_on, half = asyncio.Event(), 30
    batch_id = f"b-{secrets.token_hex(4)}"
    items = {f"i{number}": asked() for number in range(2 * half)}

    async def coming() -> AsyncIterator[tuple[str, Judgement]]:
        for number, item in enumerate(items.items()):
            if number == half:
                await go_on.wait()
            yield item

    found: list[str] = []
    async for item in client.judge.batch(batch_id, coming()):
        found.append(item.item_id)
        if len(found) == half:
            platform.kill_service("judge", signal.SIGKILL)
            go_on.set()
    assert sorted(found) == sorted(items)
    assert (await client.judge.progress(batch_id)).usage.calls == len(items)
    await wait_health(platform.address("judge"), SERVING)


async def test_a_key_needs_the_scope(client: orchard.AsyncSandboxClient, platform: PlatformProcess) -> None:
    key = await client.keys.create("default", scopes=["judgements:read"])
    async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=key.secret) as reader:
        assert await reader.judge.usage() is not None
        with pytest.raises(orchard.PermissionDenied, match="judgements:write"):
            await reader.judge.run(asked())


async def test_another_tenant_sees_nothing(client: orchard.AsyncSandboxClient, platform: PlatformProcess) -> None:
    verdict = await client.judge.run(asked())
    key = await client.keys.create("judged-elsewhere")
    async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=key.secret) as stranger:
        with pytest.raises(orchard.NotFound):
            await stranger.judge.get(verdict.verdict_id)
        assert not await stranger.judge.usage()


async def test_bad_input_names_its_field(client: orchard.AsyncSandboxClient) -> None:
    for judgement, word in (
        (asked(judges="nobody"), "nobody"),
        (asked("rubric"), "judgement.rubric"),
        (asked(votes=17), "judgement.parameters.votes"),
        (asked("magic"), "magic"),
        (asked(aggregation="best"), "best"),
    ):
        with pytest.raises(orchard.InvalidArgument, match=word):
            await client.judge.run(judgement)
