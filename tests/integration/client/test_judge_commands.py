"""`orchard judge` against the real platform, with its scripted judge."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest
from orchard import SandboxClient, Step, Task, ToolCall

from tests.integration.client.test_command_line import Cli
from tests.support.platform import PlatformProcess


@pytest.fixture(scope="module")
def cli(platform: PlatformProcess) -> Cli:
    return Cli(platform)


@pytest.fixture
def dataset(client: SandboxClient) -> str:
    """Three trajectories of a dataset; the last one shows nothing that an agent did."""
    dataset = f"d-{secrets.token_hex(6)}"
    for number in range(3):
        trajectory = client.trajectories.create(Task(f"i-{number}", dataset), trajectory_id=f"{dataset}-{number}")
        trajectory.append(Step.user(f"Fix {dataset}."))
        if number < 2:
            call = ToolCall("c", "bash", json.dumps({"command": f"true {number}"}))
            trajectory.append(Step.assistant("I fix it.", tool_calls=[call]), Step.tool("c", "ok", name="bash"))
        trajectory.seal()
    return dataset


def test_a_trajectory_is_judged_shown_and_kept(cli: Cli, client: SandboxClient, dataset: str) -> None:
    name = f"{dataset}-0"
    verdict = cli.json("judge", "run", name, "--votes", "3", "--keep")
    assert (verdict["state"], len(verdict["votes"]), verdict["usage"]["calls"]) == ("scored", 3, 3)
    outcome = client.trajectories.get(name).outcome
    assert outcome is not None
    assert (outcome.value, outcome.judge) == (verdict["value"], "scripted")
    code, out, err = cli("judge", "run", name, "--votes", "3")
    assert (code, err) == (0, b"")
    shown = out.decode()
    assert all(text in shown for text in (f"{verdict['value']:g} (found", "scripted", verdict["verdict_id"], "$0.0000"))
    rubric = ("--kind", "rubric", "--rubric", "orchard-software-engineering")
    assert len(cli.json("judge", "run", name, *rubric)["scores"]) == 7
    fresh = cli.json("judge", "run", name, "--fresh")
    assert fresh["verdict_id"] != cli.json("judge", "run", name, "--fresh")["verdict_id"]


def test_a_judge_that_cannot_say_is_an_exit_code_and_no_number(cli: Cli, dataset: str) -> None:
    code, out, _err = cli("judge", "run", f"{dataset}-2")
    assert code == 1
    assert b"EVIDENCE_MISSING" in out
    code, _out, err = cli("judge", "run", "tr-nobody")
    assert code == 1
    assert b"tr-nobody" in err
    code, _out, err = cli("judge", "run", f"{dataset}-0", "--judge", "nobody")
    assert code == 1
    assert b"nobody" in err


def test_two_attempts_are_compared(cli: Cli, dataset: str) -> None:
    """The scripted judge finds all pairs equal."""
    verdict = cli.json("judge", "compare", f"{dataset}-0", f"{dataset}-1")
    assert (verdict["kind"], verdict["value"], len(verdict["votes"][0]["answers"])) == ("pairwise", 0.5, 2)
    assert b"neither is better" in cli("judge", "compare", f"{dataset}-0", f"{dataset}-1")[1]


def test_a_batch_goes_by_filter_goes_on_and_is_calibrated(
    cli: Cli, client: SandboxClient, dataset: str, tmp_path: Path
) -> None:
    names = [f"{dataset}-{number}" for number in range(3)]
    code, out, err = cli("judge", "batch", "--dataset", dataset, "--batch", dataset, "--keep", "--json")
    assert code == 0, err
    assert err.decode().strip() == f"batch {dataset}"
    found = {line["item_id"]: line["verdict"] for line in map(json.loads, out.splitlines())}
    assert {name: verdict["state"] for name, verdict in found.items()} == dict(
        zip(names, ("scored", "scored", "excluded"), strict=True)
    )
    kept = [client.trajectories.get(name).outcome for name in names]
    assert [outcome.value if outcome else "none" for outcome in kept] == [found[name]["value"] for name in names]
    code, out, err = cli("judge", "batch", *names, "--batch", dataset, "--keep")
    assert code == 0, err
    assert all(text in out.decode() for text in ("scored", "2", "excluded", "2 calls"))
    code, _out, err = cli("judge", "batch")
    assert code == 2
    assert b"--all" in err
    # Labels by trajectory, as the judge said; then one against it.
    labels = tmp_path / "labels.csv"
    said = ["yes" if found[name]["value"] else "no" for name in names[:2]]
    labels.write_text("id,label\n" + "".join(f"{name},{label}\n" for name, label in zip(names, said, strict=False)))
    agreed = cli.json("judge", "calibrate", str(labels), "--batch", dataset)
    assert (agreed["accuracy"], agreed["unscored"]) == (1.0, 0)
    other = "no" if found[names[0]]["value"] else "yes"
    lines = [{"id": found[names[0]]["verdict_id"], "label": other}, {"id": found[names[2]]["verdict_id"], "label": 1}]
    labels.write_text("\n".join(map(json.dumps, lines)))
    assert cli.json("judge", "calibrate", str(labels))["accuracy"] == 0.0
    code, out, _err = cli("judge", "calibrate", str(labels))
    (row,) = [line.split() for line in out.decode().splitlines() if line.split()[:1] == ["verdict"]]
    assert ("0.0%" in row, row[-1]) == (True, "1")
    labels.write_text("one,perhaps\n")
    code, _out, err = cli("judge", "calibrate", str(labels))
    assert code == 2
    assert b"line 1" in err


def test_criteria_are_calibrated_and_drift_between_batches_is_told(cli: Cli, dataset: str, tmp_path: Path) -> None:
    names = [f"{dataset}-{number}" for number in range(2)]
    rubric = ("--kind", "rubric", "--rubric", "orchard-software-engineering", "--json")
    code, out, err = cli("judge", "batch", *names, "--batch", f"{dataset}-r", *rubric)
    assert code == 0, err
    scores = {line["item_id"]: line["verdict"]["scores"] for line in map(json.loads, out.splitlines())}
    labels = tmp_path / "labels.csv"
    rows = [f"{name},,{int(scores[name]['rigor'] >= 0.5)},{int(scores[name]['coverage'] < 0.5)}" for name in names]
    labels.write_text("\n".join(["id,label,rigor,coverage", *rows, ""]))
    plot = tmp_path / "plot.svg"
    found = cli.json("judge", "calibrate", str(labels), "--batch", f"{dataset}-r", "--plot", str(plot))
    assert [found["criteria"][name]["accuracy"] for name in ("rigor", "coverage")] == [1.0, 0.0]
    assert plot.read_text().startswith("<svg")
    # The same items under another judgement: votes make another question, and the prompt is the same.
    code, _out, err = cli("judge", "batch", *names, "--batch", f"{dataset}-s", "--fresh", *rubric)
    assert code == 0, err
    drift = cli.json("judge", "drift", f"{dataset}-r", f"{dataset}-s", "--plot", str(plot))
    assert drift["value"]["items"] == 2
    assert drift["prompts"][0] == drift["prompts"][1]
    assert set(drift["criteria"]) == set(scores[names[0]])
    shown = cli("judge", "drift", f"{dataset}-r", f"{dataset}-s")[1].decode()
    assert "OTHER ANSWER" in shown
    assert "rigor" in shown
    code, _out, err = cli("judge", "drift", f"{dataset}-r", "nobody")
    assert code == 1
    assert b"nobody" in err
