"""ATIF: what is written comes back, files from outside are not taken, and what it has no place for is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from orchard.data import DataError, Record, Report, read
from orchard.trajectory.v1 import trajectory_pb2 as pb

from tests.unit.data.files import write
from tests.unit.data.strategies import SLOW, records, same

SAMPLES = Path(__file__).parent / "samples"


@SLOW
@given(record=records(least=1))
def test_atif_brings_back_all_that_a_trajectory_has(record: Record, tmp_path: Path) -> None:
    path, report = write(record, "atif", tmp_path)
    (back,) = read(path, format="atif")
    same(record, back)
    assert report.losses == ()


@pytest.mark.parametrize("minor", range(9))
def test_atif_of_every_version(minor: int) -> None:
    report = Report()
    (record,) = read(SAMPLES / "atif" / f"v1.{minor}.json", report=report)
    assert [step.role for step in record.steps] == [
        pb.ROLE_SYSTEM,
        pb.ROLE_USER,
        pb.ROLE_ASSISTANT,
        pb.ROLE_TOOL,
        pb.ROLE_ASSISTANT,
    ]
    trajectory, action = record.trajectory, record.steps[2]
    assert (trajectory.harness, trajectory.model, trajectory.rollout_id) == ("tester", "model-a", "session-1")
    assert record.steps[1].time.ToJsonString() == "2026-01-02T03:04:05.600Z"
    assert (action.reasoning, action.tool_calls[0].name) == ("I should look.", "look")
    assert json.loads(action.tool_calls[0].arguments) == {"at": "here", "n": 2}
    assert (action.model_call.prompt_tokens, action.model_call.cost_usd) == (20, 0.25)
    assert record.steps[3].tool_call_id == "c1"
    assert record.steps[4].model_call.model == "model-b"
    assert json.loads(trajectory.metadata_json)["atif"]["final_metrics"]["total_cost_usd"] == 0.25
    assert report.losses == ()


def test_atif_with_everything(tmp_path: Path) -> None:
    parent, child = read(SAMPLES / "atif" / "full.json")
    assert (parent.id, child.id) == ("parent", "child")
    assert child.trajectory.rollout_id == parent.trajectory.rollout_id == "session-1"
    assert list(parent.steps[2].model_call.completion_token_ids) == [4, 5]
    assert list(parent.steps[2].model_call.logprobs) == [-0.5, -0.25]
    assert parent.steps[1].copied_context
    image = parent.steps[3].content[1].blob
    assert image.media_type == "image/png"
    assert parent.bodies[image.sha256].startswith(b"\x89PNG")
    # What answers no call came in the place of a user.
    assert parent.steps[4].role == pb.ROLE_USER
    path, report = write(parent, "atif", tmp_path)
    document = json.loads(path.read_text())
    theirs = json.loads((SAMPLES / "atif" / "full.json").read_text())
    assert report.losses == ()
    assert _without_ours(document, tmp_path) == _without_subagents(theirs)


def _without_ours(value: Any, folder: Path) -> Any:
    """A document of ours without what only we read."""
    if isinstance(value, list):
        return [_without_ours(item, folder) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: _without_ours(item, folder) for key, item in value.items() if key != "orchard"}
    if made.get("extra") == {}:
        del made["extra"]
    if "path" in made:
        assert (folder / made["path"]).is_file()
        made["path"] = "images/dot.png"
    return made


def _without_subagents(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "subagent_trajectories"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": "ATIF-v2.0"}, "schema_version: is 'ATIF-v2.0'"),
        ({"steps": [{"step_id": 2, "source": "user", "message": ""}]}, r"steps\[0\].step_id: is 2 where 1 is due"),
        ({"steps": [{"step_id": 1, "source": "robot", "message": ""}]}, r"steps\[0\].source: is 'robot'"),
        ({"steps": [{"step_id": 1, "source": "user", "message": 5}]}, r"message: must be an array, not a number"),
        ({"agent": {"version": "1"}}, "agent.name: is missing"),
        (
            {
                "steps": [
                    {
                        "step_id": 1,
                        "source": "agent",
                        "message": "",
                        "observation": {"results": [{"source_call_id": "x"}]},
                    }
                ]
            },
            "source_call_id: is 'x', which no call of this step has",
        ),
        (
            {"steps": [{"step_id": 1, "source": "user", "message": "", "timestamp": "noon"}]},
            "timestamp: is 'noon', which is no moment",
        ),
    ],
)
def test_atif_that_breaks_its_rules(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    document = json.loads((SAMPLES / "atif" / "v1.8.json").read_text()) | change
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=message) as caught:
        list(read(path, format="atif"))
    assert str(path) in str(caught.value)


def test_atif_with_an_image_that_is_not_there(tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "atif" / "full.json", tmp_path)
    with pytest.raises(DataError, match=r"steps\[2\].observation.results\[0\].content\[1\].source.path"):
        list(read(tmp_path / "full.json"))


@pytest.mark.parametrize("address", ["../secret.png", "/etc/hostname", "images/../../secret.png"])
def test_atif_takes_no_files_from_outside_its_folder(address: str, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "in").mkdir()
    part = {"type": "image", "source": {"media_type": "image/png", "path": address}}
    document = json.loads((SAMPLES / "atif" / "v1.8.json").read_text())
    document["steps"][0]["message"] = [part]
    (tmp_path / "in" / "x.json").write_text(json.dumps(document))
    with pytest.raises(
        DataError, match=r"steps\[0\].message\[0\].source.path: is .*, outside of the document's folder"
    ):
        list(read(tmp_path / "in" / "x.json"))


def test_an_archive_names_no_place_outside_of_it(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for trajectory_id in ("../../x", "", "a/b"):
        line = {"format": "orchard-trajectory-1", "trajectory": {"trajectory_id": trajectory_id}}
        path.write_text(json.dumps(line) + "\n")
        with pytest.raises(DataError, match="trajectory_id: is"):
            list(read(path))
    path.write_text(json.dumps({"format": "orchard-trajectory-1", "files": "../other", "trajectory": {}}) + "\n")
    with pytest.raises(DataError, match=r"files: is '\.\./other'; it must be the name of a folder"):
        list(read(path))


def test_a_field_that_atif_does_not_have_is_reported(tmp_path: Path) -> None:
    document = json.loads((SAMPLES / "atif" / "v1.8.json").read_text()) | {"mood": "good"}
    (tmp_path / "x.json").write_text(json.dumps(document))
    report = Report()
    list(read(tmp_path / "x.json", report=report))
    assert [(loss.what, loss.count) for loss in report.losses] == [("mood", 1)]
