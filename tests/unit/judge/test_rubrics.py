"""Rubrics; worked numbers of the paper's seven dimensions."""

from dataclasses import replace

import pytest

from services.judge.rubrics import SOFTWARE_ENGINEERING, Criterion, Rubric, on_grid, problems

NAMES = tuple(SOFTWARE_ENGINEERING.weights)
WORKED = dict(zip(NAMES, (0.8, 1, 0.5, 0.7, 0.6, 1, 0.9), strict=True))
GOOD = Rubric("mine", "What it is.", (Criterion("a", "A?", 0.3), Criterion("b", "B?", 0.7)))


def test_the_papers_worked_number() -> None:
    assert SOFTWARE_ENGINEERING.combine(WORKED) == pytest.approx(0.795, abs=1e-12)
    assert SOFTWARE_ENGINEERING.weighted(WORKED) == pytest.approx(0.795, abs=1e-12)


def test_gold_informs_three_dimensions_alone() -> None:
    using = {criterion.name for criterion in SOFTWARE_ENGINEERING.criteria if criterion.uses_gold}
    assert using == {"self_test_relevance", "coverage", "discriminativeness"}


@pytest.mark.parametrize("name", NAMES)
def test_a_dimension_left_out_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SOFTWARE_ENGINEERING.combine({key: value for key, value in WORKED.items() if key != name})


@pytest.mark.parametrize(
    ("score", "step", "fits"),
    [
        (0.3, 0.1, True),
        (0.35, 0.1, False),
        (0.7, 0.1, True),
        (0.5, 0.2, False),
        (0.6, 0.2, True),
        (1, 1.0, True),
        (0.5, 1.0, False),
        (1.1, 0.1, False),
        (-0.1, 0.1, False),
    ],
)
def test_scores_lie_on_the_rubrics_grid(score: float, step: float, fits: bool) -> None:
    assert on_grid(score, step) is fits


def test_a_good_rubric_has_no_problem() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": "Mine"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "orchard-mine"}, "name"),
        ({"step": 0.3}, "step"),
        ({"step": float("nan")}, "step"),
        ({"criteria": ()}, "criteria"),
        ({"criteria": (Criterion("a", "A?", 0.5),)}, "criteria"),
        ({"criteria": (Criterion("a", "A?", 0.5), Criterion("a", "B?", 0.5))}, "criteria[1].name"),
        ({"criteria": (Criterion("a", "A?", 1.5), Criterion("b", "B?", -0.5))}, "criteria"),
        ({"criteria": (Criterion("a", "A?", float("nan")),)}, "criteria"),
        ({"criteria": (Criterion("a b", "A?", 1.0),)}, "criteria[0].name"),
        ({"criteria": (Criterion("a", "", 1.0),)}, "criteria[0].description"),
        ({"criteria": (Criterion("a", "x" * 4097, 1.0),)}, "criteria[0].description"),
        ({"criteria": (Criterion("a", "A\0?", 1.0),)}, "criteria[0].description"),
        ({"description": "x" * 4097}, "description"),
        ({"description": "What\0"}, "description"),
    ],
)
def test_a_bad_rubric_names_its_field(change: dict[str, object], field: str) -> None:
    assert [found for found, _description in problems(replace(GOOD, **change))] == [field]


def test_the_hash_is_of_the_content_and_not_of_the_version() -> None:
    assert replace(GOOD, version=7).hash == GOOD.hash
    others = [replace(GOOD, description="x"), replace(GOOD, step=0.5), replace(GOOD, criteria=GOOD.criteria[::-1])]
    assert len({rubric.hash for rubric in [GOOD, *others]}) == 4
