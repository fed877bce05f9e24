"""Writing ATIF 1.8. What the format has no place for goes into `extra.orchard`, so that it comes back whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from orchard.data.bodies import extension
from orchard.data.codecs.atif_read import OURS, VERSIONS, documents_of, read
from orchard.data.codecs.base import EVERYTHING, Codec, Container, Row
from orchard.data.nodes import Node, compact, parse_object, read_document, read_lines
from orchard.data.options import ExportOptions
from orchard.data.protos import to_plain
from orchard.data.record import Record, body_of
from orchard.data.report import Report
from orchard.data.timestamps import show_time
from orchard.trajectory.v1 import trajectory_pb2 as pb

_SOURCES: Final[Mapping[int, str]] = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "agent",
    pb.ROLE_TOOL: "system",
}
_IMAGES: Final = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
_AUDIO: Final = frozenset(
    {
        "audio/wav",
        "audio/mpeg",
        "audio/mp4",
        "audio/aac",
        "audio/ogg",
        "audio/flac",
        "audio/webm",
        "audio/aiff",
    }
)


def rows(record: Record, options: ExportOptions, report: Report) -> Iterator[Row]:
    """One document."""
    if not record.steps:
        report.left_out(record.id, "it has no steps, and ATIF needs one")
        return
    writer = _Writer(record, options, report)
    yield Row(writer.document(), record.id, writer.files)


class _Writer:
    def __init__(self, record: Record, options: ExportOptions, report: Report) -> None:
        self.record = record
        self.options = options
        self.report = report
        self.files: dict[str, bytes] = {}
        self.steps: list[dict[str, Any]] = []
        self.calls: set[str] = set()
        """Calls of the last step that have no result yet."""

    def document(self) -> dict[str, Any]:
        """The whole trajectory."""
        trajectory = self.record.trajectory
        kept = parse_object(trajectory.metadata_json).get("atif", {})
        agent = {"name": trajectory.harness or "unknown", "version": "unknown", **kept.get("agent", {})}
        if trajectory.model:
            agent["model_name"] = trajectory.model
        if trajectory.tools_json:
            agent["tool_definitions"] = json.loads(trajectory.tools_json)
        for step in self.record.steps:
            self._add(step)
        document: dict[str, Any] = {"schema_version": VERSIONS[-1], "trajectory_id": trajectory.trajectory_id}
        if session := kept.get("session_id") or trajectory.rollout_id:
            document["session_id"] = session
        document |= {"agent": agent, "steps": self.steps}
        document |= {key: kept[key] for key in ("notes", "continued_trajectory_ref") if key in kept}
        document["final_metrics"] = kept.get("final_metrics") or self._totals()
        document["extra"] = {**kept.get("extra", {}), OURS: self._description(trajectory)}
        return document

    def _description(self, trajectory: pb.Trajectory) -> dict[str, Any]:
        rest = pb.Trajectory()
        rest.CopyFrom(trajectory)
        rest.ClearField("trajectory_id")
        if rest.tools_json and compact(json.loads(rest.tools_json)) == rest.tools_json:
            rest.ClearField("tools_json")
        ours: dict[str, Any] = {"trajectory": to_plain(rest)}
        if self.record.values:
            ours["values"] = [to_plain(value) for value in self.record.values]
        return ours

    def _totals(self) -> dict[str, Any]:
        calls = [step.model_call for step in self.record.steps]
        return {
            "total_prompt_tokens": sum(call.prompt_tokens for call in calls),
            "total_completion_tokens": sum(call.completion_tokens for call in calls),
            "total_cached_tokens": sum(call.cached_tokens for call in calls),
            "total_cost_usd": sum(call.cost_usd for call in calls),
            "total_steps": len(self.steps),
        }

    # Steps.

    def _add(self, step: pb.Step) -> None:
        kept = parse_object(step.extra_json).get("atif", {})
        answers = step.role == pb.ROLE_TOOL and step.tool_call_id in self.calls
        observed = bool(kept.get("observation")) and step.role == pb.ROLE_USER and bool(self.steps)
        if answers or observed:
            observation = self.steps[-1].setdefault("observation", {"results": []})
            observation["results"].append(self._result(step, kept, answers=answers))
            self.calls.discard(step.tool_call_id)
            return
        self.calls = {call.call_id for call in step.tool_calls} if step.role == pb.ROLE_ASSISTANT else set()
        self.steps.append(self._message(step, kept))

    def _message(self, step: pb.Step, kept: dict[str, Any]) -> dict[str, Any]:
        agent = step.role == pb.ROLE_ASSISTANT
        made: dict[str, Any] = {"step_id": len(self.steps) + 1, "source": _SOURCES.get(step.role, "user")}
        if step.HasField("time"):
            made["timestamp"] = show_time(step.time)
        made["message"] = self._content(step)
        if agent:
            self._agent(step, made, kept)
        if step.copied_context:
            made["is_copied_context"] = True
        made |= {key: kept[key] for key in ("reasoning_effort", "llm_call_count") if key in kept and agent}
        made["extra"] = {**kept.get("extra", {}), OURS: self._residual(step, kept)}
        return made

    def _agent(self, step: pb.Step, made: dict[str, Any], kept: dict[str, Any]) -> None:
        call = step.model_call
        if call.model:
            made["model_name"] = call.model
        if step.tool_calls:
            made["tool_calls"] = [self._call(one) for one in step.tool_calls]
        if _without_model(kept):
            return
        if step.reasoning:
            made["reasoning_content"] = step.reasoning
        if metrics := self._metrics(call, kept):
            made["metrics"] = metrics

    def _metrics(self, call: pb.ModelCall, kept: dict[str, Any]) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd"):
            if getattr(call, name):
                metrics[name] = getattr(call, name)
        for name in ("prompt_token_ids", "completion_token_ids"):
            if len(getattr(call, name)):
                metrics[name] = list(getattr(call, name))
        if len(call.logprobs) and _finite(call):
            metrics["logprobs"] = list(call.logprobs)
        if "metrics_extra" in kept:
            metrics["extra"] = kept["metrics_extra"]
        return metrics

    def _call(self, call: pb.ToolCall) -> dict[str, Any]:
        extra = parse_object(call.extra_json)
        made: dict[str, Any] = {"tool_call_id": call.call_id, "function_name": call.name}
        ours: dict[str, Any] = {}
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = None
        made["arguments"] = arguments if isinstance(arguments, dict) else {}
        if compact(made["arguments"]) != call.arguments:
            ours["arguments"] = call.arguments
        if set(extra) - {"atif"}:
            ours["extra_json"] = call.extra_json
            made["extra"] = {OURS: ours}
        elif extra or ours:
            made["extra"] = {**extra.get("atif", {}), **({OURS: ours} if ours else {})}
        return made

    def _result(self, step: pb.Step, kept: dict[str, Any], *, answers: bool) -> dict[str, Any]:
        made: dict[str, Any] = {"source_call_id": step.tool_call_id} if answers else {}
        made["content"] = self._content(step)
        if "subagent_trajectory_ref" in kept:
            made["subagent_trajectory_ref"] = kept["subagent_trajectory_ref"]
        residual = self._residual(step, kept, result=True)
        made["extra"] = {**kept.get("extra", {}), OURS: residual}
        return made

    def _residual(self, step: pb.Step, kept: dict[str, Any], *, result: bool = False) -> dict[str, Any]:
        """What of a step has no place in ATIF."""
        rest = pb.Step()
        rest.CopyFrom(step)
        for name in ("index", "content"):
            rest.ClearField(name)
        if result and step.role == pb.ROLE_TOOL:
            rest.ClearField("tool_call_id")
        elif not result:
            rest.ClearField("time")
            rest.ClearField("copied_context")
        if step.role == pb.ROLE_ASSISTANT:
            rest.ClearField("tool_calls")
            if not _without_model(kept):
                rest.ClearField("reasoning")
                _rest_of_call(step, rest)
        return {"step": to_plain(rest)}

    def _content(self, step: pb.Step) -> str | list[dict[str, Any]]:
        parts = [part for part in map(self._part, step.content) if part is not None]
        external = parse_object(step.extra_json).get("external_parts", {})
        for position in sorted(external, key=int):
            if (part := self._external(external[position])) is not None:
                parts.insert(int(position), part)
        if not parts:
            return ""
        if len(parts) == 1 and parts[0]["type"] == "text" and parts[0]["text"] and not external:
            return str(parts[0]["text"])
        return parts

    def _part(self, part: pb.Part) -> dict[str, Any] | None:
        if part.HasField("text"):
            return {"type": "text", "text": part.text}
        blob, data = part.blob, body_of(part.blob, self.record.bodies)
        if blob.media_type == "text/plain":
            return {"type": "text", "text": data.decode("utf-8", "replace")}
        kind = "image" if blob.media_type in _IMAGES else "audio" if blob.media_type in _AUDIO else ""
        if not kind:
            self.report.lost("content", f"ATIF has no place for {blob.media_type}", self.record.id)
            return None
        path = f"{self.options.files}/{blob.sha256}{extension(blob.media_type)}"
        self.files[path] = data
        return {"type": kind, "source": {"media_type": blob.media_type, "path": path}}

    def _external(self, part: dict[str, Any]) -> dict[str, Any] | None:
        if "atif" in part:
            return dict(part["atif"])
        address = part.get("image_url", {}).get("url", "") if isinstance(part.get("image_url"), dict) else ""
        media = next((m for end, m in _ENDS.items() if address.split("?")[0].lower().endswith(end)), "")
        if not media:
            self.report.lost("content", f"ATIF has no place for a part of type {part.get('type')!r}", self.record.id)
            return None
        return {"type": "image", "source": {"media_type": media, "path": address}}


def _without_model(kept: Mapping[str, Any]) -> bool:
    """Whether no model was called for a step: ATIF then allows neither metrics nor reasoning."""
    return bool(kept.get("llm_call_count") == 0)


def _finite(call: pb.ModelCall) -> bool:
    """Whether JSON has numbers for all log-probabilities."""
    return all(map(math.isfinite, call.logprobs))


def _rest_of_call(step: pb.Step, rest: pb.Step) -> None:
    if not step.HasField("model_call"):
        return
    call = step.model_call
    rest.model_call.CopyFrom(
        pb.ModelCall(
            policy_version=call.policy_version,
            finish_reason=call.finish_reason,
            parameters_json=call.parameters_json,
            logprobs=() if _finite(call) else call.logprobs,
        )
    )


_ENDS: Final = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
}


def sniff(path: Path) -> bool:
    """Whether the document, its first line, or the first document of a folder says so."""
    if path.is_dir():
        path = documents_of(path)[0]
    first: Node | None = next(read_lines(path), None) if path.suffix == ".jsonl" else read_document(path)
    return first is not None and fits(first.value)


def fits(value: Any) -> bool:
    """Whether a document says so."""
    return isinstance(value, dict) and str(value.get("schema_version", "")).startswith("ATIF-")


CODEC: Final = Codec(
    name="atif",
    summary="Agent Trajectory Interchange Format: reads 1.0 to 1.8, writes 1.8.",
    carries=EVERYTHING,
    lossless=True,
    patterns=("*.json", "*.jsonl"),
    sniff=sniff,
    fits=fits,
    read=read,
    rows=rows,
    containers=(Container.FOLDER, Container.JSONL),
)
