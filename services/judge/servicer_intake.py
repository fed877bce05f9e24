"""A judgement from the wire: its parts as they come in, each checked, into one request."""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any, Final

from orchard.judge.v1 import judge_pb2, judge_service_pb2
from orchard.trajectory.v1 import trajectory_pb2

from services.common.errors import InvalidArgumentError, ResourceExhaustedError
from services.common.validation import Fields
from services.judge.backends.limits import Amount
from services.judge.model import CATEGORICAL, Aggregation, Image, Kind, Role, Step, Task, ToolCall
from services.judge.requests import Request

_KIB: Final = 1024
_MOST_JUDGES: Final = 8
_MOST_NAME_BYTES: Final = 256
_MOST_STEPS: Final = 10_000
_MOST_TEXT_BYTES: Final = 32 << 20
_MOST_IMAGE_BYTES: Final = 8 << 20
_MOST_IMAGES_BYTES: Final = 32 << 20
_MOST_STATUSES: Final = 10_000
_MEDIA_TYPES: Final = ("image/png", "image/jpeg", "image/webp", "image/gif")
_ROLES: Final = (None, *Role)
_SHA256: Final = re.compile(r"[0-9a-f]{64}\Z")
_TEXTS: Final = {
    "instruction": 64 * _KIB,
    "patch": 256 * _KIB,
    "gold_patch": 256 * _KIB,
    "tests": 256 * _KIB,
    "final_response": 64 * _KIB,
}


def budget_of(fields: Fields, name: str, budget: judge_pb2.Budget) -> Amount:
    """A checked budget."""
    fields.check(budget.tokens >= 0, f"{name}.tokens", "must not be negative")
    money = math.isfinite(budget.cost_usd) and budget.cost_usd >= 0
    fields.check(money, f"{name}.cost_usd", "must be a number, not negative")
    return Amount(budget.tokens, budget.cost_usd)


class Intake:
    """One judgement that comes in pieces."""

    def __init__(self, judgement: judge_pb2.Judgement) -> None:
        """Raises InvalidArgumentError unless every field keeps its rule."""
        _check(judgement)
        self._judgement = judgement
        self._kind = Kind(judgement.kind)
        self._attempts: list[list[Step]] = [[] for _ in range(2 if self._kind is Kind.PAIRWISE else 1)]
        self._images: dict[str, bytearray] = {}
        self._media_types: dict[str, str] = {}
        self._tools = [ToolNames() for _ in self._attempts]
        self._text_bytes = 0
        self._image_bytes = 0

    def steps(self, message: judge_service_pb2.AttemptSteps) -> None:
        """The next steps."""
        if not 0 <= message.attempt < len(self._attempts):
            raise InvalidArgumentError.of("steps.attempt", f"must be below {len(self._attempts)}")
        attempt, tools = self._attempts[message.attempt], self._tools[message.attempt]
        for index, given in enumerate(message.steps, len(attempt)):
            if given.index != index:
                raise InvalidArgumentError.of(f"steps[{given.index}].index", f"must be {index}: without holes")
            attempt.append(_step(index, given, tools))
        self._text_bytes += message.ByteSize()
        if len(attempt) > _MOST_STEPS or self._text_bytes > _MOST_TEXT_BYTES:
            raise ResourceExhaustedError(
                f"a judgement has at most {_MOST_STEPS:,} steps an attempt and 32 MiB of them; send fewer",
                reason="TRAJECTORY_TOO_LARGE",
            )

    def image(self, message: judge_service_pb2.ImageChunk) -> None:
        """The next piece of an image."""
        fields = Fields()
        fields.check(_SHA256.match(message.sha256) is not None, "image.sha256", "must be 64 of 0-9, a-f")
        if message.sha256 not in self._images:
            known = message.media_type in _MEDIA_TYPES
            fields.check(known, "image.media_type", f"must be one of {', '.join(_MEDIA_TYPES)}")
        fields.done()
        image = self._images.setdefault(message.sha256, bytearray())
        self._media_types.setdefault(message.sha256, message.media_type)
        image += message.data
        self._image_bytes += len(message.data)
        if len(image) > _MOST_IMAGE_BYTES or self._image_bytes > _MOST_IMAGES_BYTES:
            raise InvalidArgumentError.of("image.data", "an image has at most 8 MiB, all together have 32 MiB")

    def piece(self, part: str | None, message: Any) -> None:
        """What a message that is not the first has of it."""
        if part == "steps":
            self.steps(message.steps)
        elif part == "image":
            self.image(message.image)
        else:
            raise InvalidArgumentError.of("part", "must be steps or an image after the first message")

    def request(self) -> Request:
        """The whole, once nothing more comes.

        Raises:
            InvalidArgumentError: an attempt has no step, or an image is not what it says.
        """
        for number, attempt in enumerate(self._attempts):
            if not attempt:
                raise InvalidArgumentError.of("steps", f"attempt {number} has no step")
        for sha256, data in self._images.items():
            if hashlib.sha256(data).hexdigest() != sha256:
                raise InvalidArgumentError.of("image.sha256", f"the data of image {sha256} has another hash")
        given, parameters, fields = self._judgement, self._judgement.parameters, Fields()
        budget = budget_of(fields, "judgement.budget", given.budget)
        fields.done()
        return Request(
            kind=self._kind,
            task=Task(
                tool_statuses=tuple((status.tool, status.status) for status in given.tool_statuses),
                resolved=given.resolved if given.HasField("resolved") else None,
                **{name: getattr(given, name) for name in _TEXTS},
            ),
            attempts=tuple(map(tuple, self._attempts)),
            images={
                sha256: Image(sha256, self._media_types[sha256], bytes(data)) for sha256, data in self._images.items()
            },
            judges=tuple(given.judges),
            rubric_name=given.rubric.name,
            rubric_version=given.rubric.version,
            votes=parameters.votes,
            aggregation=Aggregation(parameters.aggregation) if parameters.aggregation else None,
            quorum=parameters.quorum,
            temperature=parameters.temperature if parameters.HasField("temperature") else None,
            max_output_tokens=parameters.max_output_tokens,
            fresh=given.fresh,
            budget=budget,
        )


