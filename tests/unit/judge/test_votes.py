"""Votes: how they are put together, ties, quorums, both orders."""

import pytest
from orchard.rewards.scores import Abstained, Excluded, Score, Scored

from services.judge.model import Aggregation, Kind, Parameters, Reading
from services.judge.rubrics import SOFTWARE_ENGINEERING
from services.judge.votes import both_orders, combine, default_aggregation
from tests.unit.judge.questions import question

LOST = Reading(Excluded("JUDGE_TIMEOUT"), "it took too long")
MUTE = Reading(Abstained("JUDGE_REFUSED"), "no")


def votes(*values: float) -> list[Reading]:
    return [Reading(Scored(value)) for value in values]


def together(
    readings: list[Reading],
    aggregation: Aggregation = Aggregation.MAJORITY,
    *,
    kind: Kind = Kind.OUTCOME,
    quorum: int | None = None,
) -> Reading:
    needed = len(readings) // 2 + 1 if quorum is None else quorum
    return combine(question(kind), readings, Parameters(len(readings), aggregation, needed, None, 100))


@pytest.mark.parametrize(
    ("readings", "score"),
    [
        (votes(1), Scored(1)),
        (votes(1, 1, 0), Scored(1)),
        (votes(0, 1, 0), Scored(0)),
        (votes(1, 0), Abstained("VOTES_TIED")),
        (votes(1, 1, 0, 0), Abstained("VOTES_TIED")),
        ([*votes(1, 1), LOST], Scored(1)),
        ([*votes(1, 0), LOST], Excluded("JUDGE_TIMEOUT")),
        ([*votes(1, 0), MUTE], Abstained("VOTES_TIED")),
        ([*votes(1), LOST, LOST], Excluded("JUDGE_TIMEOUT")),
        ([*votes(1), MUTE, MUTE], Abstained("JUDGE_REFUSED")),
        ([*votes(1), LOST, MUTE], Excluded("JUDGE_TIMEOUT")),
        ([LOST, Reading(Excluded("ANSWER_EMPTY"), "")], Excluded("QUORUM_MISSED")),
        ([LOST], Excluded("JUDGE_TIMEOUT")),
    ],
)
def test_majority(readings: list[Reading], score: Score) -> None:
    assert together(readings).score == score


def test_a_tie_is_a_judgement_only_where_no_lost_vote_might_have_decided_it() -> None:
    assert together([*votes(1, 0.5, 0), LOST], kind=Kind.PAIRWISE).score == Abstained("VOTES_TIED")
    undecided = together([*votes(1, 0), LOST, Reading(Excluded("ANSWER_EMPTY"), "")], quorum=2)
    assert undecided.score == Excluded("QUORUM_MISSED")
    assert "2 that might have decided are missing: it took too long" in undecided.message


def test_majority_of_pairs_needs_more_than_half() -> None:
    assert together(votes(1, 0.5, 0), kind=Kind.PAIRWISE).score == Abstained("VOTES_TIED")
    assert together(votes(0.5, 0.5, 0), kind=Kind.PAIRWISE).score == Scored(0.5)


@pytest.mark.parametrize(
    ("aggregation", "values", "expected"),
    [
        (Aggregation.MEAN, (0.1, 0.2, 0.6), 0.3),
        (Aggregation.MEDIAN, (0.1, 0.9, 0.2), 0.2),
        (Aggregation.MEDIAN, (0.1, 0.9, 0.2, 0.4), 0.3),
        (Aggregation.MINIMUM, (0.4, 0.1, 0.9), 0.1),
        (Aggregation.MEAN, (1, 0, 1, 1), 0.75),
    ],
)
def test_numbers(aggregation: Aggregation, values: tuple[float, ...], expected: float) -> None:
    assert together(votes(*values), aggregation).value == pytest.approx(expected, abs=1e-12)


def test_votes_without_a_number_never_move_a_mean() -> None:
    assert together([*votes(0.5, 0.7), LOST], Aggregation.MEAN).value == pytest.approx(0.6, abs=1e-12)
    assert together([*votes(0.5), LOST, LOST], Aggregation.MEAN, quorum=1).value == 0.5


def test_a_quorum_of_all() -> None:
    assert together([*votes(1, 1), LOST], quorum=3).score == Excluded("JUDGE_TIMEOUT")


@pytest.mark.parametrize(
    ("aggregation", "expected"), [(Aggregation.MEAN, 0.6), (Aggregation.MEDIAN, 0.5), (Aggregation.MINIMUM, 0.3)]
)
def test_rubrics_go_criterion_by_criterion(aggregation: Aggregation, expected: float) -> None:
    readings = [
        Reading(Scored(score), scores=dict.fromkeys(SOFTWARE_ENGINEERING.weights, score)) for score in (0.5, 1.0, 0.3)
    ]
    found = together(readings, aggregation, kind=Kind.RUBRIC)
    assert found.value == pytest.approx(expected, abs=1e-12)
    assert found.scores == pytest.approx(dict.fromkeys(SOFTWARE_ENGINEERING.weights, expected), abs=1e-12)


def test_value_curves_go_state_by_state() -> None:
    """Linear between the states that each judge chose, constant beyond them."""
    readings = [
        Reading(Scored(0.8), values=((0, 0.0), (2, 0.8))),
        Reading(Scored(0.2), values=((1, 0.2),)),
    ]
    found = together(readings, Aggregation.MEAN, kind=Kind.VALUE_CURVE)
    assert [value for _state, value in found.values] == pytest.approx([0.1, 0.3, 0.5], abs=1e-12)
    assert found.value == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize(
    ("forward", "backward", "score"),
    [
        (1, 0, Scored(1)),
        (0, 1, Scored(0)),
        (0.5, 0.5, Scored(0.5)),
        (1, 1, Abstained("ORDER_DEPENDENT")),
        (0, 0, Abstained("ORDER_DEPENDENT")),
        (1, 0.5, Abstained("ORDER_DEPENDENT")),
        (0.5, 0, Abstained("ORDER_DEPENDENT")),
    ],
)
def test_a_preference_must_outlive_the_order(forward: float, backward: float, score: Score) -> None:
    assert both_orders(*votes(forward, backward)).score == score


def test_a_failure_in_either_order_is_a_failure() -> None:
    good = votes(1)[0]
    assert both_orders(good, LOST).score == both_orders(LOST, good).score == both_orders(MUTE, LOST).score == LOST.score
    assert both_orders(good, MUTE).score == MUTE.score


def test_defaults() -> None:
    found = {kind: default_aggregation(kind) for kind in Kind}
    numbers = {Kind.RUBRIC, Kind.VALUE_CURVE, Kind.CLAW_EVAL}
    assert found == {kind: Aggregation.MEDIAN if kind in numbers else Aggregation.MAJORITY for kind in Kind}
