"""Formats: what is written comes back, and what cannot be is said."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orchard.data import DataError, Record, Report, codecs, detect, read
from orchard.data.codecs.base import ExportOptions
from orchard.data.errors import Where
from orchard.data.messages import inline_images, message_of, step_of
from orchard.data.nodes import Node
from orchard.data.record import is_message, submission_of, text_of
from orchard.data.training.conversations import conversations
from orchard.trajectory.v1 import trajectory_pb2 as pb

from tests.unit.data.strategies import BODIES, JSON, OBJECTS, SLOW, TEXTS, WORDS, records, same

SAMPLES = Path(__file__).parent / "samples"


def write(record: Record, name: str, folder: Path) -> tuple[Path, Report]:
    """One record as a file of this format."""
    report = Report()
    rows = codecs()[name].rows
    assert rows is not None
    made = list(rows(record, ExportOptions(), report))
    for row in made:
        for file, data in row.files.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(data)
    path = folder / "out.jsonl"
    path.write_text("".join(json.dumps(row.value) + "\n" for row in made), encoding="utf-8")
    return path, report


@SLOW
@given(record=records())
def test_our_own_format_loses_nothing(record: Record, tmp_path: Path) -> None:
    path, report = write(record, "orchard", tmp_path)
    (back,) = read(path)
    same(record, back)
    assert report.losses == ()
    for step in record.steps:
        assert text_of(step, back.bodies) == text_of(step, BODIES)


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


MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": TEXTS
        | st.lists(
            st.builds(lambda text: {"type": "text", "text": text}, TEXTS)
            | st.just({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})
            | st.just({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}})
            | st.just({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
            max_size=3,
        ),
        "name": WORDS,
        "tool_call_id": WORDS,
        "reasoning_content": TEXTS.filter(bool),
        "refusal": TEXTS,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {
                    "id": WORDS,
                    "type": st.just("function"),
                    "function": st.fixed_dictionaries({"name": WORDS, "arguments": TEXTS | OBJECTS}),
                }
            ),
            min_size=1,
            max_size=2,
        ),
    },
)


@SLOW
@given(message=MESSAGES)
def test_a_message_comes_back_as_it_was(message: dict[str, Any]) -> None:
    bodies: dict[str, bytes] = {}
    step = step_of(Node(message, Where("f")), 0, bodies)
    back = message_of(step, bodies, inline_images(bodies))
    assert back == {"content": None} | message


@SLOW
@given(lines=st.lists(st.tuples(st.lists(MESSAGES, min_size=1, max_size=3), OBJECTS), min_size=1, max_size=2))
def test_openai_lines_come_back(lines: list[tuple[list[dict[str, Any]], dict[str, Any]]], tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    rows = [{f"x-{key}": value for key, value in others.items()} | {"messages": m} for m, others in lines]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for record, row in zip(read(path, format="openai"), rows, strict=True):
        written, report = write(record, "openai", tmp_path)
        back = json.loads(written.read_text())
        assert back.pop("id")
        del back["orchard"]
        assert back == row | {"messages": [{"content": None} | message for message in row["messages"]]}
        assert report.losses == ()


@SLOW
@given(record=records(least=1))
def test_messages_keep_the_description_of_a_trajectory(record: Record, tmp_path: Path) -> None:
    path, _ = write(record, "openai", tmp_path)
    found = conversations(record)
    back = list(read(path, format="openai"))
    assert len(back) == len(found)
    for conversation, one in zip(found, back, strict=True):
        assert one.trajectory.outcome == record.trajectory.outcome
        assert one.trajectory.labels == record.trajectory.labels
        assert [step.role for step in one.steps] == [record.steps[index].role for index in conversation.path]


PREDICTIONS = st.fixed_dictionaries(
    {"instance_id": WORDS, "model_name_or_path": WORDS, "model_patch": TEXTS | st.none()},
    optional={"cost": st.integers(0, 9)},
)


@SLOW
@given(predictions=st.lists(PREDICTIONS, min_size=1, max_size=4))
@pytest.mark.parametrize("shape", ["lines", "array", "by instance"])
def test_predictions_come_back(predictions: list[dict[str, Any]], shape: str, tmp_path: Path) -> None:
    path = tmp_path / ("in.jsonl" if shape == "lines" else "in.json")
    if shape == "lines":
        path.write_text("".join(json.dumps(row) + "\n" for row in predictions))
    elif shape == "array":
        path.write_text(json.dumps(predictions))
    else:
        predictions = list({row["instance_id"]: row for row in predictions}.values())
        path.write_text(json.dumps({row["instance_id"]: row for row in predictions}))
    assert detect(path).name == "swebench"
    for record, row in zip(read(path), predictions, strict=True):
        written, _ = write(record, "swebench", tmp_path)
        assert json.loads(written.read_text()) == row


def test_a_prediction_without_a_patch_says_so(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"instance_id": "a", "model_patch": ""}\n{"instance_id": "b"}\n')
    with pytest.raises(DataError, match=r"in.jsonl:2: model_patch: is missing"):
        list(read(path, format="swebench"))


def test_mini_swe_agent() -> None:
    report = Report()
    path = SAMPLES / "mini_swe_agent" / "calc__calc-1.traj.json"
    assert detect(path).name == "mini-swe-agent"
    (record,) = read(path, report=report)
    theirs = json.loads(path.read_text())
    messages = [step for step in record.steps if is_message(step)]
    assert [text_of(step, {}) for step in messages] == [one["content"] for one in theirs["messages"][:-1]]
    assert [step.role for step in messages[:4]] == [pb.ROLE_SYSTEM, pb.ROLE_USER, pb.ROLE_ASSISTANT, pb.ROLE_TOOL]
    assert [step.tool_call_id for step in messages if step.role == pb.ROLE_TOOL] == ["c1", "c2"]
    assert messages[2].tool_calls[0].arguments == '{"command": "cat calc.py"}'
    assert messages[2].model_call.cost_usd == 1.0
    assert messages[2].HasField("time")
    assert submission_of(record) == theirs["info"]["submission"]
    trajectory = record.trajectory
    assert (trajectory.status, trajectory.harness) == (pb.TRAJECTORY_STATUS_COMPLETED, "mini-swe-agent")
    assert trajectory.task.instance_id == "calc__calc-1"
    assert json.loads(trajectory.metadata_json)["mini_swe_agent"]["info"]["mini_version"] == "2.4.6"
    assert report.losses == ()


@pytest.mark.parametrize(
    ("exit_status", "status"),
    [
        ("Submitted", pb.TRAJECTORY_STATUS_COMPLETED),
        ("LimitsExceeded", pb.TRAJECTORY_STATUS_FAILED),
        ("RepeatedFormatError", pb.TRAJECTORY_STATUS_FAILED),
        ("ConnectionError", pb.TRAJECTORY_STATUS_ABORTED),
        ("", pb.TRAJECTORY_STATUS_ABORTED),
    ],
)
def test_how_a_run_of_mini_swe_agent_ended(exit_status: str, status: int, tmp_path: Path) -> None:
    path = tmp_path / "run.traj.json"
    messages = [{"role": "user", "content": "hi"}, {"role": "exit", "content": "", "extra": {}}]
    path.write_text(json.dumps({"info": {"exit_status": exit_status, "submission": ""}, "messages": messages}))
    (record,) = read(path)
    assert record.trajectory.status == status
    assert submission_of(record) is None
    assert len(record.steps) == 1


def test_mini_swe_agent_with_the_responses_api(tmp_path: Path) -> None:
    response = {
        "object": "response",
        "output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Think."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
            {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'},
        ],
        "extra": {"cost": 0.5},
    }
    output = {"type": "function_call_output", "call_id": "c1", "output": "calc.py", "extra": {"returncode": 0}}
    path = tmp_path / "run.traj.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}, response, output]}))
    (record,) = read(path)
    _, action, observation = record.steps
    assert (action.role, action.reasoning, text_of(action, {})) == (pb.ROLE_ASSISTANT, "Think.", "Look.")
    assert (action.tool_calls[0].call_id, action.model_call.cost_usd) == ("c1", 0.5)
    assert (observation.role, observation.tool_call_id) == (pb.ROLE_TOOL, "c1")
    assert text_of(observation, {}) == "calc.py"


def test_openhands() -> None:
    report = Report()
    assert detect(SAMPLES / "openhands").name == "openhands"
    (record,) = read(SAMPLES / "openhands", report=report)
    before, after = conversations(record)
    assert [record.steps[index].role for index in before.path] == [
        pb.ROLE_SYSTEM,
        pb.ROLE_USER,
        pb.ROLE_ASSISTANT,
        pb.ROLE_TOOL,
        pb.ROLE_TOOL,
        pb.ROLE_ASSISTANT,
        pb.ROLE_TOOL,
        pb.ROLE_ASSISTANT,
        pb.ROLE_TOOL,
    ]
    # Two actions of one response are one message.
    response = record.steps[2]
    assert [call.call_id for call in response.tool_calls] == ["c1", "c2"]
    assert (response.reasoning, text_of(response, {})) == ("Plan the work.", "I think first.")
    assert [record.steps[index].is_error for index in before.path if record.steps[index].role == pb.ROLE_TOOL] == [
        False,
        False,
        True,
        False,
    ]
    # After the condensation: prompt, task, summary, what is left, and what came then.
    texts = [text_of(record.steps[index], {}) for index in after.path]
    assert texts[:3] == ["You fix bugs.", "Fix the sum in calc.py.", "It thought first."]
    assert texts[-2:] == ["And the product?", "Nothing is wrong with the product."]
    assert all(record.steps[index].copied_context for index in after.path[:-2])
    assert len(before.trained) == 3
    assert after.trained == (record.steps[-1].index,)
    assert list(record.steps[-1].model_call.completion_token_ids) == [4, 5]
    assert record.trajectory.status == pb.TRAJECTORY_STATUS_COMPLETED
    assert record.trajectory.model == "test-model"
    assert [tool["function"]["name"] for tool in json.loads(record.trajectory.tools_json)] == ["finish", "think"]
    assert {loss.what for loss in report.losses} == {"tools.parameters", "timestamp"}


def test_openhands_with_an_event_missing(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "openhands" / "conversation", tmp_path / "c")
    next((tmp_path / "c" / "events").glob("event-00004-*")).unlink()
    with pytest.raises(DataError, match="event 4 is missing"):
        list(read(tmp_path / "c"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"messages": [}', r"in.jsonl:2: is no JSON: .* column 15"),
        ('{"messages": NaN}', r"in.jsonl:2: has NaN, which is no JSON"),
        ('{"messages": {}}', r"in.jsonl:2: messages: must be an array, not an object"),
        ('{"messages": [{"content": "x"}]}', r"in.jsonl:2: messages\[0\].role: is missing"),
        ('{"messages": [{"role": "judge"}]}', r"in.jsonl:2: messages\[0\].role: is 'judge'; use one of system"),
        ('{"messages": [{"role": "user", "content": 1}]}', r"messages\[0\].content: must be an array, not a number"),
        ("[" * 100_000, r"in.jsonl:2: is nested too deep"),
    ],
)
def test_a_bad_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"messages": []}}\n{text}\n')
    with pytest.raises(DataError, match=message) as caught:
        list(read(path, format="openai"))
    assert caught.value.where.line == 2


def test_what_is_before_a_bad_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"messages": []}\n{"messages": []}\n{\n')
    found = read(path, format="openai")
    assert [next(found).id, next(found).id] == ["in-1", "in-2"]
    with pytest.raises(DataError):
        next(found)


def test_a_format_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no format 'parchment'; use one of orchard"):
        read(tmp_path, format="parchment")
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="is of no format that is known; name it"):
        detect(tmp_path / "x.jsonl")
    with pytest.raises(DataError, match="is not there"):
        detect(tmp_path / "y.jsonl")


@SLOW
@given(value=JSON)
def test_any_json_is_read_or_refused_by_name(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "in.jsonl"
    path.write_text(json.dumps(value) + "\n")
    for codec in codecs().values():
        if codec.read is None or not path.match("*.jsonl"):
            continue
        with contextlib.suppress(DataError):
            list(codec.read(path, Report()))
