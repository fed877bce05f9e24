"""The SDK's trajectories against the real platform: what is appended comes back, filters, judgements, groups."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import secrets
from pathlib import Path

import orchard
import pytest
from orchard import AsyncSandboxClient, Body, ModelCall, Reward, SandboxClient, Step, StepValue, Task, ToolCall
from orchard.trajectory.v1 import trajectory_pb2

from tests.integration.client.proxy import Proxy
from tests.support.platform import PlatformProcess

MOMENT = dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)
IMAGE = b"\x89PNG" + bytes(range(256)) * 10
LONG = "a line of output\n" * 10_000


def new_name() -> str:
    return f"t-{secrets.token_hex(6)}"


def conversation() -> list[Step]:
    call = ToolCall("c1", "exec", '{"command": "ls"}', {"type": "function"})
    made = ModelCall(
        "m", "v7", 120, 9, 100, 0.25, "tool_calls", (1, 2), (3, 4, 5), (-0.5, -0.25, -1.0), {"temperature": 1.0}
    )
    return [
        Step.system("Be brief."),
        Step.user(["What is this?", Body(IMAGE, "image/png")]),
        Step("assistant", "Let me look.", "thinking", [call], time=MOMENT, model_call=made),
        Step.tool("c1", LONG, name="exec", is_error=True),
        Step("user", "Again.", parent=0, copied_context=True, extra={"source": "summary"}),
    ]


def test_everything_of_a_trajectory_comes_back(client: SandboxClient) -> None:
    name, task = new_name(), Task("i-1", "d", "r", "w", "train")
    tools = [{"type": "function", "function": {"name": "exec"}}]
    trajectory = client.trajectories.create(
        task,
        trajectory_id=name,
        rollout_id="ro",
        group_id="g",
        attempt=2,
        harness="h",
        model="m",
        policy_version="v7",
        teacher="t",
        tools=tools,
        labels={"run": name},
        sandbox_id="sb",
        trace_id="0" * 31 + "1",
        metadata={"a": [1, {"b": None}]},
    )
    assert trajectory.append(*conversation()) == 5
    sealed = trajectory.seal("failed", "no more turns")
    assert (sealed.status, sealed.status_message) == (orchard.TrajectoryStatus.FAILED, "no more turns")
    found = client.trajectories.get(name)
    said = (found.task, found.attempt, found.harness, found.model, found.policy_version, found.teacher)
    assert said == (task, 2, "h", "m", "v7", "t")
    assert (found.tools, found.labels, found.metadata) == (tools, {"run": name}, {"a": [1, {"b": None}]})
    totals = found.totals
    assert (totals.steps, totals.turns, totals.prompt_tokens, totals.completion_tokens) == (5, 1, 120, 9)
    steps = list(client.trajectories.steps(name))
    assert [step.index for step in steps] == [0, 1, 2, 3, 4]
    assert steps[2] == Step(**{**vars(conversation()[2]), "tool_calls": (conversation()[2].tool_calls[0],), "index": 2})
    assert steps[4].parent == 0
    assert steps[4].copied_context
    assert steps[4].extra == {"source": "summary"}
    image = steps[1].parts[1]
    assert isinstance(image, orchard.Blob)
    assert client.trajectories.bodies.get(image) == IMAGE
    # A long text is a body of its own, and is read as a text again.
    assert steps[3].text == ""
    assert client.trajectories.text(steps[3]) == LONG
    assert [step.index for step in client.trajectories.steps(name, start=3)] == [3, 4]


def test_openai_messages_and_wire_messages_are_taken_as_they_are(client: SandboxClient) -> None:
    trajectory = client.trajectories.create(trajectory_id=new_name())
    call = {"id": "c", "type": "function", "function": {"name": "exec", "arguments": '{"command": "true"}'}}
    trajectory.append(
        {"role": "user", "content": [{"type": "text", "text": "Go."}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "refusal": "none"},
        trajectory_pb2.Step(role=trajectory_pb2.ROLE_TOOL, tool_call_id="c", content=[{"text": "done"}]),
    )
    user, assistant, tool = client.trajectories.steps(trajectory.trajectory_id)
    assert (user.role, user.text) == ("user", "Go.")
    assert assistant.tool_calls == (ToolCall("c", "exec", '{"command": "true"}'),)
    assert (assistant.reasoning, assistant.extra) == ("hm", {"refusal": "none"})
    assert (tool.tool_call_id, tool.text) == ("c", "done")
    with pytest.raises(orchard.InvalidArgument) as caught:
        trajectory.append({"role": "robot", "content": "?"})
    assert caught.value.violations[0].field == "role"


def test_a_create_and_a_seal_can_be_repeated_and_differences_are_told(client: SandboxClient) -> None:
    name = new_name()
    client.trajectories.create("i", trajectory_id=name, model="a").append(Step.user("x"))
    again = client.trajectories.create("i", trajectory_id=name, model="a")
    assert again.next_index == 1
    with pytest.raises(orchard.AlreadyExists):
        client.trajectories.create("i", trajectory_id=name, model="b")
    with pytest.raises(orchard.FailedPrecondition) as missing:
        client.trajectories.seal(name, expected_steps=2)
    assert missing.value.reason == "STEPS_MISSING"
    first, second = (client.trajectories.seal(name) for _ in range(2))
    # Its hash comes soon after the seal, between the two or not.
    assert dataclasses.replace(first, content_hash="") == dataclasses.replace(second, content_hash="")
    with pytest.raises(orchard.TrajectorySealed):
        client.trajectories.seal(name, "aborted")
    with pytest.raises(orchard.TrajectorySealed):
        client.trajectories.open(name)
    with pytest.raises(orchard.TrajectoryNotFound):
        client.trajectories.get(new_name())
    with pytest.raises(orchard.TrajectoryNotFound):
        list(client.trajectories.steps(new_name()))


def test_of_two_writers_the_loser_is_told(client: SandboxClient) -> None:
    first = client.trajectories.create(trajectory_id=new_name())
    first.append(Step.user("first"))
    with pytest.raises(orchard.WriterConflict):
        client.trajectories.open(first.trajectory_id)
    second = client.trajectories.open(first.trajectory_id, take_over=True)
    second.append(Step.user("second"))
    with pytest.raises(orchard.WriterConflict) as caught:
        first.append(Step.user("lost"))
    assert "take_over" in caught.value.message
    assert [step.text for step in client.trajectories.steps(first.trajectory_id)] == ["first", "second"]


async def test_a_live_trajectory_is_followed_to_its_seal(aclient: AsyncSandboxClient) -> None:
    trajectory = await aclient.trajectories.create(trajectory_id=new_name())
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def follow() -> list[str]:
        texts = []
        async for step in aclient.trajectories.follow(trajectory.trajectory_id):
            seen.put_nowait(step.text)
            texts.append(step.text)
        return texts

    following = asyncio.ensure_future(follow())
    for number in range(3):
        await trajectory.append(Step.user(f"step {number}"))
        assert await asyncio.wait_for(seen.get(), 110) == f"step {number}"
    await trajectory.seal()
    assert await asyncio.wait_for(following, 110) == ["step 0", "step 1", "step 2"]


async def test_appends_and_reads_outlive_their_connection(
    aclient: AsyncSandboxClient, shaky: AsyncSandboxClient, proxy: Proxy
) -> None:
    trajectory = await shaky.trajectories.create(trajectory_id=new_name())
    following = asyncio.ensure_future(_texts(shaky, trajectory.trajectory_id))
    for number in range(20):
        proxy.cut()
        await trajectory.append(*(Step.user(f"{number}.{part}") for part in range(5)))
    proxy.cut()
    await trajectory.seal()
    expected = [f"{number}.{part}" for number in range(20) for part in range(5)]
    assert await asyncio.wait_for(following, 110) == expected
    assert [step.text async for step in aclient.trajectories.steps(trajectory.trajectory_id)] == expected


async def _texts(client: AsyncSandboxClient, trajectory_id: str) -> list[str]:
    return [step.text async for step in client.trajectories.follow(trajectory_id)]


async def test_lists_exports_counts_and_deletes_go_by_filter(aclient: AsyncSandboxClient) -> None:
    dataset = new_name()
    for number in range(6):
        trajectory = await aclient.trajectories.create(
            Task(f"i-{number % 2}", dataset), trajectory_id=f"{dataset}-{number}", model="ab"[number % 2]
        )
        await trajectory.append(Step.user("go"), *(Step.assistant("turn") for _ in range(number)))
        if number != 5:
            await trajectory.seal()
            reward = Reward.excluded("the sandbox was lost") if number == 0 else Reward.scored(number > 2)
            await aclient.trajectories.annotate(trajectory.trajectory_id, rewards=reward)
    ids = [f"{dataset}-{number}" for number in range(6)]

    async def listed(**options: object) -> list[str]:
        found = aclient.trajectories.list(datasets=dataset, page_size=2, **options)  # type: ignore[arg-type]
        return [info.trajectory_id async for info in found]

    assert await listed() == ids[::-1]
    assert await listed(ascending=True) == ids
    assert await listed(order="turns") == ids[::-1]
    assert await listed(outcome_least=1) == [ids[4], ids[3]]
    assert await listed(outcome_state="excluded") == [ids[0]]
    assert await listed(statuses=["open"]) == [ids[5]]
    assert await listed(models="a", turns_most=2) == [ids[2], ids[0]]
    assert await listed(created_from=dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)) == []
    exported = [one async for one in aclient.trajectories.export(datasets=dataset)]
    assert [one.trajectory_id for one in exported] == ids
    assert {one.total for one in exported} == {6}
    assert [len(one.steps) for one in exported] == [1, 2, 3, 4, 5, 6]
    later = aclient.trajectories.export(datasets=dataset, resume_token=exported[3].resume_token, metadata_only=True)
    assert [(one.trajectory_id, len(one.steps)) async for one in later] == [(ids[4], 0), (ids[5], 0)]
    (row,) = await aclient.trajectories.stats(datasets=dataset, ks=[1, 2])
    assert (row.trajectories, row.open, row.scored, row.resolved, row.resolve_rate) == (6, 1, 4, 2, 0.5)
    # Instance 0 has samples 2 and 4 (one of two resolved); instance 1 has 1 and 3 (one of two resolved).
    assert [(one.k, one.instances, one.any, one.all) for one in row.pass_at_k] == [(1, 2, 0.5, 0.5), (2, 2, 1.0, 0.0)]
    by_model = await aclient.trajectories.stats(datasets=dataset, group_by="model")
    assert {row.value: row.trajectories for row in by_model} == {"a": 3, "b": 3}
    planned = await aclient.trajectories.delete(datasets=dataset, dry_run=True)
    assert (planned.trajectories, planned.open_skipped) == (5, 1)
    assert len(await listed()) == 6
    deleted = await aclient.trajectories.delete(datasets=dataset, outcome_state="scored")
    assert deleted.trajectories == 4
    assert await listed() == [ids[5], ids[0]]
    assert (await aclient.trajectories.delete(datasets=dataset, include_open=True)).trajectories == 2
    with pytest.raises(orchard.InvalidArgument):
        await aclient.trajectories.delete()


async def test_mistakes_name_what_there_is(aclient: AsyncSandboxClient) -> None:
    with pytest.raises(TypeError, match="no_such"):
        await aclient.trajectories.create(no_such=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="dataset"):
        [one async for one in aclient.trajectories.list(dataset="x")]  # type: ignore[call-arg]
    with pytest.raises(orchard.InvalidArgument, match="created, outcome, turns, tokens, cost"):
        [one async for one in aclient.trajectories.list(order="age")]
    with pytest.raises(orchard.InvalidArgument, match="open, completed, failed, aborted"):
        [one async for one in aclient.trajectories.list(statuses="done")]
    with pytest.raises(orchard.InvalidArgument) as caught:
        Reward.excluded("")
    assert caught.value.violations[0].field == "reason"


def test_judgements_supersede_each_other_and_none_is_lost(client: SandboxClient) -> None:
    trajectory = client.trajectories.create(trajectory_id=new_name())
    trajectory.append(Step.user("a"), Step.assistant("b"))
    name = trajectory.trajectory_id
    first = Reward.scored(0, judge="tests", version="1", details={"passed": 3})
    client.trajectories.annotate(name, rewards=first, values=[StepValue(1, "value", 0.5, "critic")], annotation_id="a")
    client.trajectories.annotate(name, rewards=first, values=[StepValue(1, "value", 0.5, "critic")], annotation_id="a")
    info = client.trajectories.annotate(name, rewards=Reward.scored(1, judge="tests", version="2"), labels={"x": "y"})
    assert info.outcome is not None
    assert (info.outcome.value, info.outcome.version, info.labels) == (1.0, "2", {"x": "y"})
    assert client.trajectories.values(name) == [StepValue(1, "value", 0.5, "critic")]
    history = list(client.trajectories.annotations(name))
    assert [one.rewards[0].version for one in history] == ["2", "1"]
    assert history[1].rewards[0].details == {"passed": 3}
    with pytest.raises(orchard.AlreadyExists):
        client.trajectories.annotate(name, labels={"other": "content"}, annotation_id="a")


def test_bodies_of_any_size_are_stored_once(client: SandboxClient, tmp_path: Path) -> None:
    data = secrets.token_bytes(3 << 20)
    path = tmp_path / "body"
    path.write_bytes(data)
    blob = client.trajectories.bodies.put(data, "video/mp4")
    assert client.trajectories.bodies.put(path, "video/mp4") == blob
    assert blob.size == len(data)
    assert client.trajectories.bodies.get(blob.sha256) == data
    assert b"".join(client.trajectories.bodies.iterate(blob, offset=100)) == data[100:]
    with pytest.raises(orchard.NotFound):
        client.trajectories.bodies.get("0" * 64)
    trajectory = client.trajectories.create(trajectory_id=new_name())
    with pytest.raises(orchard.FailedPrecondition) as caught:
        trajectory.append(Step.user(orchard.Blob("0" * 64, 1, "image/png")))
    assert caught.value.reason == "BLOB_NOT_FOUND"


def test_a_group_says_what_to_start_and_what_it_came_to(client: SandboxClient) -> None:
    name = new_name()
    plan = orchard.RolloutPlan(group_size=2, maximum=4, stride=2, low=0.5, high=0.5, eager=True)
    groups = client.trajectories.groups
    made = groups.create(name, task=Task("i", name), plan=plan)
    assert (made.start, made.group.closed, made.group.plan) == ((0, 1), False, plan)
    claimed = groups.claim(name, count=5, worker="w")
    assert [(one.group_id, one.index, one.task.instance_id) for one in claimed] == [(name, 0, "i"), (name, 1, "i")]
    assert groups.claim(name) == []
    assert groups.report(name, 0, reward=0.0, trajectory_id="t0").group is None
    following = groups.report(name, 1, reason="the sandbox was lost")
    assert following.group is None
    assert following.start
    closed = groups.report(name, following.start[0], reward=1.0).group
    assert closed is not None
    assert (closed.closed, closed.keep) == (True, True)
    # Two members with rewards 0 and 1: mean 1/2, sample standard deviation sqrt(1/2).
    advantages = sorted(member.advantage for member in closed.members if member.trainable)
    assert advantages == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)
    assert groups.get(name) == closed
    assert [sample.reason for sample in closed.samples if sample.reward is None] == ["the sandbox was lost"]
    assert [one.group_id for one in groups.list(closed=True, datasets=[name])] == [name]
    assert list(groups.list(closed=False, datasets=[name])) == []
    with pytest.raises(orchard.NotFound):
        groups.get(new_name())


def test_keys_see_their_tenant_and_do_what_their_scopes_say(platform: PlatformProcess, client: SandboxClient) -> None:
    mine = client.trajectories.create(trajectory_id=new_name())
    reader = client.keys.create("default", scopes=["trajectories:read"])
    other = client.keys.create(f"tenant-{secrets.token_hex(4)}")
    with SandboxClient(platform.endpoint, api_key=reader.secret) as reading:
        assert reading.trajectories.get(mine.trajectory_id).status == "open"
        for refused in (
            reading.trajectories.create,
            lambda: reading.trajectories.seal(mine.trajectory_id),
            lambda: reading.trajectories.annotate(mine.trajectory_id, labels={"a": "b"}),
            lambda: reading.trajectories.delete(all=True),
            lambda: reading.trajectories.groups.create(new_name()),
        ):
            with pytest.raises(orchard.PermissionDenied) as caught:
                refused()
            assert caught.value.metadata["scope"] == "trajectories:write"
    with SandboxClient(platform.endpoint, api_key=other.secret) as stranger:
        with pytest.raises(orchard.TrajectoryNotFound):
            stranger.trajectories.get(mine.trajectory_id)
        assert list(stranger.trajectories.list()) == []
        # An id belongs to a tenant: the same one is free elsewhere.
        assert stranger.trajectories.create(trajectory_id=mine.trajectory_id).next_index == 0
