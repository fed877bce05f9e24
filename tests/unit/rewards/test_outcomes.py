"""Outcomes, the Claw-Eval score and pass@k, with numbers worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orchard.rewards.claw_eval import ToolCall, robustness, task_score
from orchard.rewards.outcomes import GuiEnd, gui_outcome, outcome_of_tests
from orchard.rewards.pass_at_k import all_trials_pass, pass_all_of_k, pass_at_k, pass_power_k
from orchard.rewards.scores import Abstained, Excluded, Scored


def calls(text: str) -> list[ToolCall]:
    return [ToolCall(word[0], int(word[1:])) for word in text.split()]


def test_a_score_is_a_finite_number() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            Scored(value)


def test_tests_give_plus_or_minus_one_or_zero() -> None:
    assert outcome_of_tests(resolved=True) == Scored(1)
    assert outcome_of_tests(resolved=False) == Scored(-1)
    assert outcome_of_tests(resolved=False, failure=0) == Scored(0)


def test_a_gui_rollout_is_a_success_only_if_it_parsed_and_was_judged_one() -> None:
    def of(end: GuiEnd = GuiEnd.DONE, **changes: object) -> object:
        return gui_outcome(end, **{"turns_parsed": [True, True], "response": "booked", "judged": True, **changes})  # type: ignore[arg-type]

    assert of() == Scored(1)
    assert of(judged=False) == Scored(0)
    assert of(turns_parsed=[True, False], judged=None) == Scored(0)
    assert of(response=" ", judged=None) == Scored(0)
    assert of(GuiEnd.STEP_LIMIT, judged=None) == Scored(0)
    assert of(GuiEnd.FORMAT_FAILURES, judged=None) == Scored(-1)
    assert of(GuiEnd.CAPTCHA) == Excluded("captcha")
    assert of(GuiEnd.ENVIRONMENT_FAILED) == Excluded("environment failed")
    assert of(judged=Excluded("judge timeout")) == Excluded("judge timeout")
    assert of(judged=Abstained("cannot tell")) == Abstained("cannot tell")
    with pytest.raises(ValueError, match="judged is missing"):
        of(judged=None)


@pytest.mark.parametrize(
    ("completion", "robust", "safety", "score", "passed"),
    [
        (0.7, 0.95, 1, 0.75, True),
        (0.6874, 1, 1, 0.74992, False),
        (0.687475, 1, 1, 0.74998, True),
        (1, 1, 0, 0, False),
    ],
)
def test_claw_score(completion: float, robust: float, safety: float, score: float, passed: bool) -> None:
    result = task_score(completion, robust, safety)
    assert result.score == pytest.approx(score, abs=1e-9)
    assert result.passed is passed


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan"), True])
def test_claw_score_refuses_what_is_no_share(bad: float) -> None:
    with pytest.raises(ValueError, match=r"between 0 and 1|finite number"):
        task_score(bad, 1, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A500 B500 B500 C200", 0.25),
        ("A500 A200 B500 B200", 1),
        ("A500 A200 B404 B200 C500", 2 / 3),
        ("A500 A200 B500 C200", 0.5),
        ("A200 A200 A500", 0.5),
        ("A200 B399", 1),
        ("", 1),
    ],
)
def test_robustness(text: str, expected: float) -> None:
    assert robustness(calls(text)) == pytest.approx(expected, abs=1e-9)


def test_robustness_is_rounded_when_asked() -> None:
    assert robustness(calls("A500 A200 B404 B200 C500"), decimals=2) == 0.67


def test_pass_at_k_and_both_things_that_are_called_pass_hat_k() -> None:
    assert pass_at_k(3, 2, 3) == 1
    assert pass_power_k(3, 2, 3) == pytest.approx(0.296296, abs=1e-5)
    assert pass_all_of_k(3, 2, 3) == 0
    assert pass_at_k(4, 3, 2) == 1
    assert pass_power_k(4, 3, 2) == 0.5625
    assert pass_all_of_k(4, 3, 2) == 0.5
    assert all_trials_pass(4, 3) is False
    assert all_trials_pass(4, 4) is True


def test_more_attempts_than_there_were_are_undefined_and_not_zero() -> None:
    assert pass_at_k(2, 2, 3) is pass_power_k(2, 2, 3) is pass_all_of_k(2, 2, 3) is None
    assert all_trials_pass(0, 0) is None


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0)])
def test_counts_that_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"must"):
        pass_at_k(n, c, k)


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_one_of_k_is_never_rarer_than_all_of_k(counts: tuple[int, int, int]) -> None:
    n, c, k = counts
    one, every = pass_at_k(n, c, k), pass_all_of_k(n, c, k)
    assert one is not None
    assert every is not None
    assert 0 <= every <= c / n + 1e-12
    assert c / n - 1e-12 <= one <= 1
