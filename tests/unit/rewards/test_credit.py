"""Credit assignment, with numbers worked by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orchard.rewards.credit import (
    ActionMask,
    RiseSegment,
    credits_of,
    interpolate_values,
    inverted_u_share,
    is_inverted_u,
    resolved_mask,
    rise_segments,
    unresolved_mask,
)

PROBABILITIES = st.floats(0, 1, allow_nan=False)


def test_two_rises() -> None:
    values = interpolate_values([(0, 0.1), (3, 0.4), (5, 0.4), (6, 0.6), (10, 0)], 10)
    assert values == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.6, 0.45, 0.3, 0.15, 0], abs=1e-5)
    segments = rise_segments(values)
    assert segments == [RiseSegment(0, 3), RiseSegment(5, 6)]
    assert unresolved_mask(segments) == ActionMask(6, (True, True, True, False, False, True))


def test_a_slow_rise_is_none() -> None:
    values = interpolate_values([(0, 0.1), (10, 0.4), (12, 0)], 12)
    assert credits_of(values) == pytest.approx([0.03] * 10 + [-0.2] * 2, abs=1e-5)
    assert rise_segments(values) == []
    assert unresolved_mask([]) is None


def test_segments_of_plain_values() -> None:
    assert rise_segments([0.2, 0.3, 0.3, 0.4, 0]) == [RiseSegment(0, 1), RiseSegment(2, 3)]


def test_a_credit_of_exactly_the_threshold_counts() -> None:
    assert rise_segments([0.10, 0.15]) == [RiseSegment(0, 1)]
    assert rise_segments([0.10, 0.149]) == []


def test_values_are_constant_outside_the_annotations() -> None:
    assert interpolate_values([(2, 0.3)], 4) == [0.3] * 5


def test_a_resolved_trajectory_has_loss_on_every_action() -> None:
    assert resolved_mask(3) == ActionMask(3, (True, True, True))


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ([], "no annotation"),
        ([(0, 0.1), (0, 0.2)], "twice"),
        ([(-1, 0.1)], "no state"),
        ([(5, 0.1)], "no state"),
        ([(0, float("nan"))], "from 0 to 1"),
        ([(0, 1.01)], "from 0 to 1"),
        ([(0, -0.01)], "from 0 to 1"),
        ([(0, True)], "from 0 to 1"),
    ],
)
def test_annotations_that_cannot_be(annotations: list[tuple[int, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interpolate_values(annotations, 4)


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ([0.1, 0.5, 0.2], True),
        ([0.1, 0.5, 0.45], True),
        ([0.1, 0.5, 0.46], False),
        ([0.5, 0.3, 0.1], False),
        ([0.1, 0.3, 0.5], False),
        ([0.5, 0.2, 0.5], False),
        ([0.3, 0.3, 0.3], False),
    ],
)
def test_inverted_u(values: list[float], shape: bool) -> None:
    assert is_inverted_u(values) is shape


def test_share_of_inverted_u() -> None:
    assert inverted_u_share([[0.1, 0.5, 0.2], [0.5, 0.3, 0.1]]) == 0.5
    assert inverted_u_share([]) is None


@given(st.dictionaries(st.integers(0, 20), PROBABILITIES, min_size=1))
def test_interpolation_meets_its_annotations_and_stays_between_them(points: dict[int, float]) -> None:
    values = interpolate_values(points.items(), 20)
    assert len(values) == 21
    for step, value in points.items():
        assert values[step] == pytest.approx(value, abs=1e-9)
    assert min(points.values()) - 1e-9 <= min(values)
    assert max(values) <= max(points.values()) + 1e-9


@given(st.lists(PROBABILITIES, min_size=1, max_size=30))
def test_segments_are_apart_and_hold_just_the_rising_actions(values: list[float]) -> None:
    segments = rise_segments(values)
    inside = {action for segment in segments for action in range(segment.first, segment.end)}
    assert inside == {action for action, credit in enumerate(credits_of(values)) if credit >= 0.05 - 1e-9}
    assert all(before.end < after.first for before, after in itertools.pairwise(segments))
    mask = unresolved_mask(segments)
    assert (mask is None) is (not segments)
    if mask is not None:
        assert mask.loss[-1]
        assert {action for action, loss in enumerate(mask.loss) if loss} == inside
