"""`orchard judge` against the real platform, with its scripted judge."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from orchard import Reward, SandboxClient, Step, Task, ToolCall

from tests.integration.client.cli import Cli
from tests.support.local_terminal import LocalTerminal
from tests.support.platform import PlatformProcess


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


def test_a_judge_that_failed_hides_no_number_of_before(cli: Cli, client: SandboxClient, dataset: str) -> None:
    name = f"{dataset}-2"  # there is nothing in it to judge

    def state() -> str:
        outcome = client.trajectories.get(name).outcome
        return "none" if outcome is None else f"{outcome.state} {outcome.judge}"

    assert cli("judge", "run", name, "--keep")[0] == 1
    assert state() == "excluded "  # no judge was asked
    client.trajectories.annotate(name, rewards=Reward.scored(1.0, judge="tests"))
    for command in (("run", name), ("batch", name)):
        _code, _out, err = cli("judge", *command, "--keep", "--fresh")
        assert f"{name}: the judge failed (EVIDENCE_MISSING); its outcome of before stays" in said(err)
        assert state() == "scored tests"
    # Another name is another reward.
    assert cli("judge", "run", name, "--keep", "--name", "mine")[0] == 1
    rewards = client.trajectories.get(name).rewards
    assert {(one.name, str(one.state)) for one in rewards if one.judge != "tests"} == {
        ("outcome", "excluded"),
        ("mine", "excluded"),
    }


def test_a_judge_that_cannot_say_is_an_exit_code_and_no_number(cli: Cli, dataset: str) -> None:
    code, out, _err = cli("judge", "run", f"{dataset}-2")
    assert code == 1
    assert b"EVIDENCE_MISSING" in out
    code, _out, err = cli("judge", "run", "tr-nobody")
    assert code == 1
    assert b"tr-nobody" in err
    code, _out, err = cli("judge", "run", f"{dataset}-0", "--judge", "nobody")
    assert code == 2
    assert b"nobody" in err


def test_two_attempts_are_compared(cli: Cli, dataset: str) -> None:
    """The scripted judge finds all pairs equal."""
    pair = ("judge", "compare", f"{dataset}-0", f"{dataset}-1", "--instruction", "Fix it.")
    verdict = cli.json(*pair)
    assert (verdict["kind"], verdict["value"], len(verdict["votes"][0]["answers"])) == ("pairwise", 0.5, 2)
    assert b"neither is better" in cli(*pair)[1]


def said(err: bytes) -> str:
    return " ".join(err.decode().split())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("run", "{}-0", "--kind", "pairwise"), "--kind: two attempts are compared by `orchard judge compare`"),
        (("run", "{}-0", "--kind", "rubric"), "`orchard judge rubrics list` shows which there are"),
        (("batch", "{}-0", "--rubric", "r"), "--rubric: goes with --kind rubric, not with outcome"),
        (("run", "{}-0", "--name", "mine"), "--name: names the reward that --keep adds"),
        (("compare", "{}-0", "{}-0"), "not with itself"),
        (("compare", "{}-0", "{}-1"), "attempts at two tasks, 'i-0' of '{}' and 'i-1' of '{}'; give"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(
    cli: Cli, dataset: str, arguments: tuple[str, ...], word: str
) -> None:
    code, out, err = cli("judge", *(one.replace("{}", dataset) for one in arguments))
    assert (code, out) == (2, b"")
    assert word.replace("{}", dataset) in said(err)


def test_a_batch_says_which_trajectory_is_not_there_and_that_none_matches(cli: Cli, dataset: str) -> None:
    code, out, err = cli("judge", "batch", f"{dataset}-0", "tr-nobody")
    assert (code, out) == (1, b"")
    assert "there is no trajectory 'tr-nobody'" in said(err)
    code, out, err = cli("judge", "batch", "--dataset", f"{dataset}-none", "--json")
    assert (code, out) == (0, b"")
    assert "no trajectory matches" in said(err)


def test_a_trajectory_without_a_task_keeps_no_other_from_its_verdict(
    cli: Cli, client: SandboxClient, dataset: str
) -> None:
    without = f"{dataset}-a"
    trajectory = client.trajectories.create(Task("i", dataset), trajectory_id=without)
    trajectory.append(Step.assistant("I do something."))
    trajectory.seal()
    # The first of those that are named, or the last of those that a filter finds.
    for which in ((without, f"{dataset}-0", f"{dataset}-1"), ("--dataset", dataset)):
        code, out, err = cli("judge", "batch", *which, "--json")
        assert code == 1
        judged = {line["item_id"] for line in map(json.loads, out.splitlines())}
        assert judged >= {f"{dataset}-0", f"{dataset}-1"}
        assert without not in judged
        assert f"{without} is passed over: instruction: trajectory '{without}' has no message of a user" in said(err)
    code, out, _err = cli("judge", "batch", "--dataset", dataset)
    assert code == 1
    assert "passed over" in out.decode()
    code, out, err = cli("judge", "batch", without, "--instruction", "Do something.", "--json")
    assert (code, len(out.splitlines())) == (0, 1), err


def test_a_batch_that_is_broken_off_says_how_to_go_on(cli: Cli, dataset: str) -> None:
    """Its reader leaves after the first verdict."""
    names = [f"{dataset}-{number}" for number in range(2)]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as nobody:
        process = subprocess.run(
            [sys.executable, "-m", "orchard._cli.main", "judge", "batch", *names, "--batch", dataset, "--json"],
            env=cli.environment,
            stdout=nobody,
            stderr=subprocess.PIPE,
            timeout=200,
        )
    assert process.returncode == 1
    assert f"broken off: the same command with --batch {dataset} goes on" in said(process.stderr)
    assert len(cli("judge", "batch", *names, "--batch", dataset, "--json")[1].splitlines()) == 2
    code, _out, err = cli("judge", "batch", *names, "--batch", dataset, "--votes", "2")
    assert code == 1
    assert "goes on with the options that it began with" in said(err)
    assert "broken off" not in said(err)


def test_a_batch_on_a_terminal_shows_how_far_it_is_and_what_it_cost(platform: PlatformProcess, dataset: str) -> None:
    names = [f"{dataset}-{number}" for number in range(2)]
    orchard = str(Path(sys.executable).with_name("orchard"))
    environment = platform.client_environment()
    with LocalTerminal(orchard, "judge", "batch", *names, environment=environment, columns=120) as window:
        begun = window.until(b"0/2", window.until(b"judging"))
        window.until(b"$0.0000", window.until(b"2/2", begun))
        assert window.exit() == 0


def test_a_batch_asks_one_question(cli: Cli, dataset: str) -> None:
    """Of new items too, which the platform takes as they are."""
    first, new = f"{dataset}-0", f"{dataset}-1"
    outcomes, process = f"{dataset}-o", f"{dataset}-p"
    rubric = ("--kind", "rubric", "--rubric", "orchard-software-engineering")
    assert cli("judge", "batch", first, "--batch", outcomes)[0] == 0
    assert cli("judge", "batch", first, "--batch", process, *rubric)[0] == 0
    for batch, asked, word in (
        (outcomes, rubric, f"--kind: batch '{outcomes}' judges outcome, not rubric: give that, or another --batch"),
        (process, (), f"--kind: batch '{process}' judges rubric, not outcome"),
        (process, ("--kind", "rubric", "--rubric", "another"), "judges by orchard-software-engineering@"),
        (process, (*rubric[:3], f"{rubric[3]}@99"), "not by orchard-software-engineering@99"),
    ):
        code, out, err = cli("judge", "batch", new, "--batch", batch, *asked)
        assert (code, out) == (2, b""), err
        assert word in said(err)
    assert cli("judge", "batch", new, "--batch", outcomes)[0] == 0
    assert cli("judge", "batch", new, "--batch", process, *rubric)[0] == 0


def test_rubrics_are_put_shown_and_listed(cli: Cli, dataset: str, tmp_path: Path) -> None:
    name, file = f"r-{secrets.token_hex(4)}", tmp_path / "rubric.json"
    criteria = [{"name": "care", "description": "How careful?", "weight": 1}]
    file.write_text(json.dumps({"name": name, "description": "Mine.", "step": 0.5, "criteria": criteria}))
    stored = cli.json("judge", "rubrics", "put", str(file))
    assert (stored["name"], stored["version"], stored["step"]) == (name, 1, 0.5)
    verdict = cli.json("judge", "run", f"{dataset}-0", "--kind", "rubric", "--rubric", name)
    assert set(verdict["scores"]) == {"care"}
    # What is shown is a file again; one that is used becomes the next version.
    shown = cli.json("judge", "rubrics", "show", f"{name}@1")
    shown["criteria"][0]["description"] = "How very careful?"
    file.write_text(json.dumps(shown))
    assert cli.json("judge", "rubrics", "put", str(file))["version"] == 2
    found = {one["name"]: one["version"] for one in cli.json("judge", "rubrics", "list")}
    assert (found[name], "orchard-software-engineering" in found) == (2, True)
    assert all(word in cli("judge", "rubrics", "show", name)[1].decode() for word in (f"{name}@2", "How very careful?"))
    code, _out, err = cli("judge", "rubrics", "show", "nobody")
    assert code == 1
    assert "`orchard judge rubrics list` shows" in said(err)
    assert cli("judge", "rubrics", "show", f"{name}@x")[0] == 2


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[", "no JSON"),
        ("[]", 'must be {"name"'),
        ('{"name": "x"}', 'must be {"name"'),
        ('{"criteria": []}', "name is missing"),
        ('{"name": "x", "criteria": [{"name": "a"}]}', "criteria[0].description is missing"),
        (
            '{"name": "x", "criteria": [{"name": "a", "description": "b", "weight": "1"}]}',
            "criteria[0].weight must be a number, not '1'",
        ),
        (
            '{"name": "x", "criteria": [{"name": "a", "description": "b", "weight": 1, "wieght": 1}]}',
            "criteria[0].wieght is no field; there are name, description, weight, uses_gold",
        ),
        ('{"name": "x", "steps": 1, "criteria": []}', "steps is no field; there are name, description, step"),
        ('{"name": "x", "criteria": [{"name": "a", "description": "b", "weight": 0.5}]}', "weights must add up to 1"),
    ],
)
def test_a_file_that_is_no_rubric_is_told_by_field(cli: Cli, tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "rubric.json").write_text(text)
    code, out, err = cli("judge", "rubrics", "put", str(tmp_path / "rubric.json"))
    assert (code, out) == (2, b"")
    assert word in said(err)


@pytest.mark.parametrize(
    ("labels", "word"),
    [
        (b"", "has no label"),
        (b"id,label\n", "has no label"),
        (b"\xff\xfei\x00d\x00", "is no text in UTF-8: byte 0"),
        (b"one,yes\ntwo,no\none,no\n", "line 3 of {} labels 'one' again"),
    ],
)
def test_labels_that_cannot_be_meant_are_told(cli: Cli, tmp_path: Path, labels: bytes, word: str) -> None:
    file = tmp_path / "labels.csv"
    file.write_bytes(labels)
    code, out, err = cli("judge", "calibrate", str(file))
    assert (code, out) == (2, b"")
    assert word.replace("{}", str(file)) in said(err)


def test_labels_of_a_spreadsheet_are_read_and_a_plot_needs_a_folder(cli: Cli, dataset: str, tmp_path: Path) -> None:
    assert cli("judge", "batch", f"{dataset}-0", "--batch", dataset)[0] == 0
    file = tmp_path / "labels.csv"
    file.write_bytes(b"\xef\xbb\xbf" + f"id,label\r\n{dataset}-0,yes\r\n".encode())
    found = cli.json("judge", "calibrate", str(file), "--batch", dataset)
    assert found["true_positive"] + found["false_negative"] == 1
    code, out, err = cli("judge", "calibrate", str(file), "--batch", dataset, "--plot", str(tmp_path / "no" / "p.svg"))
    assert (code, out) == (2, b"")
    assert "--plot: there is no folder" in said(err)
    code, _out, err = cli("judge", "calibrate", str(file))
    assert code == 1
    assert "name the --batch that judged them" in said(err)


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