def whole_of(given: judge_service_pb2.JudgeWholeRequest | judge_service_pb2.WholeItem) -> Intake:
    """The judgement of a message that has all of it."""
    intake = Intake(given.judgement)
    for steps in given.steps:
        intake.steps(steps)
    for image in given.images:
        intake.image(image)
    return intake


class ToolNames:
    """Which tool answers in a step: many harnesses name the call that it was, and not the tool."""

    def __init__(self) -> None:
        self._by_call: dict[str, str] = {}
        self._open: list[str] = []

    def name_of(self, role: int, step: trajectory_pb2.Step) -> str:
        """The name of a step: its own, else that of the call that it answers, else of the calls in their order.

        The next call comes with the next step of the assistant; an answer that belongs to no call is nobody's, and so
        that two of them are not taken for the same tool, each has a name of its own.
        """
        if role == trajectory_pb2.ROLE_ASSISTANT:
            if calls := step.tool_calls:
                self._by_call |= {call.call_id: call.name for call in calls if call.call_id}
            self._open = [call.name for call in calls]
            return step.name
        if role != trajectory_pb2.ROLE_TOOL:
            return step.name
        name = step.name or self._by_call.get(step.tool_call_id, "")
        if not name and self._open:
            name = self._open[0]
        if name in self._open:
            self._open.remove(name)
        return name or f"unknown-{step.index}"


def _check(given: judge_pb2.Judgement) -> None:
    fields = Fields()
    known = fields.check(int(given.kind) in list(Kind), "judgement.kind", "must be one of JudgementKind's")
    fields.check(len(given.judges) <= _MOST_JUDGES, "judgement.judges", "must be at most 8")
    fields.check(len(set(given.judges)) == len(given.judges), "judgement.judges", "must each be there once")
    for position, judge in enumerate(given.judges[:_MOST_JUDGES]):
        fields.text(f"judgement.judges[{position}]", judge, maximum=_MOST_NAME_BYTES)
    with_rubric = given.kind == judge_pb2.JUDGEMENT_KIND_RUBRIC
    fields.check(bool(given.rubric.name) == with_rubric, "judgement.rubric", "is required with RUBRIC and only then")
    fields.text("judgement.rubric.name", given.rubric.name, maximum=_MOST_NAME_BYTES)
    fields.check(given.rubric.version >= 0, "judgement.rubric.version", "must not be negative")
    for name, most in _TEXTS.items():
        value = getattr(given, name)
        fields.text(f"judgement.{name}", value, maximum=most, required=name == "instruction")
    if given.kind == judge_pb2.JUDGEMENT_KIND_PAIRWISE:
        for name in ("patch", "final_response"):
            fields.check(not getattr(given, name), f"judgement.{name}", "is of one attempt; leave it out with PAIRWISE")
    fields.check(len(given.tool_statuses) <= _MOST_STATUSES, "judgement.tool_statuses", "must be at most 10,000")
    for position, status in enumerate(given.tool_statuses):
        where = f"judgement.tool_statuses[{position}]"
        fields.text(f"{where}.tool", status.tool, maximum=256)
        fields.between(f"{where}.status", status.status, 100, 599, zero=False)
    _check_parameters(fields, given.parameters, known=known, kind=given.kind)
    fields.done()


def _check_parameters(fields: Fields, given: judge_pb2.JudgementParameters, *, known: bool, kind: int) -> None:
    where = "judgement.parameters"
    fields.between(f"{where}.votes", given.votes, 1, 16)
    fields.check(given.quorum >= 0, f"{where}.quorum", "must not be negative")
    fields.between(f"{where}.max_output_tokens", given.max_output_tokens, 16, 131_072)
    if given.HasField("temperature"):
        fields.check(0 <= given.temperature <= 2, f"{where}.temperature", "must be from 0 to 2")
    if fields.check(
        int(given.aggregation) in {0, *Aggregation}, f"{where}.aggregation", "must be one of Aggregation's"
    ):
        majority = int(given.aggregation) == Aggregation.MAJORITY
        fits = not (majority and known and kind not in CATEGORICAL)
        fields.check(fits, f"{where}.aggregation", "MAJORITY is for verdicts and preferences; use MEDIAN for numbers")


def _step(index: int, given: trajectory_pb2.Step, tools: ToolNames) -> Step:
    # Each look at a message costs as much as ten lines of Python: once at each field, and at few.
    number = given.role
    role = _ROLES[number] if 0 <= number < len(_ROLES) else None
    if role is None:
        raise InvalidArgumentError.of(f"steps[{index}].role", "must be SYSTEM, USER, ASSISTANT or TOOL")
    texts, images = [], []
    for position, part in enumerate(given.content):
        if text := part.text:
            texts.append(text)
        elif (kind := part.WhichOneof("kind")) == "text":
            texts.append("")
        elif kind == "blob" and part.blob.media_type.startswith("image/"):
            images.append(part.blob.sha256)
        else:
            raise InvalidArgumentError.of(
                f"steps[{index}].content[{position}]",
                "must be a text or a reference to an image; send long texts inline",
            )
    calls, name = given.tool_calls, tools.name_of(number, given)
    return Step(
        index,
        role,
        "\n".join(texts),
        given.reasoning,
        tuple([ToolCall(call.name, call.arguments) for call in calls]) if calls else (),
        name,
        given.is_error,
        tuple(images),
        given.copied_context,
    )
