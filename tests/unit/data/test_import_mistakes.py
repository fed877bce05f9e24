"""What is said of a file that cannot be imported as it is: the file, the line, the field and the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from orchard._cli.main import app
from orchard.data import DataError, Report, read
from orchard.data.repeats import without_repeats
from orchard.trajectory.v1 import trajectory_pb2 as pb
from typer.testing import CliRunner

from tests.unit.data.making import record

runner = CliRunner()
OPENAI = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
SWEBENCH = {"instance_id": "i", "model_name_or_path": "m", "model_patch": "p"}
ORCHARD = {"format": "orchard-trajectory-1", "trajectory": {"trajectory_id": "t"}}
PUBLIC = {"tools": "[]", "messages": OPENAI["messages"], "metadata": "{}"}
ATIF = {"schema_version": "ATIF-v1.6", "agent": {"name": "a", "version": "1"}, "steps": []}
SCORED = {"name": "outcome", "state": "REWARD_STATE_SCORED", "value": 1}


def lines(path: Path, *values: Any) -> Path:
    """A file with a line for each."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def mistake(path: Path, **options: Any) -> str:
    """What reading a file says is wrong."""
    with pytest.raises(DataError) as caught:
        list(without_repeats(read(path, **options)))
    return caught.value.message


@pytest.mark.parametrize("described", [OPENAI | {"orchard": {}}, ORCHARD, ATIF])
@pytest.mark.parametrize("field", ["rewards", "outcome"])
def test_a_reward_without_a_state_is_told_by_line_and_field(
    described: dict[str, Any], field: str, tmp_path: Path
) -> None:
    value = json.loads(json.dumps(described))
    reward = {"name": "outcome", "value": 1}
    given = {field: [reward] if field == "rewards" else reward}
    if described is ATIF:
        value["extra"] = {"orchard": {"trajectory": given}}
    else:
        value["trajectory" if described is ORCHARD else "orchard"].update(given)
    path = lines(tmp_path / "in.jsonl", described, value)
    told = mistake(path)
    assert told.startswith(f"{path}:2: ")
    assert f"{field}{'[0]' if field == 'rewards' else ''}.state: is missing; use one of REWARD_STATE_SCORED" in told


