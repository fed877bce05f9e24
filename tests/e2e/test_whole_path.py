"""examples/rewards, by the SDK and by the shell: what comes out equals what was worked by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pytest import approx

from tests.e2e.test_demo import environment_in
from tests.support.platform import ROOT, processes_naming, wait_until

EXAMPLE = ROOT / "examples/rewards"
ORCHARD = str(Path(sys.executable).parent / "orchard")
BACKSTOP = 600
TOLERANCE = 1e-5


def run_on_own_platform(folder: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = environment_in(folder) | {"ORCHARD": ORCHARD} | more
    return subprocess.run(
        (ORCHARD, "with-platform", "--", *command),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=BACKSTOP,
        check=False,
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """What each of the two printed, and where it wrote."""
    judges = str(EXAMPLE / "judges.json")
    found = {}
    for name, command in {
        "sdk": (sys.executable, str(EXAMPLE / "whole_path.py")),
        "shell": (str(EXAMPLE / "whole_path.sh"),),
    }.items():
        folder = tmp_path_factory.mktemp(name)
        done = run_on_own_platform(folder, *command, str(folder / "made"), ORCHARD_JUDGES_FILE=judges)
        assert done.returncode == 0, done.stderr + done.stdout
        wait_until(lambda folder=folder: not processes_naming(str(folder)), "the platform to be gone")
        found[name] = (done.stdout, folder / "made")
    return found


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(params=["sdk", "shell"])
def made(request: pytest.FixtureRequest, ran: dict[str, tuple[str, Path]]) -> Path:
    return ran[request.param][1]


def test_process_rewards(made: Path) -> None:
    intervals, ratelimit = rows(made, "groups-shaped.jsonl")
    assert [one["reward"] for one in intervals["members"]] == approx([1.3975, -0.6025, -0.6025, -0.6025], abs=TOLERANCE)
    assert [one["reward"] for one in ratelimit["members"]] == [1.25, None, -0.75, -0.75]


def test_advantages(made: Path) -> None:
    intervals, ratelimit = rows(made, "groups.jsonl")
    expected = [1.499999, -0.5, -0.5, -0.5]
    assert [one["advantage"] for one in intervals["members"]] == approx(expected, abs=TOLERANCE)
    # What the platform lost moves no mean.
    expected = [1.154699, 0, -0.577349, -0.577349]
    assert [one["advantage"] for one in ratelimit["members"]] == approx(expected, abs=TOLERANCE)
    assert [one["mask"] for one in ratelimit["members"]] == [1, 0, 1, 1]


def test_rise_segments_have_loss_and_what_follows_is_cut(made: Path) -> None:
    losses = {row["trajectory_id"]: [bool(one) for one in row["loss_mask"]] for row in rows(made, "sft.jsonl")}

    def actions(name: str) -> list[int]:
        """Actions of an attempt that have loss: each is a message with an observation behind it, after the task."""
        return [position // 2 for position, loss in enumerate(losses[name]) if loss]

    for attempt in (1, 2, 3):
        assert actions(f"intervals-{attempt}") == [0, 1, 2, 5]
        assert len(losses[f"intervals-{attempt}"]) == 1 + 2 * 5 + 1
    for attempt in (2, 3):
        assert actions(f"ratelimit-{attempt}") == [0, 2]
    assert actions("intervals-0") == actions("ratelimit-0") == actions("ttlcache-0") == [0, 1, 2]
    assert "migration-0" not in losses, "no action raised its value"
    assert "ratelimit-1" not in losses, "it says nothing of the agent"


def test_value_targets(made: Path) -> None:
    found = rows(made, "values.jsonl")
    for name, expected in {"ttlcache-0": [0.9231943, 0.9653, 1], "semver-0": [-0.8103277, -0.8967, -1]}.items():
        targets = [row["target"] for row in found if row["trajectory_id"] == name]
        assert targets == approx(expected, abs=TOLERANCE)


def test_both_ways_give_the_same_files(ran: dict[str, tuple[str, Path]]) -> None:
    (_, sdk), (_, shell) = ran["sdk"], ran["shell"]
    names = sorted(path.name for path in sdk.iterdir())
    assert names == ["groups-shaped.jsonl", "groups.jsonl", "sft.jsonl", "values.jsonl"]
    assert {name: (sdk / name).read_bytes() for name in names} == {name: (shell / name).read_bytes() for name in names}


def test_what_they_print(ran: dict[str, tuple[str, Path]]) -> None:
    sdk, shell = ran["sdk"][0], ran["shell"][0]
    assert "intervals-0: reward +1.3975, advantage +1.499999" in sdk
    assert "intervals-1: [(0, 3), (5, 6)]" in sdk
    assert "rise segments, by state: [0, 3], [5, 6]" in shell
    assert "closed keep" in shell


def test_a_program_on_a_platform_of_its_own(tmp_path: Path) -> None:
    program = "import orchard, sys; c = orchard.SandboxClient(); print(len(list(c.list()))); c.close(); sys.exit(7)"
    done = run_on_own_platform(tmp_path, sys.executable, "-c", program)
    assert (done.returncode, done.stdout) == (7, "0\n"), done.stderr
    wait_until(lambda: not processes_naming(str(tmp_path)), "the platform to be gone")
    missing = run_on_own_platform(tmp_path, str(tmp_path / "no-such-program"))
    assert missing.returncode == 127
    assert "no-such-program: No such file or directory" in " ".join(missing.stderr.split())
