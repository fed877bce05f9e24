"""What policies are trained on: masks by message and token, groups, and rows of trainers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from orchard._client.trajectories.convert import openai_message, step_of
from orchard.data import Record
from orchard.data.messages import inline_images, message_of, role_name
from orchard.data.training.conversations import conversations
from orchard.data.training.examples import plain_messages
from orchard.data.training.tokens import token_sequences
from orchard.trajectory.v1 import trajectory_pb2 as pb

from tests.unit.data.making import ACTION, branching, record, with_image
from tests.unit.data.strategies import SLOW, records
from tests.unit.data.training import excluded, group, reasons, rows


def test_loss_on_every_action_of_a_success() -> None:
    (row,), report = rows("sft", record(tokens=True))
    assert [message["role"] for message in row["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert row["loss_mask"] == [0, 0, 1, 0, 1, 0]
    assert row["sequences"] == [
        {"input_ids": [1, 2, 100, 101, 7, 110, 111], "loss_mask": [0, 0, 1, 1, 0, 1, 1]},
    ]
    assert report.losses == ()


def test_what_teaches_nothing_is_left_out_with_its_reason() -> None:
    aborted = record("aborted")
    aborted.trajectory.status = pb.TRAJECTORY_STATUS_ABORTED
    opened = record("open")
    opened.trajectory.status = pb.TRAJECTORY_STATUS_OPEN
    made, report = rows("sft", record("bad", score=-1.0), aborted, opened, excluded("lost"), record("mute", actions=0))
    assert made == []
    assert sorted(reasons(report)) == [
        "it is still open",
        "it is unresolved: rise segments would train on what helped",
        "it was aborted, by no fault of the agent",
        "its outcome is excluded or was not decided",
        "the model wrote nothing in it",
    ]
    assert len(rows("sft", record("bad", score=-1.0), loss="all")[0]) == 1


def test_what_nothing_judged_is_trained_on() -> None:
    assert len(rows("sft", record(score=None))[0]) == 1


def test_each_response_of_a_tree_is_trained_once() -> None:
    tree = branching()
    found = conversations(tree)
    assert [one.path for one in found] == [(0, 1, 2, 3, 4), (0, 1, 2, 3, 5), (6, 7, 8)]
    assert [one.trained for one in found] == [(2, 4), (5,), (8,)]
    made, _ = rows("sft", tree)
    assert [row["id"] for row in made] == ["tree.b0", "tree.b1", "tree.b2"]
    turns, _ = rows("sft-turns", tree)
    assert [row["messages"][-1]["content"] for row in turns] == ["action 0", "first way", "second way", "third way"]
    assert all(row["loss_mask"] == [0] * (len(row["messages"]) - 1) + [1] for row in turns)


@settings(SLOW, max_examples=40)
@given(made=records())
def test_every_response_has_loss_once_whatever_the_tree(made: Record) -> None:
    found = conversations(made)
    trained = [index for one in found for index in one.trained]
    wanted = [step.index for step in made.steps if step.role == ACTION and not step.copied_context]
    assert sorted(trained) == wanted
    for one in found:
        for before, after in zip(one.path, one.path[1:], strict=False):
            step = made.steps[after]
            assert before == (step.parent if step.HasField("parent") else after - 1)


def test_rises_of_a_failure() -> None:
    """The worked curve: V given at states 0, 3, 5, 6 and 10 of ten actions; actions 0 1 2 5 train."""
    failure = record(actions=10, score=-1.0, values={0: 0.1, 3: 0.4, 5: 0.4, 6: 0.6, 10: 0.0}, tokens=True)
    (row,), _ = rows("sft-rises", failure)
    actions = [
        loss for message, loss in zip(row["messages"], row["loss_mask"], strict=True) if message["role"] == "assistant"
    ]
    assert actions == [1, 1, 1, 0, 0, 1]
    assert row["messages"][-1]["content"] == "action 5"
    assert {
        loss for message, loss in zip(row["messages"], row["loss_mask"], strict=True) if message["role"] != "assistant"
    } == {0}
    (sequence,) = row["sequences"]
    trained = [token for token, mask in zip(sequence["input_ids"], sequence["loss_mask"], strict=True) if mask]
    assert trained == [100, 101, 110, 111, 120, 121, 150, 151]
    # What follows the last rise is cut.
    assert sequence["input_ids"][-1] == 151


def test_a_failure_without_a_rise_gives_nothing() -> None:
    made, report = rows(
        "sft-rises",
        record("slow", actions=12, score=-1.0, values={0: 0.1, 10: 0.4, 12: 0.0}),
        record("blind", score=-1.0),
        record("unjudged", score=None),
    )
    assert made == []
    assert sorted(reasons(report)) == [
        "it is unresolved and has no values",
        "it is unresolved and no action raised its value",
        "its outcome is no number",
    ]


def test_a_success_is_kept_whole_whatever_its_values() -> None:
    (row,), _ = rows("sft-rises", record(values={0: 0.9, 2: 0.1}))
    assert row["loss_mask"] == [0, 0, 1, 0, 1, 0]


def test_values_that_cannot_be() -> None:
    made, report = rows("sft-rises", record(score=-1.0, values={0: 1.5}))
    assert made == []
    assert "from 0 to 1" in reasons(report)[0]


def test_a_final_value_is_that_of_the_last_state() -> None:
    failure = record(actions=1, score=-1.0, values={0: 0.1})
    values = [*failure.values, pb.StepValue(index=2, name="final_value", value=0.4)]
    (row,), _ = rows("sft-rises", Record(failure.trajectory, failure.steps, values))
    assert row["loss_mask"] == [0, 0, 1]


def test_a_prompt_of_other_tokens_begins_another_sequence() -> None:
    made = record(actions=3, tokens=True)
    call = made.steps[6].model_call
    call.prompt_token_ids[0] = 99
    (conversation,) = conversations(made)
    first, second = token_sequences(made, conversation)
    assert (first.steps, second.steps) == ((2, 4), (6,))
    assert second.ids[0] == 99
    assert sum(first.mask) + sum(second.mask) == 6
    assert sum(second.mask) == 2


@settings(SLOW, max_examples=40)
@given(made=records())
def test_tokens_with_loss_are_those_of_the_responses(made: Record) -> None:
    for conversation in conversations(made):
        steps = [made.steps[index] for index in conversation.trained]
        if not all(step.model_call.prompt_token_ids and step.model_call.completion_token_ids for step in steps):
            continue
        sequences = token_sequences(made, conversation)
        found = [token for one in sequences for token, mask in zip(one.ids, one.mask, strict=True) if mask]
        assert found == [token for step in steps for token in step.model_call.completion_token_ids]
        for one in sequences:
            assert len(one.ids) == len(one.mask) == len(one.temperatures)


def test_a_long_example_is_left_out_or_cut_on_its_left() -> None:
    long = record(actions=4)
    long.steps[1].content[0].text = "x" * 400
    made, report = rows("sft-turns", long, max_tokens=60)
    assert made == []
    assert reasons(report) == ["longer than 60 tokens"]
    cut, report = rows("sft-turns", long, max_tokens=60, truncate="left")
    assert len(cut) == 4
    for row in cut:
        assert row["loss_mask"][-1] == 1
        # It begins with no answer to a call that was cut off.
        assert row["messages"][0]["role"] != "tool"
    assert reasons(report) == []


def test_tokens_are_cut_on_their_left() -> None:
    (row,), _ = rows("trl-tokens", record(tokens=True), max_tokens=3, truncate="left")
    assert row == {"input_ids": [7, 110, 111], "labels": [-100, 110, 111]}
    made, report = rows("trl-tokens", record(tokens=True), max_tokens=3)
    assert (made, reasons(report)) == ([], ["longer than 3 tokens"])


def test_trl() -> None:
    made, _ = rows("trl", record(tokens=True))
    assert [set(row) for row in made] == [{"prompt", "completion", "tools"}] * 2
    assert [row["completion"][0]["content"] for row in made] == ["action 0", "action 1"]
    assert [len(row["prompt"]) for row in made] == [2, 4]
    (row,), _ = rows("trl-tokens", record(tokens=True))
    assert row == {"input_ids": [1, 2, 100, 101, 7, 110, 111], "labels": [-100, -100, 100, 101, -100, 110, 111]}
    made, report = rows("trl-tokens", record())
    assert (made, reasons(report)) == ([], ["the tokens of step 2 are not known"])


def test_images_have_placeholders_and_a_text_that_has_one_is_refused() -> None:
    (row,), _ = rows("sft", with_image("gui", 2, 1.0))
    assert [message["content"] for message in row["messages"] if message["role"] == "user"] == [
        "Fix it.",
        "See <image>",
        "See <image>",
    ]
    assert len(row["images"]) == 2
    assert row["images"][0].startswith("data:image/png;base64,")
    bad = with_image("bad", 1, 1.0)
    bad.steps[1].content[0].text = "What is <image>?"
    made, report = rows("sft", bad)
    assert (made, reasons(report)) == ([], ["a text has <image> in it"])


def test_advantages_of_a_group() -> None:
    """[1, -1, -1, -1] -> 1.499999, -.5, -.5, -.5."""
    members = [record(f"t{n}", score=score, tokens=True) for n, score in enumerate([1.0, -1.0, -1.0, -1.0])]
    (row,), _ = rows("grpo", group(*members))
    assert [one["advantage"] for one in row["members"]] == pytest.approx([1.499999, -0.5, -0.5, -0.5], abs=1e-5)
    assert row["recipe"]["name"] == "swe"


def test_an_excluded_member_moves_no_mean_and_has_no_loss() -> None:
    """[1, 1 (excluded), 0, 0] -> 1.154699, 0, -.577349, -.577349."""
    members = [record("a", score=1.0), excluded("b"), record("c", score=0.0), record("d", score=0.0)]
    (row,), _ = rows("grpo", group(*members))
    assert [one["advantage"] for one in row["members"]] == pytest.approx([1.154699, 0, -0.577349, -0.577349], abs=1e-5)
    assert [one["mask"] for one in row["members"]] == [1, 0, 1, 1]
    lost = row["members"][1]
    assert (lost["state"], lost["reason"], lost["reward"]) == ("excluded", "sandbox lost", None)
    assert sum(lost["conversations"][0]["loss_mask"]) == 0


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ([1.0, 1.0], "all scored members have the same reward"),
        ([1.0], "1 of 1 members are scored; a comparison needs two"),
        ([0.0, -1.0], "no scored member has a positive outcome"),
    ],
)
def test_groups_that_teach_nothing(scores: list[float], reason: str) -> None:
    members = [record(f"t{n}", score=score, tokens=True) for n, score in enumerate(scores)]
    for name in ("grpo", "slime", "verl", "prime-rl"):
        made, report = rows(name, group(*members))
        assert (made, reasons(report)) == ([], [reason])


def test_a_shaped_reward_is_trained_on_and_the_outcome_says_what_is_a_success() -> None:
    members = [record("a", score=1.0), record("b", score=-1.0)]
    for member, value in zip(members, (1.3975, -0.6025), strict=True):
        member.trajectory.rewards.append(pb.Reward(name="shaped", state=pb.REWARD_STATE_SCORED, value=value))
    (row,), _ = rows("grpo", group(*members), reward="shaped")
    assert [one["reward"] for one in row["members"]] == [1.3975, -0.6025]
    made, report = rows("grpo", group(*members), reward="other")
    assert (made, reasons(report)) == ([], ["0 of 2 members are scored; a comparison needs two"])


def test_slime() -> None:
    good, bad = record("a", score=1.0, tokens=True, instance_id="i"), record("b", score=-1.0, tokens=True)
    bad.trajectory.status = pb.TRAJECTORY_STATUS_FAILED
    bad.steps[4].model_call.prompt_token_ids[0] = 9
    bad.trajectory.policy_version = "17"
    made, report = rows("slime", group(good, excluded("c"), bad, number=3, first=8))
    assert [row["rollout_id"] for row in made] == [8, 10, 10]
    assert [row["index"] for row in made] == [0, 1, 2]
    assert {row["group_index"] for row in made} == {3}
    first = made[0]
    assert first["tokens"] == [1, 2, 100, 101, 7, 110, 111]
    assert first["response_length"] == len(first["loss_mask"]) == len(first["rollout_log_probs"]) == 5
    assert first["loss_mask"] == [1, 1, 0, 1, 1]
    assert first["rollout_log_probs"] == [-0.5, -0.25, 0.0, -0.5, -0.25]
    assert (first["reward"], first["status"], first["label"]) == (1.0, "completed", "i")
    assert (made[1]["status"], made[1]["weight_versions"]) == ("truncated", ["17"])
    assert not any(row["remove_sample"] for row in made)
    assert reasons(report) == ["it does not count: sandbox lost"]


def test_verl() -> None:
    made, _ = rows("verl", group(record("a", tokens=True), record("b", score=-1.0, tokens=True)))
    first = made[0]
    assert first["prompt_ids"] == [1, 2]
    assert first["response_ids"] == [100, 101, 7, 110, 111]
    assert first["response_mask"] == [1, 1, 0, 1, 1]
    assert first["response_logprobs"] == [-0.5, -0.25, 0.0, -0.5, -0.25]
    assert (first["reward_score"], first["num_turns"]) == (1.0, 5)
    assert {row["extra_fields"]["uid"] for row in made} == {"g"}


def test_prime_rl() -> None:
    good = record("a", tokens=True)
    good.steps[2].model_call.parameters_json = json.dumps({"temperature": 0.7})
    made, _ = rows("prime-rl", group(good, record("b", score=-1.0, tokens=True)), environment="calc")
    first = made[0]
    assert first["token_ids"] == [1, 2, 100, 101, 7, 110, 111]
    assert first["mask"] == [False, False, True, True, False, True, True]
    assert first["temperatures"] == [1.0, 1.0, 0.7, 0.7, 1.0, 1.0, 1.0]
    (channel,) = first["advantages"]
    assert channel["mask"] == first["mask"]
    assert channel["values"] == pytest.approx([0, 0, 0.7071, 0.7071, 0, 0.7071, 0.7071], abs=1e-3)
    assert {len(first[key]) for key in ("token_ids", "mask", "logprobs", "temperatures")} == {7}
    unknown = record("c", tokens=True)
    for step in unknown.steps:
        del step.model_call.logprobs[:]
    _, report = rows("prime-rl", group(unknown, record("b", score=-1.0, tokens=True)))
    assert reasons(report) == ["log-probs are not known, and prime-rl needs them"]


@given(made=records())
@settings(SLOW)
def test_a_message_is_the_same_wherever_it_is_made(made: Record) -> None:
    """In the SDK, in rows that are trained on, and in a line of OpenAI's form, where that has nothing of its own."""
    for index, step in enumerate(made.steps):
        own = step.extra_json or any(call.extra_json for call in step.tool_calls)
        if own or any(part.HasField("blob") for part in step.content):
            continue
        texts = [part.text for part in step.content]
        (row,), images = plain_messages(made, (index,))
        assert images == []
        assert row == openai_message(step_of(step), role_name(step.role), "".join(texts))
        line = message_of(step, made.bodies, inline_images(made.bodies))
        parts = [{"type": "text", "text": text} for text in texts]
        assert line == {**row, "content": parts if len(parts) > 1 else texts[0] if texts else None}
        assert list(line) == list(row)
