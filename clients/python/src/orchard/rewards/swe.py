"""Verdicts on software-engineering tasks from the tests that a patch must fix and must not break.

Source of the rule: SWE-bench (Jimenez et al., 2024), `FAIL_TO_PASS` and `PASS_TO_PASS`: an instance is resolved when
every test of both lists passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

# "test_x (tests.m.Class.test_x)"; up to Python 3.10 the parentheses hold the class alone. A docstring's line may stand
# between the name and the result, and so may what a test writes to standard error: then the result stands alone.
_STARTED: Final = re.compile(r"(?P<name>\w+) \((?P<where>[\w.]+)\)")
_ENDED: Final = re.compile(r"(?:\.\.\. |^)(?P<result>ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)$")
_FAILURE: Final = re.compile(r"(?:FAIL|ERROR): (?P<name>\w+) \((?P<where>[\w.]+)\)")
_PASSING: Final = frozenset({"ok", "expected failure"})


@dataclass(frozen=True, slots=True)
class TestVerdict:
    """The outcome of an evaluation.

    Attributes:
        resolved: every test of both lists passed.
        failed: the tests that did not, in the order of the lists. One without a result has failed.
        passed: how many did.
    """

    resolved: bool
    failed: tuple[str, ...]
    passed: int


def parse_unittest(log: str) -> dict[str, bool]:
    """Whether each test passed, by dotted id, from what `python -m unittest -v` writes to standard error.

    A failure reported anywhere outweighs an "ok", for instance one of a subtest or of a clean-up.
    """
    passed: dict[str, bool] = {}
    current: str | None = None
    for line in log.split("\n"):
        if failure := _FAILURE.match(line):
            passed[_dotted(failure)] = False
            continue
        if started := _STARTED.match(line):
            current = _dotted(started)
        if current is not None and (ended := _ENDED.search(line)):
            passed[current] = passed.get(current, True) and ended["result"] in _PASSING
            current = None
    return passed


def _dotted(match: re.Match[str]) -> str:
    name, where = match["name"], match["where"]
    return where if where.endswith(f".{name}") else f"{where}.{name}"


def judge_tests(passed: Mapping[str, bool], fail_to_pass: Iterable[str], pass_to_pass: Iterable[str]) -> TestVerdict:
    """Resolved if every test of both lists has passed.

    Raises:
        ValueError: both lists are empty, so that anything would be resolved.
    """
    wanted = [*fail_to_pass, *pass_to_pass]
    if not wanted:
        raise ValueError("FAIL_TO_PASS and PASS_TO_PASS are both empty: nothing could show that the issue is resolved")
    failed = tuple(test for test in wanted if not passed.get(test, False))
    return TestVerdict(not failed, failed, len(wanted) - len(failed))