def test_an_id_of_two_trajectories_is_told_with_both_places(tmp_path: Path) -> None:
    first, other = OPENAI | {"id": "a"}, OPENAI | {"id": "a", "tools": [{"type": "function"}]}
    path = lines(tmp_path / "in.jsonl", first, OPENAI, other)
    assert mistake(path) == f"{path}:3: the id 'a' is that of another trajectory, at {path}:1; give each its own"
    # The same once more, as where two exports have it, does no harm.
    assert len(list(without_repeats(read(lines(tmp_path / "same.jsonl", first, OPENAI, first))))) == 3


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("in.jsonl", "", "is empty"),
        ("in.json", "", "is empty"),
        ("in.jsonl", "\n \n", "is empty, but for empty lines"),
        ("in.jsonl", "{\n", ":1: is no JSON"),
        ("in.jsonl", "\n[1]\n", ":2: is an array, and is of no format that is known"),
        ("in.jsonl", '{"prompt": 1, "answer": 2}\n', ":1: has the fields 'prompt', 'answer', and is of no format"),
        ("in.json", "{}", "has the fields (none), and is of no format that is known"),
        ("in.txt", "text", "is of no format that is known"),
    ],
)
def test_a_file_of_no_format_is_told_what_it_is(name: str, content: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert mistake(path).startswith(f"{path}{told if told.startswith(':') else f': {told}'}")


@pytest.mark.parametrize(
    ("first", "name", "second", "other"),
    [
        (OPENAI, "openai", SWEBENCH, "swebench"),
        (SWEBENCH, "swebench", OPENAI, "openai"),
        (ORCHARD, "orchard", OPENAI, "openai"),
        (OPENAI, "openai", ORCHARD, "orchard"),
        (OPENAI, "openai", ATIF, "atif"),
        (ATIF, "atif", ORCHARD, "orchard"),
        (PUBLIC, "public-swe", SWEBENCH, "swebench"),
    ],
)
def test_a_line_of_another_format_is_told(
    first: dict[str, Any], name: str, second: dict[str, Any], other: str, tmp_path: Path
) -> None:
    path = lines(tmp_path / "in.jsonl", first, first, second)
    told = f"{path}:3: is of the format {other!r}, where the lines before are of {name!r}; give each format a file"
    assert mistake(path).startswith(told)
    assert mistake(path, format=name).startswith(told)
    # A mistake within the format is told as it is.
    assert "of the format" not in mistake(lines(path, OPENAI, {"messages": [{"role": "king"}]}))


@pytest.mark.parametrize(
    ("line", "described", "key"),
    [
        ({"reward": 1}, {}, "reward"),
        ({"score": 0.5}, {"task": {"instance_id": "i"}}, "score"),
        ({"rewards": [1]}, {}, "rewards"),
        ({"model": "m"}, {"rewards": [SCORED]}, "model"),
        ({"labels": {"a": "b"}}, {}, "labels"),
        ({"instance_id": "i"}, {"task": {"dataset": "d"}}, "instance_id"),
        ({"reward": 1}, {"rewards": [SCORED]}, ""),
        ({"model": "m"}, {"model": "m"}, ""),
        ({"instance_id": "i"}, {"task": {"instance_id": "i"}}, ""),
        ({"created": 1, "usage": {}}, {}, ""),
    ],
)
def test_what_is_no_more_than_metadata_is_told(
    line: dict[str, Any], described: dict[str, Any], key: str, tmp_path: Path
) -> None:
    path = lines(tmp_path / "in.jsonl", OPENAI | line | ({"orchard": described} if described else {}))
    report = Report()
    (found,) = read(path, report=report)
    assert json.loads(found.trajectory.metadata_json)["openai"] == line
    assert [(loss.what, loss.first) for loss in report.losses] == ([(key, f"{path}:1")] if key else [])
    if key:
        assert (
            'as metadata, which nothing filters, counts or trains by; give it as "orchard": {' in report.losses[0].why
        )


def test_the_place_that_is_told_is_one(tmp_path: Path) -> None:
    """What the words for a reward say to write is read as a reward."""
    report = Report()
    list(read(lines(tmp_path / "in.jsonl", OPENAI | {"reward": 1}), report=report))
    written = json.loads(report.losses[0].why.partition('"orchard": ')[2])
    (found,) = read(lines(tmp_path / "out.jsonl", OPENAI | {"orchard": written}))
    assert found.trajectory.rewards[0].value == 1
    assert found.trajectory.status == pb.TRAJECTORY_STATUS_COMPLETED


def test_a_dataset_and_labels_are_put_into_a_description() -> None:
    made = record("t", dataset="old", repo="r")
    made.trajectory.labels["kept"] = "a"
    made.trajectory.labels["run"] = "1"
    found = made.described(dataset="new", labels={"run": "2"})
    assert (found.trajectory.task.dataset, found.trajectory.task.repo) == ("new", "r")
    assert dict(found.trajectory.labels) == {"kept": "a", "run": "2"}
    assert (made.trajectory.task.dataset, made.trajectory.labels["run"]) == ("old", "1")
    assert made.described().trajectory == made.trajectory


def test_nothing_is_told_as_nothing(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("")
    for command in (
        ("convert", str(path), "--from", "openai", "--to", "sft", "-o", str(tmp_path / "out.jsonl")),
        ("import", str(path), "--from", "openai", "--dry-run"),
    ):
        done = runner.invoke(app, ["trajectories", *command])
        assert (done.exit_code, done.stderr) == (0, "no trajectory was read\n")
