"""Steps from the wire: field rules, sums, and texts that are stored as bodies of their own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any, Final

from orchard.trajectory.v1 import trajectory_pb2

from services.common.errors import InvalidArgumentError
from services.common.validation import Fields
from services.trajectories.bodies import Bodies
from services.trajectories.model import BlobReference, NewStep, Totals

TEXT_INLINE_BYTES: Final = 64 << 10
_EXTRA_BYTES: Final = 256 << 10
# Of a step; the sums of all steps and trajectories then fit their columns.
_MOST_TOKENS: Final = 1 << 40
_MOST_COST: Final = 1e12
SHA256: Final = re.compile(r"[0-9a-f]{64}\Z")
TURN_STEPS: Final = 100
"""Checked at once, 15 µs each; then others have their turn on the event loop. A message may have 100,000."""
_ROLES: Final = range(trajectory_pb2.ROLE_SYSTEM, trajectory_pb2.ROLE_TOOL + 1)


async def new_steps(
    messages: Sequence[trajectory_pb2.Step], tenant: str, bodies: Bodies, *, first: int | None = None
) -> list[NewStep]:
    """Checked steps in a row; `first`: the index that the first one must have.

    Raises:
        InvalidArgumentError: a field breaks its rule.
    """
    expected = first
    for message in messages:
        if expected is not None and message.index != expected:
            raise InvalidArgumentError.of(f"steps[{message.index}].index", f"must be {expected}")
        expected = message.index + 1
    made = []
    for message in messages:
        made.append(await new_step(message, tenant, bodies))
        if not len(made) % TURN_STEPS:
            await asyncio.sleep(0)
    return made


async def new_step(message: trajectory_pb2.Step, tenant: str, bodies: Bodies) -> NewStep:
    """A checked step. Texts above 64 KiB have become references to bodies.

    Raises:
        InvalidArgumentError: a field breaks its rule.
    """
    check_step(message)
    text_bytes = _bytes_of(message.reasoning)
    for call in message.tool_calls:
        text_bytes += _bytes_of(call.arguments)
    blobs: list[BlobReference] = []
    for part in message.content:
        # Read once: a text that is read from a message is decoded each time.
        size = _bytes_of(text := part.text)
        text_bytes += size
        if size > TEXT_INLINE_BYTES:
            stored = await bodies.put_text(tenant, text)
            part.blob.sha256, part.blob.size, part.blob.media_type = stored.sha256, stored.size, stored.media_type
        if part.HasField("blob"):
            blobs.append(BlobReference(part.blob.sha256, part.blob.size, part.blob.media_type))
    body = message.SerializeToString(deterministic=True)
    return NewStep(message.index, body, _totals(message, text_bytes), tuple(blobs))


def check_step(message: trajectory_pb2.Step) -> None:
    """Raise InvalidArgumentError unless every field keeps its rule."""
    fields, name = Fields(), f"steps[{message.index}]"
    fields.check(message.index >= 0, f"{name}.index", "must not be negative")
    fields.check(message.role in _ROLES, f"{name}.role", "must be SYSTEM, USER, ASSISTANT or TOOL")
    if message.HasField("parent"):
        fields.check(-1 <= message.parent < message.index, f"{name}.parent", "must be an earlier step, or -1")
    if message.tool_calls:
        assistant = message.role == trajectory_pb2.ROLE_ASSISTANT
        fields.check(assistant, f"{name}.tool_calls", "only the assistant calls tools")
    for position, part in enumerate(message.content):
        where = f"{name}.content[{position}]"
        if part.WhichOneof("kind") == "blob":
            fields.check(SHA256.match(part.blob.sha256) is not None, f"{where}.blob.sha256", "must be 64 of 0-9, a-f")
        else:
            fields.check(part.WhichOneof("kind") == "text", where, "needs a text or a blob")
    if message.HasField("time"):
        fields.timestamp(f"{name}.time", message.time)
    if message.HasField("model_call"):
        _check_call(fields, f"{name}.model_call", message.model_call)
    check_json(fields, f"{name}.extra_json", message.extra_json, dict, _EXTRA_BYTES)
    fields.done()


def check_json(fields: Fields, field: str, text: str, kind: type[Any], most_bytes: int) -> None:
    """An optional JSON text of one kind."""
    if not text:
        return
    fields.text(field, text, maximum=most_bytes)
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = None
    what = {dict: "a JSON object", list: "a JSON array", object: "a JSON value"}[kind]
    fields.check(isinstance(value, kind) and value is not None, field, f"must be {what}")


def _check_call(fields: Fields, name: str, call: trajectory_pb2.ModelCall) -> None:
    for count in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        fields.check(0 <= getattr(call, count) <= _MOST_TOKENS, f"{name}.{count}", "must be from 0 to 2^40")
    fields.check(0 <= call.cost_usd <= _MOST_COST, f"{name}.cost_usd", "must be from 0 to 10^12")
    if call.logprobs:
        same = len(call.logprobs) == len(call.completion_token_ids)
        fields.check(same, f"{name}.logprobs", "must be as many as completion_token_ids")
    check_json(fields, f"{name}.parameters_json", call.parameters_json, dict, _EXTRA_BYTES)


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _totals(message: trajectory_pb2.Step, text_bytes: int) -> Totals:
    turn = int(message.role == trajectory_pb2.ROLE_ASSISTANT and not message.copied_context)
    if not message.HasField("model_call"):
        return Totals(steps=1, turns=turn, text_bytes=text_bytes)
    call = message.model_call
    return Totals(
        steps=1,
        turns=turn,
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.completion_tokens,
        cached_tokens=call.cached_tokens,
        cost_usd=call.cost_usd,
        text_bytes=text_bytes,
        longest_tokens=call.prompt_tokens + call.completion_tokens,
    )


def _refuse(constant: str) -> None:
    raise ValueError(constant)
