"""Trajectories written by hand, for tests of what comes out of them."""

from __future__ import annotations

from collections.abc import Sequence

from orchard.data.record import Record, blob_of
from orchard.trajectory.v1 import trajectory_pb2 as pb

SYSTEM, USER, ACTION, RESULT = pb.ROLE_SYSTEM, pb.ROLE_USER, pb.ROLE_ASSISTANT, pb.ROLE_TOOL


def said(index: int, role: pb.Role.ValueType, text: str, **rest: object) -> pb.Step:
    """A step with text."""
    return pb.Step(index=index, role=role, content=[pb.Part(text=text)], **rest)  # type: ignore[arg-type]


def outcome(value: float) -> pb.Reward:
    """An outcome that is a number."""
    return pb.Reward(name="outcome", state=pb.REWARD_STATE_SCORED, value=value)


def record(
    name: str = "t1",
    actions: int = 2,
    score: float | None = 1.0,
    *,
    values: dict[int, float] | None = None,
    group: str = "",
    tokens: bool = False,
    **task: str,
) -> Record:
    """A system prompt, a task, and `actions` times an action with its result.

    Args:
        name: its id.
        actions: how many.
        score: its outcome; None: nothing judged it.
        values: V by state.
        group: its group.
        tokens: whether tokens and log-probs are known.
        task: fields of its task.
    """
    trajectory = pb.Trajectory(trajectory_id=name, group_id=group, status=pb.TRAJECTORY_STATUS_COMPLETED, model="m")
    for key, text in task.items():
        setattr(trajectory.task, key, text)
    if score is not None:
        trajectory.outcome.CopyFrom(outcome(score))
        trajectory.rewards.append(outcome(score))
    steps = [said(0, SYSTEM, "You fix bugs."), said(1, USER, "Fix it.")]
    ids = [1, 2]
    for action in range(actions):
        step = said(len(steps), ACTION, f"action {action}")
        step.tool_calls.add(call_id=f"c{action}", name="bash", arguments='{"command":"ls"}')
        if tokens:
            written = [100 + 10 * action, 101 + 10 * action]
            step.model_call.prompt_token_ids.extend(ids)
            step.model_call.completion_token_ids.extend(written)
            step.model_call.logprobs.extend([-0.5, -0.25])
            ids = [*ids, *written, 7]
        steps += [step, said(len(steps) + 1, RESULT, f"result {action}", tool_call_id=f"c{action}")]
    stated = [
        pb.StepValue(index=1 + 2 * state if state else 2, name="value", value=v) for state, v in (values or {}).items()
    ]
    return Record(trajectory, steps, stated)


def with_image(name: str, turns: int, score: float, data: bytes = b"\x89PNG\r\n\x1a\n", **task: str) -> Record:
    """A trajectory in a browser: a screenshot before each response."""
    made = record(name, 0, score, **task)
    steps, bodies = list(made.steps), {}
    blob = blob_of(data, "image/png")
    bodies[blob.sha256] = data
    for turn in range(turns):
        shown = pb.Step(index=len(steps), role=USER, content=[pb.Part(text="See "), pb.Part(blob=blob)])
        steps += [shown, said(len(steps) + 1, ACTION, f"click {turn}")]
    return Record(made.trajectory, steps, (), bodies)


def branching() -> Record:
    """A history that was rewritten: two responses share a beginning, and a third follows copied context."""
    made = record("tree", 1)
    steps: Sequence[pb.Step] = [
        *made.steps,
        said(4, ACTION, "first way"),
        said(5, ACTION, "second way", parent=3),
        said(6, USER, "a summary", parent=-1, copied_context=True),
        said(7, ACTION, "copied", copied_context=True),
        said(8, ACTION, "third way"),
    ]
    return Record(made.trajectory, steps)
