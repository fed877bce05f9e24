import pytest
from orchard.rewards.swe import judge_tests, parse_unittest

# Written by python3 -m unittest -v, 3.11 and 3.9.
MODERN = """test_a (tests.test_m.T.test_a) ... ok
test_b (tests.test_m.T.test_b)
What it is about. ... FAIL
test_c (tests.test_m.T.test_c) ... ERROR
test_d (tests.test_m.T.test_d) ... skipped 'why'
test_e (tests.test_m.T.test_e) ... expected failure
test_f (tests.test_m.T.test_f) ... unexpected success

======================================================================
FAIL: test_b (tests.test_m.T.test_b)
"""
OLD = "test_a (tests.test_m.T) ... ok\ntest_b (tests.test_m.T) ... FAIL\n"


def test_results_of_new_and_old_versions() -> None:
    base = "tests.test_m.T.test_"
    assert parse_unittest(MODERN) == {
        base + "a": True,
        base + "b": False,
        base + "c": False,
        base + "d": False,
        base + "e": True,
        base + "f": False,
    }
    assert parse_unittest(OLD) == {base + "a": True, base + "b": False}


def test_a_failure_outweighs_an_ok() -> None:
    log = "test_a (t.T.test_a) ... ok\n\n====\nERROR: test_a (t.T.test_a)\nTraceback\n"
    assert parse_unittest(log) == {"t.T.test_a": False}
    assert parse_unittest("ERROR: test_a (t.T.test_a)\ntest_a (t.T.test_a) ... ok\n") == {"t.T.test_a": False}


def test_output_between_name_and_result() -> None:
    assert parse_unittest("test_a (t.T.test_a) ... printed by the test\nok\n") == {"t.T.test_a": True}
    assert parse_unittest("test_a (t.T.test_a) ... all ok\nFAIL\n") == {"t.T.test_a": False}
    assert parse_unittest("test_a (t.T.test_a)\nSays something ... ok\n") == {"t.T.test_a": True}


def test_resolved_needs_every_test_of_both_lists() -> None:
    passed = {"a": True, "b": True, "c": False}
    assert judge_tests(passed, ["a"], ["b"]).resolved
    assert judge_tests(passed, ["a"], ["c"]).failed == ("c",)
    assert not judge_tests(passed, ["a"], ["c"]).resolved
    verdict = judge_tests(passed, ["a", "missing"], ["b"])
    assert (verdict.resolved, verdict.failed, verdict.passed) == (False, ("missing",), 2)


def test_nothing_to_show_is_an_error_not_a_success() -> None:
    with pytest.raises(ValueError, match="both empty"):
        judge_tests({}, [], [])
