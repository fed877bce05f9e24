"""GRPO advantages, the group filter, value targets and best of N, with numbers worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orchard.rewards.best_of import Attempt, best_of_report, pick
from orchard.rewards.groups import dynamic_sampling, grpo_advantages
from orchard.rewards.scores import Abstained, Excluded, Score, Scored
from orchard.rewards.values import balanced, capped, gae_targets

SCORES = st.one_of(st.floats(-10, 10).map(Scored), st.just(Excluded("sandbox lost")), st.just(Abstained("cannot tell")))


def scored(*values: float) -> list[Score]:
    return [Scored(value) for value in values]


def test_advantages() -> None:
    found = grpo_advantages(scored(1, -1, -1, -1))
    assert found.values == pytest.approx([1.499999, -0.5, -0.5, -0.5], abs=1e-5)


def test_an_excluded_member_moves_no_mean() -> None:
    found = grpo_advantages([Scored(1), Excluded("judge timeout"), Scored(0), Scored(0)])
    assert found.values == pytest.approx([1.154699, 0, -0.577349, -0.577349], abs=1e-5)
    assert found.trainable == (True, False, True, True)


def test_one_scored_member_has_nothing_to_be_compared_with() -> None:
    found = grpo_advantages([Scored(1), Excluded("x")])
    assert found.values == (0, 0)
    assert found.trainable == (True, False)


def test_the_filter() -> None:
    assert dynamic_sampling(scored(1, 0)).keep
    assert "same reward" in dynamic_sampling(scored(0, 0, 0)).reason
    assert "same reward" in dynamic_sampling(scored(-1, -1)).reason
    assert "needs two" in dynamic_sampling([Scored(1), Excluded("x")]).reason
    assert dynamic_sampling([Scored(0.7), Scored(0.7 + 5e-7)]).keep is False


def test_positives_are_counted_by_outcome_and_not_by_the_shaped_reward() -> None:
    shaped = scored(-0.6, -0.8)
    assert dynamic_sampling(shaped).keep
    assert "positive outcome" in dynamic_sampling(shaped, positive=[False, False]).reason
    assert dynamic_sampling([*scored(1.2, -0.8)], positive=[True, False]).keep
    excluded: list[Score] = [Excluded("x"), *scored(-0.6, -0.8)]
    assert not dynamic_sampling(excluded, positive=[True, False, False]).keep


@given(st.lists(SCORES, max_size=12))
def test_advantages_are_centred_and_only_of_scored_members(members: list[Score]) -> None:
    found = grpo_advantages(members)
    assert sum(found.values) == pytest.approx(0, abs=1e-6)
    assert all(value == 0 for value, trainable in zip(found.values, found.trainable, strict=True) if not trainable)


@given(st.lists(st.floats(-10, 10).map(Scored), min_size=2, max_size=8), st.integers(0, 4))
def test_excluded_members_change_no_other(members: list[Score], extra: int) -> None:
    alone = grpo_advantages(members).values
    assert grpo_advantages([*members, *[Excluded("x")] * extra]).values[: len(members)] == alone


@pytest.mark.parametrize(("reward", "targets"), [(1, [0.9231943, 0.9653, 1]), (-1, [-0.8103277, -0.8967, -1])])
def test_value_targets(reward: float, targets: list[float]) -> None:
    assert gae_targets([0.2, 0.5, 0.7], reward) == pytest.approx(targets, abs=1e-5)


def test_value_targets_of_nothing() -> None:
    assert gae_targets([], 1) == []


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=20))
def test_without_discount_and_decay_of_errors_every_target_is_the_reward(values: list[float]) -> None:
    assert gae_targets(values, 1, gamma=1, lam=1) == pytest.approx([1] * len(values), abs=1e-9)


@given(st.lists(st.integers(0, 100)), st.integers(0, 5))
def test_classes_are_balanced_in_order_and_the_same_each_time(items: list[int], seed: int) -> None:
    chosen = balanced(items, lambda item: item % 2 == 0, seed=seed)
    even = [item for item in chosen if item % 2 == 0]
    assert 2 * len(even) == len(chosen)
    assert len(even) == min(sum(item % 2 == 0 for item in items), sum(item % 2 for item in items))
    assert chosen == balanced(items, lambda item: item % 2 == 0, seed=seed)
    rest = iter(items)
    assert all(item in rest for item in chosen)


def test_a_cap_keeps_the_first_of_each_instance() -> None:
    assert capped(["a1", "b1", "a2", "a3", "b2"], lambda item: item[0], 2) == ["a1", "b1", "a2", "b2"]
    with pytest.raises(ValueError, match="at least 1"):
        capped([], str, 0)


def test_the_highest_score_is_picked_and_ties_go_to_the_lowest_index() -> None:
    attempts = [Attempt(Scored(0.5), False), Attempt(Scored(0.9), True), Attempt(Scored(0.9), False)]
    assert pick(attempts) == 1
    assert pick([Attempt(Excluded("x"), True)]) is None


def test_best_of_n_report() -> None:
    report = best_of_report(
        [
            [Attempt(Scored(0.9), True), Attempt(Scored(0.1), False)],
            [Attempt(Scored(0.9), False), Attempt(Scored(0.1), True)],
            [Attempt(Scored(0.9), False), Attempt(Excluded("judge timeout"), True)],
            [Attempt(Excluded("judge timeout"), True)],
        ]
    )
    assert (report.instances, report.without_choice) == (3, 1)
    assert report.picked == pytest.approx(1 / 3)
    assert report.oracle == pytest.approx(2 / 3)
    assert report.random == pytest.approx(1 / 3)
    assert best_of_report([]).picked is None
