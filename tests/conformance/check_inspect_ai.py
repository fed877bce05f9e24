"""Inspect AI's own suite of sandbox providers, and an evaluation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.adapters import Harness

PROGRAMS = Path(__file__).parent / "inspect_ai"


@pytest.fixture
def inspect(harness: Callable[[str], Harness]) -> Harness:
    return harness("inspect-ai")


def test_self_check(inspect: Harness) -> None:
    # Not this project's settings, nor its fixtures.
    settings = ("-c", "/dev/null", "--rootdir", inspect.folder, "--noconftest", "-p", "no:cacheprovider")
    said = inspect.run(
        "-m", "pytest", "-q", *settings, "-o", "asyncio_mode=auto", PROGRAMS / "test_self_check.py"
    ).stdout
    found = re.search(r"^(\d+) passed(?:, \d+ warnings?)? in ", said, re.MULTILINE)
    # Nothing skipped, nothing expected to fail.
    assert found is not None, said
    assert int(found[1]) >= 44, said


def test_evaluation(inspect: Harness) -> None:
    said = inspect.run(PROGRAMS / "evaluate.py", inspect.folder / "logs").stdout
    found = json.loads(said.splitlines()[-1])
    mended, alone, lost = found["mended"], found["left alone"], found["lost"]
    assert (mended["status"], mended["scores"], mended["error"]) == ("success", {"mended": 1}, None)
    assert mended["tools"][0] == "def add(a, b):\n    return a - b\n"
    assert (alone["status"], alone["scores"], alone["tools"]) == ("success", {"mended": 0}, ["calc.py\n"])
    # Not an observation of the model, and no score.
    assert lost["scores"] == {}, lost
    assert "has ended" in lost["error"], lost
    assert found["cleaned"] == ["deleted", "ready", "ready", "deleted", "deleted"]
    assert re.fullmatch(r"orchard shell --user nobody sb-[a-z0-9]{16}", found["logins"][0])
