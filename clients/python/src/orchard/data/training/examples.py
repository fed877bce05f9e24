"""Examples: a conversation with loss on some of its messages, no longer than may be, as rows hold it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from orchard._client.trajectories.convert import openai_message
from orchard.data.counting import tokens_of, tokens_of_steps
from orchard.data.errors import NoExampleError
from orchard.data.messages import data_url, role_name
from orchard.data.nodes import parse_object
from orchard.data.options import ExportOptions
from orchard.data.record import Record, body_of
from orchard.data.report import Report
from orchard.data.training.conversations import Conversation, conversations, rises
from orchard.data.training.tokens import TokenSequence, token_sequences
from orchard.rewards.scores import Scored
from orchard.trajectory.v1 import trajectory_pb2 as pb

IMAGE: Final = "<image>"
"""Stands in a text for the next of the row's images."""


def trained(record: Record, options: ExportOptions) -> list[Conversation]:
    """The conversations of a trajectory that have loss.

    Raises:
        NoExampleError: there is none.
    """
    found = _trained(record, options.loss)
    kept = [conversation for conversation in found if any(conversation.loss)]
    if not kept:
        raise NoExampleError("the model wrote nothing in it")
    return kept


def _trained(record: Record, loss: str) -> list[Conversation]:
    if loss == "all":
        return conversations(record)
    refuse_unusable(record)
    if loss == "rises":
        return rises(record)
    if record.resolved is False:
        raise NoExampleError("it is unresolved: rise segments would train on what helped")
    return conversations(record)


def refuse_unusable(record: Record) -> None:
    """Raise NoExampleError for what says nothing, good or bad: open, aborted, excluded or not decided."""
    if record.trajectory.status == pb.TRAJECTORY_STATUS_OPEN:
        raise NoExampleError("it is still open")
    if record.trajectory.status == pb.TRAJECTORY_STATUS_ABORTED:
        raise NoExampleError("it was aborted, by no fault of the agent")
    if record.score is not None and not isinstance(record.score, Scored):
        raise NoExampleError("its outcome is excluded or was not decided")


def fitted(record: Record, conversation: Conversation, options: ExportOptions, report: Report) -> Conversation | None:
    """A conversation that is no longer than may be; None where it was left out."""
    most = options.max_tokens
    if most is None or tokens_of(record, conversation.path, options.counter) <= most:
        return conversation
    if options.truncate == "left":
        cut = _cut_left(record, conversation, most, options)
        if cut is not None:
            report.lost("messages", f"cut off on the left: longer than {most} tokens", record.id)
            return cut
    report.left_out(record.id, f"longer than {most} tokens")
    return None


def _cut_left(record: Record, conversation: Conversation, most: int, options: ExportOptions) -> Conversation | None:
    """The longest end of a conversation that fits and does not begin with an answer to a call that was cut off."""
    from orchard.data.counting import Estimate

    counter = options.counter or Estimate()
    room = most - counter.count(record.trajectory.tools_json)
    start = len(conversation.path)
    while start > 0:
        room -= tokens_of_steps(record, [record.steps[conversation.path[start - 1]]], counter)
        if room < 0:
            break
        start -= 1
    while start < len(conversation.path) and record.steps[conversation.path[start]].role == pb.ROLE_TOOL:
        start += 1
    if not any(conversation.loss[start:]):
        return None
    return Conversation(conversation.number, conversation.path[start:], conversation.loss[start:])


def fitted_tokens(sequence: TokenSequence, options: ExportOptions, report: Report, name: str) -> TokenSequence | None:
    """A sequence that is no longer than may be, cut on its left or left out."""
    most = options.max_tokens
    if most is None or len(sequence.ids) <= most:
        return sequence
    cut = len(sequence.ids) - most
    if options.truncate != "left" or not any(sequence.mask[cut:]):
        report.left_out(name, f"longer than {most} tokens")
        return None
    report.lost("tokens", f"cut off on the left: longer than {most} tokens", name)
    return TokenSequence(
        sequence.ids[cut:],
        sequence.mask[cut:],
        None if sequence.logprobs is None else sequence.logprobs[cut:],
        sequence.temperatures[cut:],
        max(0, sequence.prompt - cut),
        sequence.steps,
    )


def sequences_of(
    record: Record, conversation: Conversation, options: ExportOptions, report: Report
) -> Iterator[TokenSequence]:
    """The token sequences of a conversation; none, with the reason in the report, where tokens are not known."""
    try:
        found = token_sequences(record, conversation)
    except NoExampleError as error:
        report.left_out(record.id, str(error))
        return
    for sequence in found:
        fit = fitted_tokens(sequence, options, report, record.id)
        if fit is not None:
            yield fit


def plain_messages(record: Record, path: tuple[int, ...]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages whose content is text, with a placeholder for each image, and the images as `data:` addresses.

    Raises:
        NoExampleError: a text has the placeholder itself, so that images could not be told from it.
    """
    images: list[str] = []
    messages = [_plain_message(record, record.steps[index], images) for index in path]
    if images and sum(str(message["content"] or "").count(IMAGE) for message in messages) != len(images):
        raise NoExampleError(f"a text has {IMAGE} in it")
    return messages, images


def _plain_message(record: Record, step: pb.Step, images: list[str]) -> dict[str, Any]:
    pieces = []
    for part in step.content:
        if part.HasField("text"):
            pieces.append(part.text)
        elif part.blob.media_type == "text/plain":
            pieces.append(body_of(part.blob, record.bodies).decode("utf-8", "replace"))
        else:
            pieces.append(IMAGE)
            images.append(data_url(part.blob, record.bodies))
    return openai_message(step, role_name(step.role), "".join(pieces))


def note_external(record: Record, path: tuple[int, ...], report: Report) -> None:
    """Report what lies at an address and is not in the row."""
    for index in path:
        if parse_object(record.steps[index].extra_json).get("external_parts"):
            report.lost("content", "a part lies at an address and is not in the row", record.id)


def described(record: Record) -> dict[str, Any]:
    """Columns that say what a row is of."""
    trajectory, score = record.trajectory, record.score
    return {
        "trajectory_id": trajectory.trajectory_id,
        "dataset": trajectory.task.dataset,
        "instance_id": trajectory.task.instance_id,
        "repo": trajectory.task.repo,
        "website": trajectory.task.website,
        "split": trajectory.task.split,
        "harness": trajectory.harness,
        "model": trajectory.model,
        "outcome": score.value if isinstance(score, Scored) else None,
        "tools": trajectory.tools_json,
    }
