"""Steps as messages of OpenAI's chat format, and back.

What the format has beyond a step is kept in the step's `extra_json`: under `openai` the fields of a message, under
`external_parts` the parts of its content, by position, that name something outside (an image by its address).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from orchard._client.trajectories.convert import openai_call, openai_message
from orchard.data.errors import DataError
from orchard.data.nodes import Node, compact, parse_object
from orchard.data.record import blob_of, body_of
from orchard.trajectory.v1 import trajectory_pb2 as pb

ROLES: Final[Mapping[str, pb.Role.ValueType]] = {
    "system": pb.ROLE_SYSTEM,
    "developer": pb.ROLE_SYSTEM,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
    "function": pb.ROLE_TOOL,
}
_NAMES: Final[Mapping[int, str]] = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}
_KNOWN: Final = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning"})
_DATA_URL: Final = re.compile(r"data:([\w.+/-]+);base64,([A-Za-z0-9+/=\s]*)\Z")

Image = Callable[[pb.BlobReference], dict[str, Any]]
"""How an image becomes a part of a message's content."""


def step_of(message: Node, index: int, bodies: dict[str, bytes]) -> pb.Step:
    """A step of a message; bodies of images go to `bodies`.

    Raises:
        DataError: the message breaks the format.
    """
    role = message.need("role")
    name = role.text()
    if name not in ROLES:
        role.fail(f"is {name!r}", f"use one of {', '.join(ROLES)}")
    step = pb.Step(index=index, role=ROLES[name], name=message.text_of("name"))
    step.tool_call_id = message.text_of("tool_call_id")
    extra: dict[str, Any] = message.others(_KNOWN)
    if name != role_name(step.role):
        extra["role"] = name
    _reasoning(message, step, extra)
    external = read_content(message, step, extra, bodies)
    for call in message.items_of("tool_calls"):
        step.tool_calls.append(_call_of(call))
    kept = {"openai": extra, "external_parts": external}
    if any(kept.values()):
        step.extra_json = compact({key: value for key, value in kept.items() if value})
    return step


def role_name(role: int) -> str:
    """OpenAI's name of a role."""
    return _NAMES.get(role, "user")


def _reasoning(message: Node, step: pb.Step, extra: dict[str, Any]) -> None:
    found = [key for key in ("reasoning_content", "reasoning") if message.get(key)]
    for key in found[:1]:
        step.reasoning = message.need(key).text()
        if key == "reasoning":
            extra["reasoning_field"] = key
    for key in found[1:]:
        extra[key] = message.need(key).value


def read_content(message: Node, step: pb.Step, extra: dict[str, Any], bodies: dict[str, bytes]) -> dict[str, Any]:
    """Read `content` into the step's parts; returns the parts that stay outside, by position."""
    content = message.get("content")
    external: dict[str, Any] = {}
    if content is None:
        return external
    if isinstance(content.value, str):
        step.content.append(pb.Part(text=content.value))
        return external
    for position, part in enumerate(content.array()):
        made, fields = _part_of(part, bodies)
        if fields:
            extra.setdefault("part_fields", {})[str(position)] = fields
        if made is None:
            external[str(position)] = part.object()
        else:
            step.content.append(made)
    alone = len(step.content) == 1 and step.content[0].HasField("text") and "part_fields" not in extra
    if not external and (len(step.content) == 0 or alone):
        extra["content_parts"] = True
    return external


def _part_of(part: Node, bodies: dict[str, bytes]) -> tuple[pb.Part | None, dict[str, Any]]:
    """The part that the store has for a part, and what that does not hold; None: there is none."""
    kind = part.text_of("type", "text")
    if kind == "text":
        return pb.Part(text=part.need("text").text()), part.others(frozenset({"type", "text"}))
    if kind != "image_url":
        return None, {}
    source = part.need("image_url")
    url = source.text() if isinstance(source.value, str) else source.need("url").text()
    if not url.startswith("data:"):
        return None, {}
    fields = part.others(frozenset({"type", "image_url"}))
    if isinstance(source.value, str):
        fields["image_url"] = None
    elif more := source.others(frozenset({"url"})):
        fields["image_url"] = more
    return pb.Part(blob=add_data_url(url, part, bodies)), fields


