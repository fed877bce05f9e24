"""Writes trajectories with Harbor's own models, one of each version of its format, into the folder that is named."""

import json
import sys
from pathlib import Path

from harbor.models.trajectories import (
    Agent,
    ContentPart,
    FinalMetrics,
    ImageSource,
    Metrics,
    Observation,
    ObservationResult,
    Step,
    SubagentTrajectoryRef,
    ToolCall,
    Trajectory,
)
from harbor.utils.trajectory_validator import TrajectoryValidator

folder = Path(sys.argv[1])
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360000002000001e221bc33"
    "0000000049454e44ae426082"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def plain(version: str) -> Trajectory:
    """What every version has."""
    return Trajectory(
        schema_version=version,
        session_id="session-1",
        agent=Agent(name="tester", version="3", model_name="model-a"),
        steps=[
            Step(step_id=1, source="system", message="You look."),
            Step(step_id=2, source="user", message="What is there?", timestamp="2026-01-02T03:04:05.600Z"),
            Step(
                step_id=3,
                source="agent",
                message="",
                reasoning_content="I should look.",
                tool_calls=[ToolCall(tool_call_id="c1", function_name="look", arguments={"at": "here", "n": 2})],
                observation=Observation(results=[ObservationResult(source_call_id="c1", content="A file.")]),
                metrics=Metrics(prompt_tokens=20, completion_tokens=5, cached_tokens=4, cost_usd=0.25),
            ),
            Step(step_id=4, source="agent", message="A file.", model_name="model-b"),
        ],
        final_metrics=FinalMetrics(total_prompt_tokens=20, total_completion_tokens=5, total_cost_usd=0.25),
    )


def full() -> Trajectory:
    """What the newest has."""
    made = plain("ATIF-v1.8")
    made.trajectory_id = "parent"
    made.notes = "Continued elsewhere."
    made.agent.tool_definitions = TOOLS
    made.extra = {"seed": 7}
    step = made.steps[2]
    step.reasoning_effort, step.llm_call_count, step.extra = "high", 1, {"kind": "probe"}
    step.metrics.prompt_token_ids, step.metrics.completion_token_ids = [1, 2, 3], [4, 5]
    step.metrics.logprobs = [-0.5, -0.25]
    image = ContentPart(type="image", source=ImageSource(media_type="image/png", path="images/dot.png"))
    step.observation.results[0].content = [ContentPart(type="text", text="A dot:"), image]
    delegated = SubagentTrajectoryRef(trajectory_id="child", session_id="session-1")
    step.observation.results.append(ObservationResult(content="Delegated.", subagent_trajectory_ref=[delegated]))
    made.steps[1].is_copied_context = True
    child = plain("ATIF-v1.8")
    child.trajectory_id = "child"
    made.subagent_trajectories = [child]
    return made


(folder / "images").mkdir(parents=True, exist_ok=True)
(folder / "images" / "dot.png").write_bytes(PNG)
documents = {f"v1.{minor}": plain(f"ATIF-v1.{minor}") for minor in range(9)} | {"full": full()}
for name, trajectory in documents.items():
    path = folder / f"{name}.json"
    path.write_text(json.dumps(trajectory.to_json_dict(), indent=1) + "\n")
    validator = TrajectoryValidator()
    if not validator.validate(path):
        raise SystemExit("\n".join(validator.errors))
