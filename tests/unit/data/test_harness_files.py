"""What mini-swe-agent and OpenHands write, read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from orchard.data import DataError, Report, detect, read
from orchard.data.record import is_message, submission_of, text_of
from orchard.data.training.conversations import conversations
from orchard.trajectory.v1 import trajectory_pb2 as pb

SAMPLES = Path(__file__).parent / "samples"


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
