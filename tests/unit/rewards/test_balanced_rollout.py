"""Balanced adaptive rollout against the worked streams, and what must hold of any stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orchard.rewards.balanced_rollout import BalancedRollout, Group, Outcome, RolloutPlan, band
from orchard.rewards.groups import dynamic_sampling, grpo_advantages
from orchard.rewards.scores import Excluded, Score, Scored

OUTCOMES = {"+": Outcome.POSITIVE, "-": Outcome.NEGATIVE, "a": Outcome.UNSCORED}
LETTERS = {outcome: letter for letter, outcome in OUTCOMES.items()}
REWARDS: dict[str, Score] = {"+": Scored(1), "-": Scored(0), "a": Excluded("aborted")}


def run(stream: str, plan: RolloutPlan) -> tuple[int, Group]:
    """Report a stream in its order; how many were asked for, and the group."""
    rollout = BalancedRollout(plan)
    asked = rollout.begin().start
    for index, letter in enumerate(stream):
        decision = rollout.report(index, OUTCOMES[letter])
        asked += decision.start
        if decision.group is not None:
            return asked, decision.group
    raise AssertionError("the group never closed")


def letters(group: Group) -> str:
    return "".join(LETTERS[member.outcome] for member in group.members)


@pytest.mark.parametrize(
    ("stream", "plan", "stopped", "mix"),
    [
        ("+---", RolloutPlan(4, 8, 4), 4, (1, 3)),
        ("++--", RolloutPlan(4, 8, 4), 4, (2, 2)),
        ("----+---", RolloutPlan(4, 8, 4), 8, (1, 3)),
        ("+++a+++-", RolloutPlan(4, 8, 4), 8, (3, 1)),
        ("++++-+++", RolloutPlan(4, 8, 8), 8, (3, 1)),
        ("++--+", RolloutPlan(5, 10, 5), 5, (3, 2)),
        ("+++---", RolloutPlan(5, 10, 6), 6, (2, 3)),
        ("++++----", RolloutPlan(7, 8, 8), 8, (4, 3)),
    ],
)
def test_streams_that_close_within_the_band(stream: str, plan: RolloutPlan, stopped: int, mix: tuple[int, int]) -> None:
    asked, group = run(stream, plan)
    assert asked == stopped
    assert (letters(group).count("+"), letters(group).count("-")) == mix
    assert not group.short
    assert not group.fallback


def test_one_class_alone_falls_back_and_is_dropped_by_the_filter() -> None:
    asked, group = run("--------", RolloutPlan(4, 8, 4))
    assert asked == 8
    assert letters(group) == "----"
    assert group.fallback
    assert not dynamic_sampling([REWARDS[letter] for letter in letters(group)]).keep


def test_a_short_group_is_filled_up_with_masked_attempts() -> None:
    asked, group = run("aaaaaa+-", RolloutPlan(4, 8, 4))
    assert asked == 8
    assert letters(group) == "+-aa"
    assert group.short
    scores = [REWARDS[letter] for letter in letters(group)]
    assert dynamic_sampling(scores).keep
    advantages = grpo_advantages(scores)
    assert advantages.values == pytest.approx([0.707106, -0.707106, 0, 0], abs=1e-5)
    assert advantages.trainable == (True, True, False, False)


def test_bands_are_exact_decimals() -> None:
    assert band(100, 0.07, 0.29)[:2] == (7, 29)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"maximum": 3}, "maximum"),
        ({"low": 0.3, "high": 0.4}, "no whole number"),
        ({"low": 0.8, "high": 0.2}, "low"),
        ({"stride": 0}, "stride"),
        ({"group_size": 0}, "group_size"),
        ({"low": float("nan")}, "finite"),
    ],
)
def test_plans_that_cannot_be(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutPlan(**arguments)  # type: ignore[arg-type]


def test_the_last_stride_is_what_remains() -> None:
    rollout = BalancedRollout(RolloutPlan(4, 7, 5))
    assert rollout.begin().start == 5
    assert rollout.begin().start == 0
    more = [rollout.report(index, Outcome.UNSCORED).start for index in range(5)]
    assert more == [0, 0, 0, 0, 2]


def test_a_report_twice_changes_nothing_and_another_one_is_refused() -> None:
    rollout = BalancedRollout(RolloutPlan(4, 8, 4))
    rollout.begin()
    rollout.report(0, Outcome.POSITIVE)
    rollout.report(0, Outcome.POSITIVE)
    assert len(rollout.finished) == 1
    with pytest.raises(ValueError, match="before"):
        rollout.report(0, Outcome.NEGATIVE)
    with pytest.raises(ValueError, match="not asked for"):
        rollout.report(4, Outcome.NEGATIVE)


def test_an_eager_plan_closes_at_once_and_cancels_the_rest() -> None:
    rollout = BalancedRollout(RolloutPlan(4, 8, 8, eager=True))
    rollout.begin()
    decisions = [rollout.report(index, OUTCOMES[letter]) for index, letter in zip((0, 5, 2, 7), "+--+", strict=True)]
    assert [decision.group is not None for decision in decisions] == [False, False, False, True]
    assert letters(rollout.group) == "+--+"
    assert decisions[-1].cancel == (1, 3, 4, 6)
    late = rollout.report(1, Outcome.POSITIVE)
    assert (late.group, late.start) == (rollout.group, 0)


PLANS = st.tuples(st.integers(2, 8), st.integers(0, 8), st.integers(1, 9)).map(
    lambda numbers: RolloutPlan(numbers[0], numbers[0] + numbers[1], numbers[2], 0.25, 0.75)
)


@given(PLANS, st.data())
def test_any_stream_closes_once_with_a_whole_group(plan: RolloutPlan, data: st.DataObject) -> None:
    stream = data.draw(st.text("+-a", min_size=plan.maximum, max_size=plan.maximum))
    asked, group = run(stream, plan)
    assert len(group.members) == plan.group_size
    assert plan.group_size <= asked <= plan.maximum
    indices = [member.index for member in group.members]
    assert len(set(indices)) == plan.group_size
    if not group.short:
        assert indices == sorted(indices)
        assert "a" not in letters(group)
    if not group.fallback:
        least, most, _target = band(plan.group_size, plan.low, plan.high)
        assert least <= letters(group).count("+") <= most


@given(PLANS, st.data())
def test_the_order_of_arrival_within_a_stride_does_not_change_a_group_that_is_not_short(
    plan: RolloutPlan, data: st.DataObject
) -> None:
    stream = data.draw(st.text("+-a", min_size=plan.maximum, max_size=plan.maximum))
    rollout = BalancedRollout(plan)
    start = rollout.begin().start
    first, group = 0, None
    while group is None:
        for index in data.draw(st.permutations(range(first, first + start))):
            decision = rollout.report(index, OUTCOMES[stream[index]])
            group = group or decision.group
        first, start = first + start, rollout.started - first - start
    _asked, in_order = run(stream, plan)
    if not in_order.short:
        assert group == in_order
