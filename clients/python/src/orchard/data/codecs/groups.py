"""Rows made of groups: GRPO groups and preference pairs.

Sources: the paper and the released trainer for advantages and filters; TRL's documentation for preferences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

from orchard.data import schemas
from orchard.data.codecs.base import Carries, Codec, Container, Row
from orchard.data.errors import NoExampleError
from orchard.data.options import RECIPES, ExportOptions
from orchard.data.record import Record
from orchard.data.report import Report
from orchard.data.training.conversations import Conversation, conversations
from orchard.data.training.examples import described, plain_messages
from orchard.data.training.groups import Group, Judged, judge
from orchard.data.training.tokens import token_sequences
from orchard.rewards.scores import Abstained, Scored


def grpo_rows(group: Group, options: ExportOptions, report: Report) -> Iterator[Row]:
    """One row for a group that dynamic sampling keeps, with all its members; what does not count is masked."""
    judged = judge(group, options)
    if judged.reason:
        report.left_out(group.key, judged.reason)
        return
    members = [_member(member, position, judged) for position, member in enumerate(group.members)]
    value: dict[str, Any] = {
        "group": group.key,
        "mean": judged.advantages.mean,
        "std": judged.advantages.std,
        "recipe": {"name": options.recipe, **RECIPES[options.recipe]},
        "members": members,
    }
    yield Row(value, group.key)


def _member(record: Record, position: int, judged: Judged) -> dict[str, Any]:
    score = judged.scores[position]
    trainable = judged.advantages.trainable[position]
    state = "scored" if isinstance(score, Scored) else "abstained" if isinstance(score, Abstained) else "excluded"
    rows = []
    for conversation in conversations(record):
        messages, images = plain_messages(record, conversation.path)
        loss = [int(one and trainable) for one in conversation.loss]
        rows.append(
            {"messages": messages, "images": images, "loss_mask": loss} | _tokens(record, conversation, trainable)
        )
    return {
        "attempt": record.trajectory.attempt,
        "state": state,
        "reason": "" if isinstance(score, Scored) else score.reason,
        "reward": judged.value(position),
        "advantage": judged.advantages.values[position],
        "mask": int(trainable),
        "conversations": rows,
    } | described(record)


def _tokens(record: Record, conversation: Conversation, trainable: bool) -> dict[str, Any]:
    try:
        found = token_sequences(record, conversation)
    except NoExampleError:
        return {"sequences": []}
    return {
        "sequences": [
            {
                "input_ids": list(one.ids),
                "loss_mask": [int(mask and trainable) for mask in one.mask],
                "logprobs": None if one.logprobs is None else list(one.logprobs),
            }
            for one in found
        ]
    }


def preference_rows(group: Group, options: ExportOptions, report: Report) -> Iterator[Row]:
    """Pairs of a success and a failure: the first of each, the second of each, while there are both.

    What both begin with is the prompt; whether an attempt is a success goes by its outcome.
    """
    judged = judge(group, options)
    scored = [position for position, score in enumerate(judged.scores) if isinstance(score, Scored)]
    good = [position for position in scored if group.members[position].resolved]
    bad = [position for position in scored if not group.members[position].resolved]
    if not good or not bad:
        report.left_out(group.key, "it has no success, or no failure, to pair")
        return
    for chosen, rejected in zip(good, bad, strict=False):
        row = _pair(group, chosen, rejected, judged, report)
        if row is not None:
            yield row


def _pair(group: Group, chosen: int, rejected: int, judged: Judged, report: Report) -> Row | None:
    one, other = group.members[chosen], group.members[rejected]
    name = f"{one.id}.{other.id}"
    left, right = _last_messages(one), _last_messages(other)
    if left is None or right is None:
        report.left_out(name, "it has images, or no messages; pairs hold text")
        return None
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
    while shared and left[shared - 1]["role"] == "assistant":
        shared -= 1
    if left == right or not shared or shared in {len(left), len(right)}:
        report.left_out(name, "the two do not begin alike, or do not differ")
        return None
    value = {
        "prompt": left[:shared],
        "chosen": left[shared:],
        "rejected": right[shared:],
        "tools": one.trajectory.tools_json or None,
        "score_chosen": judged.value(chosen),
        "score_rejected": judged.value(rejected),
        "chosen_id": one.id,
        "rejected_id": other.id,
        "group": group.key,
    }
    return Row(value, name)


def _last_messages(record: Record) -> list[dict[str, Any]] | None:
    """Messages of the last conversation, up to the last that the model wrote; tool calls' ids do not tell two apart."""
    found = conversations(record)
    if not found:
        return None
    messages, images = plain_messages(record, found[-1].path)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return None if images or not messages else messages


GRPO: Final = Codec(
    name="grpo",
    summary="GRPO groups: rewards, advantages, masks and messages of all attempts at a prompt.",
    carries=frozenset(
        {
            Carries.TOOLS,
            Carries.TOOL_CALLS,
            Carries.REASONING,
            Carries.IMAGES,
            Carries.TOKENS,
            Carries.LOGPROBS,
            Carries.REWARDS,
            Carries.LOSS,
            Carries.ADVANTAGES,
        }
    ),
    group_rows=grpo_rows,
    containers=(Container.JSONL,),
)
PREFERENCE: Final = Codec(
    name="preference",
    summary="TRL preference pairs: a success and a failure at the same prompt.",
    carries=frozenset({Carries.TOOLS, Carries.TOOL_CALLS, Carries.REASONING, Carries.REWARDS}),
    group_rows=preference_rows,
    containers=(Container.JSONL, Container.PARQUET),
    schema=schemas.preference,
)
