"""What values and preferences are learned from: targets of each state, and pairs of a success and a failure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from orchard.data import Record
from orchard.trajectory.v1 import trajectory_pb2 as pb

from tests.unit.data.making import ACTION, outcome, record, said
from tests.unit.data.training import excluded, group, reasons, rows


@pytest.mark.parametrize(
    ("score", "targets"),
    [(1.0, [0.9231943, 0.9653, 1.0]), (-1.0, [-0.8103277, -0.8967, -1.0])],
)
def test_value_targets(score: float, targets: list[float]) -> None:
    # Given at an observation, or at the action that follows it: the state is the same.
    made, _ = rows("value", record(actions=3, score=score, values={0: 0.2, 1: 0.5, 2: 0.7}))
    assert [row["value"] for row in made] == [0.2, 0.5, 0.7]
    steps = record(actions=3, score=score)
    values = [pb.StepValue(index=2 + 2 * n, name="value", value=v) for n, v in enumerate((0.2, 0.5, 0.7))]
    made, report = rows("value", Record(steps.trajectory, steps.steps, values))
    assert [row["target"] for row in made] == pytest.approx(targets, abs=1e-5)
    assert [row["reward"] for row in made] == [0.0, 0.0, score]
    assert [len(row["messages"]) for row in made] == [2, 4, 6]
    assert report.losses == ()


def test_responses_in_a_row_are_one_decision() -> None:
    made = record(actions=1)
    steps = [*made.steps[:3], said(3, ACTION, "and more")]
    (row,), _ = rows("value", replace(made, steps=steps))
    assert [message["content"] for message in row["response"]] == ["action 0", "and more"]
    assert (row["reward"], row["target"]) == (1.0, None)


def test_value_data_needs_a_verdict() -> None:
    made, report = rows("value", record(score=None), excluded("x"))
    assert made == []
    assert sorted(reasons(report)) == ["it has no verdict", "its outcome is excluded or was not decided"]


def test_preferences_pair_successes_with_failures() -> None:
    members = [record("a", score=1.0), record("b", score=-1.0), record("c", actions=3, score=-1.0), excluded("d")]
    members[0].steps[2].content[0].text = "better"
    (row,), _ = rows("preference", group(*members))
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["chosen"][0]["content"] == "better"
    assert row["rejected"][0]["content"] == "action 0"
    assert (row["chosen_id"], row["rejected_id"]) == ("a", "b")
    assert (row["score_chosen"], row["score_rejected"]) == (1.0, -1.0)
    made, report = rows("preference", group(record("a"), record("b")))
    assert (made, reasons(report)) == ([], ["it has no success, or no failure, to pair"])


def test_a_pair_that_does_not_differ_is_left_out() -> None:
    made, report = rows("preference", group(record("a"), record("b", score=-1.0)))
    assert (made, reasons(report)) == ([], ["the two do not begin alike, or do not differ"])


def test_the_outcome_decides_not_the_sign_of_a_shaped_reward() -> None:
    made = record(score=0.2)
    made.trajectory.outcome.CopyFrom(outcome(0.2))
    assert made.resolved is True
    assert record(score=0.0).resolved is False
