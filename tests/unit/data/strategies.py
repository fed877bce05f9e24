"""Trajectories of every shape, for properties."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from orchard.data.record import Record, blob_of
from orchard.trajectory.v1 import trajectory_pb2 as pb

# A busy machine may take its time.
SLOW = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

# JSON has no lone surrogates, and protobuf none either.
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
WORDS = st.text("abcdefghij-_.", min_size=1, max_size=8).filter(lambda text: text[0] not in "-_.")
NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
OBJECTS = st.dictionaries(WORDS, JSON.filter(lambda value: value is not None), max_size=3)
TIMES = st.builds(Timestamp, seconds=st.integers(0, 4_000_000_000), nanos=st.integers(0, 999_999_999))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=4)
BODIES = {blob_of(body, "").sha256: body for body in (b"\x89PNG\r\n\x1a\n1", b"\x89PNG\r\n\x1a\n2")}


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@st.composite
def calls(draw: st.DrawFn, number: int) -> pb.ToolCall:
    arguments = draw(OBJECTS.map(compact) | TEXTS | st.just('{"a": 1}'))
    extra = draw(st.just("") | OBJECTS.filter(bool).map(lambda value: compact({"other": value})))
    return pb.ToolCall(call_id=f"c{number}", name=draw(WORDS), arguments=arguments, extra_json=extra)


@st.composite
def model_calls(draw: st.DrawFn) -> pb.ModelCall:
    written = draw(TOKENS)
    return pb.ModelCall(
        model=draw(st.just("") | WORDS),
        policy_version=draw(st.just("") | WORDS),
        prompt_tokens=draw(st.integers(0, 10**6)),
        completion_tokens=draw(st.integers(0, 10**6)),
        cached_tokens=draw(st.integers(0, 10**6)),
        cost_usd=draw(st.floats(0, 100)),
        finish_reason=draw(st.just("") | WORDS),
        prompt_token_ids=draw(TOKENS),
        completion_token_ids=written,
        logprobs=draw(st.lists(st.floats(-20, 0, width=32), min_size=len(written), max_size=len(written))),
        parameters_json=draw(st.just("") | OBJECTS.map(compact)),
    )


@st.composite
def parts(draw: st.DrawFn) -> pb.Part:
    if draw(st.booleans()):
        return pb.Part(text=draw(TEXTS))
    return pb.Part(blob=blob_of(draw(st.sampled_from(list(BODIES.values()))), "image/png"))


@st.composite
def steps(draw: st.DrawFn, index: int, open_calls: list[str]) -> pb.Step:
    role = draw(st.sampled_from([pb.ROLE_SYSTEM, pb.ROLE_USER, pb.ROLE_ASSISTANT, pb.ROLE_TOOL]))
    step = pb.Step(index=index, role=role, name=draw(st.just("") | WORDS))
    step.content.extend(draw(st.lists(parts(), max_size=3)))
    if role == pb.ROLE_ASSISTANT:
        step.reasoning = draw(TEXTS)
        step.tool_calls.extend(draw(calls(10 * index + number)) for number in range(draw(st.integers(0, 2))))
        if draw(st.booleans()):
            step.model_call.CopyFrom(draw(model_calls()))
    if role == pb.ROLE_TOOL:
        step.tool_call_id = draw(st.sampled_from([*open_calls, "unknown"]))
        step.is_error = draw(st.booleans())
    if index and draw(st.integers(0, 4)) == 0:
        step.parent = draw(st.integers(-1, index - 1))
    if draw(st.booleans()):
        step.time.CopyFrom(draw(TIMES))
    step.copied_context = draw(st.integers(0, 4)) == 0
    step.extra_json = draw(st.just("") | OBJECTS.map(lambda value: compact({"other": value})))
    return step


@st.composite
def trajectories(draw: st.DrawFn) -> pb.Trajectory:
    made = pb.Trajectory(
        trajectory_id=draw(WORDS),
        rollout_id=draw(st.just("") | WORDS),
        group_id=draw(st.just("") | WORDS),
        attempt=draw(st.integers(0, 9)),
        harness=draw(st.just("") | WORDS),
        model=draw(st.just("") | WORDS),
        tools_json=draw(st.just("") | st.lists(OBJECTS, max_size=2).map(json.dumps) | st.just('[{"type":"function"}]')),
        labels=draw(st.dictionaries(WORDS, WORDS, max_size=2)),
        status=draw(st.sampled_from([pb.TRAJECTORY_STATUS_COMPLETED, pb.TRAJECTORY_STATUS_FAILED])),
        metadata_json=draw(st.just("") | OBJECTS.map(lambda value: compact({"other": value}))),
    )
    made.task.instance_id = draw(st.just("") | WORDS)
    if draw(st.booleans()):
        made.outcome.CopyFrom(pb.Reward(name="outcome", state=pb.REWARD_STATE_SCORED, value=draw(NUMBERS)))
        made.rewards.append(made.outcome)
    return made


@st.composite
def records(draw: st.DrawFn, *, least: int = 0) -> Record:
    made: list[pb.Step] = []
    open_calls: list[str] = []
    for index in range(draw(st.integers(least, 6))):
        step = draw(steps(index, open_calls))
        open_calls += [call.call_id for call in step.tool_calls]
        made.append(step)
    values = [
        pb.StepValue(index=index, name="value", value=draw(st.floats(0, 1))) for index in range(len(made)) if index % 2
    ]
    return Record(draw(trajectories()), made, values, BODIES)


def same(one: Record, other: Record) -> None:
    """Assert that two records say the same."""
    assert one.trajectory == other.trajectory
    assert list(one.steps) == list(other.steps)
    assert list(one.values) == list(other.values)
