"""Rubrics and agreement with labels, with numbers worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orchard.rewards.agreement import Confusion, confusion
from orchard.rewards.rubric import SOFTWARE_ENGINEERING, Rubric, combine, process_reward, process_score
from orchard.rewards.scores import Abstained, Excluded, Scored

NAMES = list(SOFTWARE_ENGINEERING.weights)
WORKED = dict(zip(NAMES, [0.8, 1, 0.5, 0.7, 0.6, 1, 0.9], strict=True))


def test_the_weighted_sum_and_the_reward() -> None:
    process = combine(SOFTWARE_ENGINEERING, WORKED)
    assert process == pytest.approx(0.795, abs=1e-9)
    assert process_reward(resolved=True, process=process) == pytest.approx(1.3975, abs=1e-9)
    assert process_reward(resolved=False, process=process) == pytest.approx(-0.6025, abs=1e-9)


def test_the_reward_of_scores_is_a_number_only_where_both_are() -> None:
    assert process_score(Scored(1), Scored(0.795)) == Scored(1.3975)
    assert process_score(Scored(0), Scored(0.795)) == Scored(-0.6025)
    assert process_score(Scored(1), Excluded("JUDGE_TIMEOUT")) == Excluded("JUDGE_TIMEOUT")
    assert process_score(Abstained("VOTES_TIED"), Scored(0.5)) == Abstained("VOTES_TIED")
    # What the platform broke outweighs what a judge would not decide.
    assert process_score(Abstained("VOTES_TIED"), Excluded("SANDBOX_LOST")) == Excluded("SANDBOX_LOST")


@pytest.mark.parametrize("name", NAMES)
def test_a_dimension_left_out_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        combine(SOFTWARE_ENGINEERING, {key: value for key, value in WORKED.items() if key != name})


@pytest.mark.parametrize("bad", [0.75, -0.1, 1.1, float("nan"), float("inf"), None, "0.8", "N/A", True])
def test_a_score_off_the_grid_is_an_error(bad: object) -> None:
    with pytest.raises(ValueError, match=r"fix_quality|finite"):
        combine(SOFTWARE_ENGINEERING, {**WORKED, "fix_quality": bad})  # type: ignore[dict-item]


def test_a_dimension_too_many_is_an_error() -> None:
    with pytest.raises(ValueError, match="style"):
        combine(SOFTWARE_ENGINEERING, {**WORKED, "style": 1})


@pytest.mark.parametrize("weights", [{}, {"a": 0.5}, {"a": 0.5, "b": 0.6}, {"a": 1.5, "b": -0.5}, {"a": 1.0, "b": 0.0}])
def test_weights_are_positive_and_add_up_to_one(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"weight"):
        Rubric(weights)


@given(st.lists(st.integers(0, 10), min_size=7, max_size=7), st.booleans())
def test_a_failed_run_never_earns_what_a_resolved_one_does(tenths: list[int], resolved: bool) -> None:
    process = combine(SOFTWARE_ENGINEERING, dict(zip(NAMES, (tenth / 10 for tenth in tenths), strict=True)))
    reward = process_reward(resolved=resolved, process=process)
    assert 0 <= process <= 1
    assert (reward > 0) is resolved


@pytest.mark.parametrize(
    ("counts", "accuracy", "kappa"),
    [
        ((40, 10, 5, 45), 0.85, 0.70),
        ((90, 5, 5, 0), 0.9, -0.052632),
        ((90, 10, 0, 0), 0.9, 0.0),
        ((100, 0, 0, 0), 1.0, None),
        ((0, 0, 0, 0), None, None),
    ],
)
def test_agreement(counts: tuple[int, int, int, int], accuracy: float | None, kappa: float | None) -> None:
    found = Confusion(*counts)
    assert found.accuracy == (None if accuracy is None else pytest.approx(accuracy, abs=1e-5))
    assert found.kappa == (None if kappa is None else pytest.approx(kappa, abs=1e-5))


def test_confusion_counts_judged_against_labelled() -> None:
    pairs = [(True, True)] * 3 + [(True, False)] * 2 + [(False, True)] + [(False, False)] * 4
    assert confusion(pairs) == Confusion(3, 2, 1, 4)
