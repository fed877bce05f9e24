"""Harbor's own program runs a task in sandboxes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.adapters import Harness

PROGRAMS = Path(__file__).parent / "harbor"
PROGRAM = "from harbor.cli.main import app; app()"
ENVIRONMENT = "orchard.harness.harbor:OrchardEnvironment"


@pytest.fixture
def harbor(harness: Callable[[str], Harness]) -> Harness:
    return harness("harbor")


def run(harbor: Harness, task: Path, agent: str, *options: str) -> dict[str, Any]:
    """Run one trial; returns its result."""
    jobs = harbor.folder / f"jobs-{agent}-{len(options)}"
    command = ("-c", PROGRAM, "run", "-p", task, "-a", agent, "-e", ENVIRONMENT, "-y", "-o", jobs)
    harbor.run(*command, "--ek", "image=", *options)
    (result,) = jobs.glob("*/*/result.json")
    return dict(json.loads(result.read_text()))


def reward(result: dict[str, Any]) -> float:
    assert result["exception_info"] is None, result["exception_info"]
    return float(result["verifier_result"]["rewards"]["reward"])


def test_oracle_solves_and_nop_does_not(harbor: Harness) -> None:
    assert reward(run(harbor, PROGRAMS / "task", "oracle")) == 1.0
    assert reward(run(harbor, PROGRAMS / "task", "nop")) == 0.0


def test_lost_sandbox_is_no_reward(harbor: Harness) -> None:
    """Its time is up while the solution runs: by the class's name Harbor neither grades nor counts a reward."""
    task = harbor.folder / "task"
    shutil.copytree(PROGRAMS / "task", task)
    with (task / "solution" / "solve.sh").open("a") as script:
        script.write("sleep 3600\n")
    result = run(harbor, task, "oracle", "--ek", 'sandbox={"ttl": 30}')
    assert result["exception_info"]["exception_type"] == "RuntimeRequestError", result["exception_info"]
    assert result["verifier_result"] is None
    assert not result["reward_valid"]


def test_environment(harbor: Harness) -> None:
    assert harbor.run(PROGRAMS / "environment.py", PROGRAMS / "task", harbor.folder).stdout.endswith("done\n")
