"""Reading ATIF, the Agent Trajectory Interchange Format, versions 1.0 to 1.8 (Harbor, RFC 0001).

A step becomes a message; each result of its observation becomes the message of a tool. A result that answers no call is
what the harness said in the place of a user. Sub-agents become trajectories of their own, of the same rollout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from orchard.data.bodies import MEDIA_TYPES
from orchard.data.errors import DataError, Where
from orchard.data.nodes import Node, compact, read_document, read_lines
from orchard.data.protos import from_plain, trajectory_of
from orchard.data.record import Record, blob_of, valid_id
from orchard.data.report import Report
from orchard.data.timestamps import parse_time
from orchard.trajectory.v1 import trajectory_pb2 as pb

VERSIONS: Final = tuple(f"ATIF-v1.{minor}" for minor in range(9))
OURS: Final = "orchard"
"""Key in an `extra` under which what ATIF has no place for is kept."""
ROLES: Final = {"system": pb.ROLE_SYSTEM, "user": pb.ROLE_USER, "agent": pb.ROLE_ASSISTANT}
_ROOT: Final = frozenset(
    {
        "schema_version",
        "session_id",
        "trajectory_id",
        "agent",
        "steps",
        "notes",
        "final_metrics",
        "continued_trajectory_ref",
        "extra",
        "subagent_trajectories",
    }
)
_STEP: Final = frozenset(
    {
        "step_id",
        "timestamp",
        "source",
        "model_name",
        "reasoning_effort",
        "message",
        "reasoning_content",
        "tool_calls",
        "observation",
        "metrics",
        "is_copied_context",
        "llm_call_count",
        "extra",
    }
)
_METRICS: Final = frozenset(
    {
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "cost_usd",
        "prompt_token_ids",
        "completion_token_ids",
        "logprobs",
        "extra",
    }
)


def read(path: Path, report: Report) -> Iterator[Record]:
    """Trajectories of a document, of each line, or of each document of a folder, in the order of their names."""
    for file in documents_of(path) if path.is_dir() else [path]:
        documents = read_lines(file) if file.suffix == ".jsonl" else iter([read_document(file)])
        for document in documents:
            yield from _Document(document, file, report).records(rollout="")


def documents_of(folder: Path) -> list[Path]:
    """The documents of a folder, as an export into one writes them.

    Raises:
        DataError: there is none.
    """
    found = sorted(folder.glob("*.json"))
    if not found:
        raise DataError("is a folder without *.json files", where=Where(str(folder)), fix="name one that has them")
    return found


class _Document:
    """One trajectory document."""

    def __init__(self, node: Node, path: Path, report: Report) -> None:
        self.node = node
        self.folder = path.parent
        self.stem = path.stem
        self.report = report
        self.bodies: dict[str, bytes] = {}
        self.steps: list[pb.Step] = []

    def records(self, rollout: str) -> Iterator[Record]:
        """The trajectory, then its sub-agents."""
        version = self.node.need("schema_version")
        if version.text() not in VERSIONS:
            version.fail(f"is {version.text()!r}", f"versions {VERSIONS[0]} to {VERSIONS[-1]} can be read")
        for position, step in enumerate(self.node.need("steps").array()):
            number = step.need("step_id")
            if number.integer() != position + 1:
                number.fail(f"is {number.value} where {position + 1} is due", "number the steps from 1 without holes")
            self._step(step)
        trajectory = self._describe(rollout)
        values = self._values()
        self.report.records += 1
        yield Record(trajectory, self.steps, values, self.bodies, self.node.where.whole)
        for child in self.node.items_of("subagent_trajectories"):
            document = _Document(child, self.folder / f"{self.stem}.json", self.report)
            document.stem = f"{self.stem}-{child.text_of('trajectory_id')}"
            yield from document.records(trajectory.rollout_id or trajectory.trajectory_id)

    # The description.

    def _describe(self, rollout: str) -> pb.Trajectory:
        node, agent = self.node, self.node.need("agent")
        ours = self._ours(node)
        trajectory = pb.Trajectory()
        if ours is not None and (described := ours.get("trajectory")):
            trajectory = trajectory_of(described)
        trajectory.trajectory_id = valid_id(node.text_of("trajectory_id"), node.text_of("session_id"), self.stem)
        session = node.text_of("session_id")
        if not ours:
            trajectory.status = pb.TRAJECTORY_STATUS_COMPLETED
            trajectory.rollout_id = session[:128] or rollout
            trajectory.harness = agent.need("name").text()[:128]
            trajectory.model = agent.text_of("model_name")[:256]
        if not trajectory.tools_json and (tools := agent.get("tool_definitions")):
            trajectory.tools_json = compact([tool.object() for tool in tools.array()])
        if not ours:
            self._keep(trajectory, self._beyond(agent))
        return trajectory

    def _beyond(self, agent: Node) -> dict[str, Any]:
        node = self.node
        kept: dict[str, Any] = {
            key: node.object()[key]
            for key in ("session_id", "notes", "final_metrics", "continued_trajectory_ref")
            if node.get(key) is not None
        }
        kept["schema_version"] = node.need("schema_version").text()
        kept["agent"] = agent.others(frozenset({"tool_definitions"}))
        if (extra := node.get("extra")) is not None:
            kept["extra"] = extra.object()
        for key in node.others(_ROOT):
            self.report.lost(key, "the format has no such field", node.where.at(key))
        return kept

    def _keep(self, trajectory: pb.Trajectory, kept: dict[str, Any]) -> None:
        for key in ("extra", "notes", "final_metrics", "agent", ""):
            trajectory.metadata_json = compact({"atif": kept})
            if len(trajectory.metadata_json.encode()) <= 64 << 10:
                return
            if kept.pop(key, None) is not None:
                self.report.lost(key, "metadata may hold 64 KiB", self.node.where.at(key))
        trajectory.metadata_json = ""

    def _values(self) -> list[pb.StepValue]:
        extra = self.node.get("extra")
        ours = extra.get(OURS) if extra else None
        return [from_plain(one, pb.StepValue()) for one in ours.items_of("values")] if ours else []

    # Steps.

    def _step(self, node: Node) -> None:
        source = node.need("source")
        if source.text() not in ROLES:
            source.fail(f"is {source.text()!r}", "use system, user or agent")
        step = self._add(ROLES[source.text()])
        self._message_of(node, step)
        self._restore(step, self._ours(node))
        calls = {call.text_of("tool_call_id") for call in node.items_of("tool_calls")}
        observation = node.get("observation")
        for result in observation.items_of("results") if observation else ():
            self._result(result, node, calls)

    def _add(self, role: pb.Role.ValueType) -> pb.Step:
        step = pb.Step(index=len(self.steps), role=role)
        self.steps.append(step)
        return step

    def _message_of(self, node: Node, step: pb.Step) -> None:
        extra: dict[str, Any] = {}
        external = self._content(node.get("message"), step)
        if (stamp := node.get("timestamp")) is not None:
            self._time(stamp, step)
        if node.text_of("source") == "agent":
            step.reasoning = node.text_of("reasoning_content")
            for call in node.items_of("tool_calls"):
                step.tool_calls.append(self._call(call))
            if node.get("metrics") is not None or node.get("model_name") is not None:
                self._metrics(node, step, extra)
        copied = node.get("is_copied_context")
        step.copied_context = copied is not None and copied.boolean()
        for key in ("reasoning_effort", "llm_call_count"):
            if node.get(key) is not None:
                extra[key] = node.need(key).value
        own = node.get("extra")
        if own is not None and (rest := own.others(frozenset({OURS}))):
            extra["extra"] = rest
        for key in node.others(_STEP):
            self.report.lost(f"steps.{key}", "the format has no such field", node.where.at(key))
        self._extra(step, extra, external, node)

    def _extra(self, step: pb.Step, extra: dict[str, Any], external: dict[str, Any], node: Node) -> None:
        kept = {"atif": extra, "external_parts": external}
        text = compact({key: value for key, value in kept.items() if value})
        if len(text.encode()) > 256 << 10:
            self.report.lost("steps.extra", "it is larger than 256 KiB", node.where)
        elif text != "{}":
            step.extra_json = text

    def _call(self, node: Node) -> pb.ToolCall:
        arguments = node.get("arguments")
        call = pb.ToolCall(call_id=node.need("tool_call_id").text(), name=node.need("function_name").text())
        call.arguments = compact(arguments.object() if arguments else {})
        extra = node.get("extra")
        if extra is not None:
            ours = self._ours(node)
            if ours:
                call.arguments = ours.text_of("arguments", call.arguments)
                call.extra_json = ours.text_of("extra_json")
            if rest := extra.others(frozenset({OURS})):
                call.extra_json = compact({"atif": rest})
        return call

    def _metrics(self, node: Node, step: pb.Step, extra: dict[str, Any]) -> None:
        call = step.model_call
        call.model = node.text_of("model_name")
        metrics = node.get("metrics")
        if metrics is None:
            return
        call.prompt_tokens = metrics.integer_of("prompt_tokens")
        call.completion_tokens = metrics.integer_of("completion_tokens")
        call.cached_tokens = metrics.integer_of("cached_tokens")
        call.cost_usd = metrics.number_of("cost_usd")
        for key in ("prompt_token_ids", "completion_token_ids"):
            ids = [token.integer() for token in metrics.items_of(key)]
            if any(not 0 <= token < 1 << 32 for token in ids):
                metrics.need(key).fail("has a token id that is none", "ids are whole numbers from 0")
            getattr(call, key).extend(ids)
        call.logprobs.extend(value.number() for value in metrics.items_of("logprobs"))
        if (own := metrics.get("extra")) is not None:
            extra["metrics_extra"] = own.object()
        for key in metrics.others(_METRICS):
            self.report.lost(f"steps.metrics.{key}", "the format has no such field", metrics.where.at(key))

    def _result(self, node: Node, parent: Node, calls: set[str]) -> None:
        answered = node.text_of("source_call_id")
        ours = self._ours(node)
        if answered and answered not in calls:
            node.need("source_call_id").fail(f"is {answered!r}, which no call of this step has", "name a call of it")
        # What answers no call came in the place of a user: a harness without tool calls.
        step = self._add(pb.ROLE_TOOL if answered else pb.ROLE_USER)
        step.tool_call_id = answered
        external = self._content(node.get("content"), step)
        extra: dict[str, Any] = {} if ours else {"observation": True}
        if (reference := node.get("subagent_trajectory_ref")) is not None:
            extra["subagent_trajectory_ref"] = reference.value
        own = node.get("extra")
        if own is not None and (rest := own.others(frozenset({OURS}))):
            extra["extra"] = rest
        copied = parent.get("is_copied_context")
        step.copied_context = ours is None and copied is not None and copied.boolean()
        self._extra(step, extra, external, node)
        self._restore(step, ours)

    # Pieces.

    def _content(self, node: Node | None, step: pb.Step) -> dict[str, Any]:
        external: dict[str, Any] = {}
        if node is None or node.value == "":
            return external
        if isinstance(node.value, str):
            step.content.append(pb.Part(text=node.value))
            return external
        for position, part in enumerate(node.array()):
            if part.text_of("type", "text") == "text":
                step.content.append(pb.Part(text=part.need("text").text()))
                continue
            source = part.need("source")
            address = source.need("path").text()
            if "://" in address:
                external[str(position)] = {
                    "type": "image_url",
                    "image_url": {"url": address},
                    "atif": part.object(),
                }
                self.report.lost("image", "it lies at an address and is not fetched: the address is kept", part.where)
            else:
                step.content.append(pb.Part(blob=self._file(address, source)))
        return external

    def _file(self, address: str, source: Node) -> pb.BlobReference:
        path = (self.folder / address).resolve()
        if not path.is_relative_to(self.folder.resolve()):
            # A document from elsewhere must not take up other files of this machine.
            source.need("path").fail(
                f"is {address!r}, outside of the document's folder", "keep images beside the document"
            )
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"names {address!r}, which cannot be read: {error.strerror}",
                where=source.where.at("path"),
                fix="keep the images beside the file, as they were written",
            ) from None
        media = source.text_of("media_type") or MEDIA_TYPES.get(Path(address).suffix, "application/octet-stream")
        blob = blob_of(data, media)
        self.bodies[blob.sha256] = data
        return blob

    def _time(self, node: Node, step: pb.Step) -> None:
        try:
            moment, zoned = parse_time(node.text())
        except ValueError:
            node.fail(f"is {node.text()!r}, which is no moment", "write ISO 8601, like 2026-01-31T12:00:00Z")
        step.time.CopyFrom(moment)
        if not zoned:
            self.report.lost("timestamp", "it names no time zone: taken as UTC", node.where)

    def _ours(self, node: Node) -> Node | None:
        extra = node.get("extra")
        return extra.get(OURS) if extra is not None else None

    def _restore(self, step: pb.Step, ours: Node | None) -> None:
        """Fields of a step that ATIF has no place for, of a file that we wrote."""
        if ours is None or (fields := ours.get("step")) is None:
            return
        index = step.index
        step.MergeFrom(from_plain(fields, pb.Step()))
        step.index = index