def add_data_url(url: str, part: Node, bodies: dict[str, bytes]) -> pb.BlobReference:
    """The body in a `data:` address.

    Raises:
        DataError: it is not base64.
    """
    match = _DATA_URL.match(url)
    try:
        data = base64.b64decode(match[2], validate=False) if match else None
    except binascii.Error:
        data = None
    if match is None or data is None:
        raise DataError("is a data address that is not base64", where=part.where, fix="write data:image/png;base64,...")
    blob = blob_of(data, match[1])
    bodies[blob.sha256] = data
    return blob


def _call_of(call: Node) -> pb.ToolCall:
    function = call.need("function")
    arguments = function.get("arguments")
    raw = "" if arguments is None else arguments.value
    made = pb.ToolCall(call_id=call.text_of("id"), name=function.need("name").text())
    made.arguments = raw if isinstance(raw, str) else compact(raw)
    extra = call.others(frozenset({"id", "type", "function"})) | function.others(frozenset({"name", "arguments"}))
    if call.text_of("type", "function") != "function":
        extra["type"] = call.text_of("type")
    if not isinstance(raw, str):
        extra["arguments_object"] = True
    if extra:
        made.extra_json = compact(extra)
    return made


def message_of(step: pb.Step, bodies: Mapping[str, bytes], image: Image) -> dict[str, Any]:
    """The message of a step, with everything that `step_of` read."""
    kept = parse_object(step.extra_json)
    extra = dict(kept.get("openai", {}))
    role = extra.pop("role", role_name(step.role))
    parts = _parts(step, bodies, image, kept.get("external_parts", {}), extra.pop("part_fields", {}))
    content = parts if extra.pop("content_parts", False) else _plain(parts)
    reasoning_field = extra.pop("reasoning_field", "reasoning_content") if step.reasoning else ""
    return openai_message(step, role, content, reasoning_field=reasoning_field, call=call_of) | extra


def call_of(call: pb.ToolCall) -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    extra = parse_object(call.extra_json)
    arguments: Any = call.arguments
    if extra.pop("arguments_object", False):
        arguments = parse_json(call.arguments)
    made = openai_call(call) | {"type": extra.pop("type", "function")}
    made["function"]["arguments"] = arguments
    return made | extra


def parse_json(text: str) -> Any:
    """JSON of our own making."""
    return parse_object(f'{{"value":{text}}}')["value"]


def _parts(
    step: pb.Step, bodies: Mapping[str, bytes], image: Image, external: Mapping[str, Any], fields: Mapping[str, Any]
) -> list[dict[str, Any]]:
    parts = [_part(part, bodies, image) for part in step.content]
    for position in sorted(external, key=int):
        parts.insert(int(position), external[position])
    for position, more in fields.items():
        part = parts[int(position)]
        source = part.get("image_url")
        if "image_url" in more and isinstance(source, dict):
            nested = more["image_url"]
            more = {**more, "image_url": source["url"] if nested is None else {**source, **nested}}  # noqa: PLW2901
        parts[int(position)] = {**part, **more}
    return parts


def _plain(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]] | None:
    if not parts:
        return None
    if len(parts) == 1 and set(parts[0]) == {"type", "text"}:
        return str(parts[0]["text"])
    return parts


def _part(part: pb.Part, bodies: Mapping[str, bytes], image: Image) -> dict[str, Any]:
    if part.HasField("text"):
        return {"type": "text", "text": part.text}
    if part.blob.media_type == "text/plain":
        return {"type": "text", "text": body_of(part.blob, bodies).decode("utf-8", "replace")}
    return image(part.blob)


def inline_images(bodies: Mapping[str, bytes]) -> Image:
    """Images within the message, as `data:` addresses."""

    def part(blob: pb.BlobReference) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": data_url(blob, bodies)}}

    return part


def data_url(blob: pb.BlobReference, bodies: Mapping[str, bytes]) -> str:
    """A body as a `data:` address."""
    return f"data:{blob.media_type};base64,{base64.b64encode(body_of(blob, bodies)).decode()}"
