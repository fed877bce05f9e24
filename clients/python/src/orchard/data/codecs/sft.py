"""Supervised fine-tuning: whole conversations, single turns, rise segments; this project's rows and TRL's.

Sources: the paper (loss masks), TRL's documentation of its dataset formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from orchard.data import schemas
from orchard.data.codecs.base import Carries, Codec, Container, Row
from orchard.data.errors import NoExampleError
from orchard.data.options import ExportOptions
from orchard.data.record import Record
from orchard.data.report import Report
from orchard.data.training.conversations import Conversation
from orchard.data.training.examples import (
    described,
    fitted,
    note_external,
    plain_messages,
    sequences_of,
    trained,
)
from orchard.data.training.tokens import token_sequences

IGNORED: Final = -100
"""The label of a token without loss."""
_BOTH: Final = (Container.JSONL, Container.PARQUET)
_CARRIES: Final = frozenset(
    {
        Carries.TOOLS,
        Carries.TOOL_CALLS,
        Carries.REASONING,
        Carries.IMAGES,
        Carries.TOKENS,
        Carries.REWARDS,
        Carries.LOSS,
    }
)


def rows(record: Record, options: ExportOptions, report: Report) -> Iterator[Row]:
    """A row for each conversation."""
    found = trained(record, options)
    for conversation in found:
        yield from _row(record, conversation, options, report, _name(record, conversation, len(found)))


def rise_rows(record: Record, options: ExportOptions, report: Report) -> Iterator[Row]:
    """A row for each conversation: successes whole, failures up to their last rise, with loss on the rises."""
    yield from rows(record, replace(options, loss="rises"), report)


def turn_rows(record: Record, options: ExportOptions, report: Report) -> Iterator[Row]:
    """A row for each response: what led to it, and loss on it alone."""
    for turn in _turns(record, options):
        yield from _row(record, turn, options, report, f"{record.id}.t{turn.path[-1]}")


def _turns(record: Record, options: ExportOptions) -> Iterator[Conversation]:
    for conversation in trained(record, options):
        for position, loss in enumerate(conversation.loss):
            if loss:
                path = conversation.path[: position + 1]
                yield Conversation(conversation.number, path, (False,) * position + (True,))


def _name(record: Record, conversation: Conversation, count: int) -> str:
    return record.id if count == 1 else f"{record.id}.b{conversation.number}"


def _row(
    record: Record, conversation: Conversation, options: ExportOptions, report: Report, name: str
) -> Iterator[Row]:
    fit = fitted(record, conversation, options, report)
    if fit is None:
        return
    messages, images = plain_messages(record, fit.path)
    note_external(record, fit.path, report)
    value: dict[str, Any] = {
        "id": name,
        "messages": messages,
        "loss_mask": [int(loss) for loss in fit.loss],
        "images": images,
        "sequences": _sequences(record, fit, whole=fit == conversation),
    }
    yield Row(value | described(record), name)


def _sequences(record: Record, conversation: Conversation, *, whole: bool) -> list[dict[str, Any]]:
    """Token sequences with their masks; none where tokens are not known or messages were cut off."""
    if not whole:
        return []
    try:
        found = token_sequences(record, conversation)
    except NoExampleError:
        return []
    return [{"input_ids": list(one.ids), "loss_mask": list(one.mask)} for one in found]


def trl_rows(record: Record, options: ExportOptions, report: Report) -> Iterator[Row]:
    """TRL's prompt and completion: a row for each response that has loss, which TRL puts on the completion alone."""
    for turn in _turns(record, options):
        fit = fitted(record, turn, options, report)
        if fit is None:
            continue
        messages, images = plain_messages(record, fit.path)
        if images:
            report.left_out(record.id, "it has images; the rows of trl hold text")
            return
        if len(messages) < 2:
            report.left_out(record.id, "a response has nothing before it")
            continue
        value = {"prompt": messages[:-1], "completion": messages[-1:], "tools": record.trajectory.tools_json or None}
        yield Row(value, f"{record.id}.t{turn.path[-1]}")


def trl_token_rows(record: Record, options: ExportOptions, report: Report) -> Iterator[Row]:
    """TRL's tokenized rows: the very tokens that the model read and wrote, labels on those with loss."""
    for conversation in trained(record, options):
        for one in sequences_of(record, conversation, options, report):
            labels = [token if mask else IGNORED for token, mask in zip(one.ids, one.mask, strict=True)]
            yield Row({"input_ids": list(one.ids), "labels": labels}, record.id)


SFT: Final = Codec(
    name="sft",
    summary="Supervised fine-tuning: a conversation a row, loss by message, by token where tokens are known.",
    carries=_CARRIES,
    rows=rows,
    containers=_BOTH,
    schema=schemas.sft,
)
TURNS: Final = Codec(
    name="sft-turns",
    summary="Supervised fine-tuning: a response a row, with what led to it; loss on the response.",
    carries=_CARRIES,
    rows=turn_rows,
    containers=_BOTH,
    schema=schemas.sft,
)
RISES: Final = Codec(
    name="sft-rises",
    summary="Supervised fine-tuning: successes whole, of failures what raised the value.",
    carries=_CARRIES | {Carries.VALUES},
    rows=rise_rows,
    containers=_BOTH,
    schema=schemas.sft,
)
TRL: Final = Codec(
    name="trl",
    summary="TRL SFTTrainer: prompt and completion, a response a row.",
    carries=frozenset({Carries.TOOLS, Carries.TOOL_CALLS, Carries.REASONING, Carries.LOSS}),
    rows=trl_rows,
    containers=_BOTH,
    schema=schemas.prompt_completion,
)
TRL_TOKENS: Final = Codec(
    name="trl-tokens",
    summary="TRL SFTTrainer: input_ids and labels, of trajectories whose tokens are known.",
    carries=frozenset({Carries.TOKENS, Carries.LOSS}),
    rows=trl_token_rows,
    containers=_BOTH,
    schema=schemas.tokens,
)
