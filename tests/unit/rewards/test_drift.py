"""Reliability and drift, with numbers worked by hand."""

import pytest
from orchard.rewards.agreement import Bin, Confusion, drift, reliability


def test_what_people_said_by_what_the_judge_said() -> None:
    bins = reliability([(0.0, False), (0.1, False), (0.3, True), (0.34, False), (1.0, True)], 10)
    assert [one.count for one in bins] == [1, 1, 0, 2, 0, 0, 0, 0, 0, 1]
    assert bins[3] == Bin(0.3, 0.4, 2, pytest.approx(0.32), 0.5)
    assert bins[2] == Bin(0.2, 0.3, 0, None, None)
    assert (bins[-1].mean_value, bins[-1].positive_share) == (1.0, 1.0)


@pytest.mark.parametrize("tenths", range(10))
def test_a_bin_begins_where_it_says(tenths: int) -> None:
    """0.3 * 10 is not 3 everywhere in binary, nor 0.7 * 10 always 7."""
    assert reliability([(tenths / 10, True)], 10)[tenths].count == 1


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_values_that_are_none(value: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        reliability([(value, True)])


def test_drift_counts_what_changed() -> None:
    before = {"a": 0.2, "b": 0.6, "c": 0.9, "d": None, "e": 0.4, "gone": 1.0}
    after = {"a": 0.6, "b": 0.4, "c": 0.9, "d": 0.5, "e": None, "new": 0.0}
    found = drift(before, after)
    assert (found.items, found.scored, found.gained, found.lost) == (5, 3, 1, 1)
    assert found.mean_before == pytest.approx(1.7 / 3)
    assert found.mean_after == pytest.approx(1.9 / 3)
    assert found.mean_change == pytest.approx(0.2 / 3)
    assert found.mean_absolute_change == pytest.approx(0.6 / 3)
    # Yes after and no before: a. No after and yes before: b. Yes in both: c.
    assert found.decisions == Confusion(1, 1, 1, 0)
    assert found.changed == 2


def test_drift_of_nothing_is_no_number() -> None:
    found = drift({"a": None}, {"a": None})
    assert (found.items, found.scored, found.mean_change, found.mean_absolute_change) == (1, 0, None, None)
    assert found.decisions.kappa is None
