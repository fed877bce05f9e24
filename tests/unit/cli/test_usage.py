"""Exit codes: 2 where what was typed is wrong, told before anything is done, and 1 for what fails. No platform runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from orchard._cli.main import app
from typer.testing import CliRunner

from tests.unit.cli.every_command import commands, options_of

runner = CliRunner()
# Nobody listens there: what asks the platform before it looks at what was typed ends with 1.
NOWHERE = {
    "ORCHARD_ENDPOINT": "127.0.0.1:1",
    "ORCHARD_API_KEY": "k",
    "ORCHARD_CONFIG_DIR": "/nowhere",
    "COLUMNS": "200",
}

WRONG: dict[str, list[tuple[str, str]]] = {
    "create": [
        ("--env novalue", "--env"),
        ("--secret-env novalue", "--secret-env"),
        ("--label novalue", "--label"),
        ("--ttl soon", "--ttl"),
        ("--idle-timeout soon", "--idle-timeout"),
        ("--timeout soon", "--timeout"),
        ("--cpu many", "--cpu"),
        ("--memory lots", "memory"),
        ("--disk lots", "disk"),
        ("--shm lots", "shm"),
        ("--network moon", "network"),
        ("one --image two", "--image"),
    ],
    "list": [
        ("--label novalue", "--label"),
        ("--watch --json", "--watch"),
        ("--watch", "--watch"),
        ("--state odd", "state"),
    ],
    "get": [],
    "exec": [
        ("--timeout soon sb true", "--timeout"),
        ("--env novalue sb true", "--env"),
        ("--tty --json sb true", "--tty"),
        ("sb --json true", "COMMAND"),
        ("sb", "command"),
    ],
    "shell": [("sb", "terminal")],
    "ps": [("sb --limit 0", "--limit"), ("", "sandbox")],
    "logs": [("sb", "EXEC_ID")],
    "kill": [
        ("sb", "EXEC_ID"),
        ("sb e --signal odd", "--signal: 'odd' is no signal"),
        ("sb e -s 0", "--signal"),
        ("sb e -s 65", "--signal"),
    ],
    "cp": [("a b", "SOURCE TARGET"), ("none sb:/x", "SOURCE")],
    "forward": [("sb odd", "PORT"), ("sb 99999", "PORT"), ("sb 80 --wait soon", "--wait")],
    "expose": [("sb :80", "NAME")],
    "rm": [("", "SANDBOX"), ("--label novalue", "--label")],
    "wait": [("sb --timeout soon", "--timeout")],
    "usage": [("--since soon", "--since")],
    "audit": [("--since soon", "--since"), ("--limit 0", "--limit")],
    "keys create": [("--ttl soon", "--ttl")],
    "keys list": [],
    "keys revoke": [],
    "tenants set": [
        ("t", "OPTIONS"),
        ("t --sandboxes many", "--sandboxes"),
        ("t --cpu many", "--cpu"),
        ("t --create-rate many", "--create-rate"),
        ("t --lifetime soon", "--lifetime"),
    ],
    "tenants list": [],
    "trajectories list": [
        ("--since soon", "--since"),
        ("--label novalue", "--label"),
        ("--status odd", "statuses"),
        ("--outcome odd", "outcome_state"),
        ("--order odd", "order"),
        ("--limit 0", "--limit"),
    ],
    "trajectories show": [("t --start -1", "--start")],
    "trajectories stats": [("--group-by odd", "group_by"), ("-k 0", "-k"), ("--since soon", "--since")],
    "trajectories annotate": [
        ("t", "--reward"),
        ("t --reward much", "--reward"),
        ("t --reward 1 --excluded why", "--reward"),
        ("t --label novalue", "--label"),
    ],
    "trajectories delete": [("", "TRAJECTORY"), ("--since soon", "--since")],
    "trajectories formats": [],
    "trajectories convert": [
        ("none --to sft -o x.jsonl", "PATH"),
        ("in.jsonl --to odd -o x.jsonl", "format 'odd'"),
        ("in.jsonl --from odd --to sft -o x.jsonl", "format 'odd'"),
        ("in.jsonl --from sft --to sft -o x.jsonl", "format 'sft'"),
        ("in.jsonl --to swebench -o x.parquet", "x.parquet"),
        ("in.jsonl --to sft -o no/x.jsonl", "--output: there is no folder 'no'"),
        ("in.jsonl --to sft -o in.jsonl", "in.jsonl: is there already"),
        ("in.jsonl --to sft -o x.jsonl --loss odd", "loss"),
        ("in.jsonl --to sft -o x.jsonl --truncate odd", "truncate"),
        ("in.jsonl --to sft -o x.jsonl --recipe odd", "recipe"),
        ("in.jsonl --to sft -o x.jsonl --tokenizer none.json", "none.json"),
        ("in.jsonl --to sft -o x.jsonl --max-tokens 0", "--max-tokens"),
    ],
    "trajectories export": [
        ("--to odd -o x.jsonl", "format 'odd'"),
        ("--to swebench -o x.parquet", "x.parquet"),
        ("--to sft -o no/x.jsonl", "--output: there is no folder 'no'"),
        ("--to sft -o in.jsonl", "in.jsonl: is there already"),
        ("--to sft -o x.jsonl --loss odd", "loss"),
        ("--to sft -o x.jsonl --since soon", "--since"),
        ("--to sft -o x.jsonl --status odd", "statuses"),
    ],
    "trajectories import": [
        ("none", "PATH"),
        ("in.jsonl --from odd", "format 'odd'"),
        ("in.jsonl --from odd --dry-run", "format 'odd'"),
        ("in.jsonl --label novalue", "--label"),
    ],
    "trajectories curate": [
        ("none.yaml -o x.jsonl", "none.yaml"),
        ("bad.yaml -o x.jsonl", "bad.yaml:3: steps[0].outcome"),
        ("plan.yaml -o no/x.jsonl", "--output: there is no folder 'no'"),
        ("plan.yaml -o in.jsonl", "in.jsonl: is there already"),
        ("plan.yaml in.jsonl -o x.jsonl --repo r", "PATH"),
        ("plan.yaml none -o x.jsonl", "PATH"),
        ("plan.yaml -o x.jsonl --like none", "--like"),
    ],
    "trajectories process-reward": [("", "TRAJECTORY"), ("t --alpha -1", "--alpha")],
    "trajectories credit": [],
    "groups list": [("--limit 0", "--limit")],
    "groups show": [],
    "groups create": [
        ("g --stride 0", "--stride': Input should be greater than or equal to 1; it is from 1 to 10,000"),
        ("g --size 0", "--size"),
        ("g --maximum 10001", "--maximum"),
        ("g --low 2", "--low"),
    ],
    "groups claim": [("--count 0", "--count"), ("--lease soon", "--lease")],
    "groups report": [
        ("g 0", "--reward"),
        ("g 0 --reward 1 --unscored why", "--reward"),
        ("g 0 --unscored why --outcome negative", "--outcome"),
        ("g 0 --reward-of outcome", "--trajectory"),
        ("g 0 --reward 1 --outcome odd", "outcome"),
        ("g -1 --reward 1", "SAMPLE"),
    ],
    "judge run": [
        ("t --kind odd", "--kind: 'odd' is none of outcome"),
        ("t --kind pairwise", "--kind"),
        ("t --kind rubric", "--rubric"),
        ("t --rubric r", "--rubric"),
        ("t --name n", "--name"),
        ("t --votes 17", "--votes"),
        ("t --max-usd -1", "--max-usd"),
    ],
    "judge compare": [("t t", "SECOND"), ("t u --votes 0", "--votes")],
    "judge batch": [
        ("", "TRAJECTORY"),
        ("t --kind odd", "--kind"),
        ("t --rubric r", "--rubric"),
        ("t --max-tokens -1", "--max-tokens"),
        ("--since soon", "--since"),
    ],
    "judge calibrate": [
        ("none.csv", "labels"),
        ("in.jsonl", "LABELS"),
        ("labels.csv --plot no/x.svg", "--plot"),
        ("labels.csv --threshold 2", "--threshold"),
    ],
    "judge drift": [("a b --plot no/x.svg", "--plot"), ("a b --threshold 2", "--threshold")],
    "judge rubrics list": [],
    "judge rubrics show": [("r@x", "RUBRIC")],
    "judge rubrics put": [("none.json", "FILE"), ("in.jsonl", "FILE")],
    "version": [],
}
"""Of every command: what may be typed that cannot be meant, and what the error names."""


def run(words: str, *more: str) -> Any:
    return runner.invoke(app, [*words.split(), *more], env=NOWHERE)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files of the commands are."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    Path("plan.yaml").write_text("version: 1\nsteps: []\nexport: {format: sft}\n")
    Path("bad.yaml").write_text("version: 1\nsteps:\n  - outcome: good\n")
    Path("labels.csv").write_text("v,yes\n")
    return tmp_path


def test_every_command_is_looked_at() -> None:
    assert set(WRONG) == {" ".join(words) for words in commands()}


@pytest.mark.parametrize(
    ("words", "named"),
    [(f"{command} {typed}", named) for command, all_typed in WRONG.items() for typed, named in all_typed],
)
def test_what_is_typed_wrong_exits_with_2_names_it_and_does_nothing(words: str, named: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = run(words)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert named in " ".join(done.stderr.split())
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("command", WRONG)
def test_an_option_that_is_not_known_exits_with_2(command: str) -> None:
    done = run(command, "--no-such-option")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--no-such-option" in done.stderr


def _bounded() -> list[tuple[str, str, str]]:
    """(command, option, a value beyond its bounds) of every number that has any."""
    found = []
    for words, command in commands().items():
        for name, option in options_of(command).items():
            least, most = getattr(option, "min", None), getattr(option, "max", None)
            beyond = [bound for bound in (least is not None and least - 1, most is not None and most + 1) if bound]
            found += [(" ".join(words), name, str(value)) for value in beyond]
    return found


@pytest.mark.parametrize(("command", "option", "value"), _bounded())
def test_a_number_out_of_its_bounds_is_told_with_them(command: str, option: str, value: str) -> None:
    needed = ["1" for one in commands()[tuple(command.split())].params if one.required]
    done = run(command, option, value, *needed)
    assert (done.exit_code, done.stdout) == (2, "")
    assert option in done.stderr
    assert "; it is " in done.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("exec --cwd /x sb ls", ["--workdir"]),
        ("exec --timout 3 sb ls", ["--timeout", "--tty"]),
        ("exec --interactive sb ls", ["--stdin"]),
        ("create --cpus 2", ["--cpu", "--user"]),
        ("create --time-limit 2h", ["--timeout"]),
        ("judge run t --max-cost 2", ["--max-tokens", "--max-usd"]),
        ("list --cwd x", []),
    ],
)
def test_an_option_that_is_not_known_is_told_with_those_that_may_be_meant(typed: str, meant: list[str]) -> None:
    done = run(typed)
    assert done.exit_code == 2
    told = f"(Possible options: {', '.join(meant)})"
    assert (told in done.stderr) is bool(meant)
    assert ("Possible" in done.stderr) is bool(meant)
