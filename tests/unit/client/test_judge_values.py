"""What becomes of verdicts: rewards by the names that the platform goes by, values where the judge saw them."""

import datetime as dt
from typing import Any

import pytest
from orchard import InvalidArgument, Reward, StateEstimate, StepValue, TrajectoryInfo, Verdict, process_reward_of
from orchard._client.judge.convert import judgement_message, verdict_of
from orchard._client.trajectories import convert
from orchard._client.trajectories.writer import prepared
from orchard.judge.v1 import judge_pb2
from orchard.trajectory.v1 import trajectory_pb2


def verdict(kind: str, *values: judge_pb2.StateValue) -> Verdict:
    return verdict_of(
        judge_pb2.Verdict(
            verdict_id="v",
            kind=judge_pb2.JudgementKind.Value(f"JUDGEMENT_KIND_{kind.upper()}"),
            state=judge_pb2.VERDICT_STATE_SCORED,
            value=0.3,
            values=values,
            votes=[judge_pb2.Vote(judge="main"), judge_pb2.Vote(judge="main")],
            provenance=judge_pb2.Provenance(prompt_version="p/1"),
        )
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("outcome", "outcome"),
        ("gui_success", "outcome"),
        ("rubric", "process"),
        ("pairwise", "pairwise"),
        ("claw_eval", "claw_eval"),
        ("value_curve", "value_curve"),
    ],
)
def test_only_what_says_a_success_is_an_outcome(kind: str, name: str) -> None:
    """A rubric's 0.3 kept as an outcome would count as a success."""
    assert verdict(kind).reward().name == name
    assert verdict(kind).reward("other").name == "other"


def test_a_curve_stands_at_the_actions_that_follow_and_its_end_at_the_last_step() -> None:
    found = verdict(
        "value_curve",
        judge_pb2.StateValue(state=0, step_index=1, value=0.1),
        judge_pb2.StateValue(state=2, step_index=5, value=0.4),
        judge_pb2.StateValue(state=3, step_index=7, value=0.0, final=True),
    )
    assert found.values[-1] == StateEstimate(3, 7, 0.0, final=True)
    assert found.step_values() == (
        StepValue(1, "value", 0.1, "main", "p/1"),
        StepValue(5, "value", 0.4, "main", "p/1"),
        StepValue(6, "final_value", 0.0, "main", "p/1"),
    )
    assert verdict("outcome").step_values() == ()


def info(*rewards: Reward) -> TrajectoryInfo:
    messages = [convert.reward_message(reward) for reward in rewards]
    for number, message in enumerate(messages):
        message.time.FromDatetime(dt.datetime(2026, 1, 1, number, tzinfo=dt.UTC))
    outcome = next((message for message in messages if message.name == "outcome"), None)
    return convert.trajectory_of(trajectory_pb2.Trajectory(trajectory_id="t", outcome=outcome, rewards=messages))


def test_the_process_reward_of_a_trajectory() -> None:
    both = info(Reward.scored(1), Reward.scored(0.2, name="process"), Reward.scored(0.795, name="process", judge="b"))
    found = process_reward_of(both)
    assert found is not None
    assert (found.name, found.value, found.judge) == ("process_reward", pytest.approx(1.3975, abs=1e-9), "b")
    assert found.details == {"outcome": 1.0, "process": 0.795, "alpha": 0.5}
    failed = process_reward_of(info(Reward.scored(0), Reward.scored(0.795, name="style")), "style", name="shaped")
    assert failed is not None
    assert (failed.name, failed.value) == ("shaped", pytest.approx(-0.6025, abs=1e-9))


def test_without_both_there_is_none_and_without_a_number_no_number() -> None:
    assert process_reward_of(info(Reward.scored(1))) is None
    assert process_reward_of(info(Reward.scored(0.5, name="process"))) is None
    lost = process_reward_of(info(Reward.excluded("SANDBOX_LOST"), Reward.scored(0.5, name="process")))
    assert lost is not None
    assert (str(lost.state), lost.value, lost.reason) == ("excluded", None, "SANDBOX_LOST")
    with pytest.raises(ValueError, match="between 0 and 1"):
        process_reward_of(info(Reward.scored(1), Reward.scored(3, name="process")))


@pytest.mark.parametrize("given", ["tr-1", None, 5])
def test_what_is_neither_a_judgement_nor_a_step_is_told_so(given: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"judgement: must be a Judgement, as `judge.of_trajectory\(id\)` makes"):
        judgement_message(given)
    with pytest.raises(InvalidArgument, match=rf"step: must be a Step or a message .*, not {type(given).__name__}"):
        prepared(given)
