"""Token sequences of a conversation, where the tokens that were read and written are known."""

from __future__ import annotations

import json
from dataclasses import dataclass

from orchard.data.errors import NoExampleError
from orchard.data.record import Record
from orchard.data.training.conversations import Conversation
from orchard.trajectory.v1 import trajectory_pb2 as pb


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens in the order in which the model saw and wrote them; all lists have one length.

    Attributes:
        ids: the tokens.
        mask: 1 where a token has loss.
        logprobs: of the written tokens, 0 elsewhere; None where one with loss is not known.
        temperatures: at which a token was drawn, 1 where that is not known.
        prompt: how many tokens came before the first that the model wrote.
        steps: indices of the steps that have loss here.
    """

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    temperatures: tuple[float, ...]
    prompt: int
    steps: tuple[int, ...]


class _Builder:
    def __init__(self, prompt: list[int]) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.temperatures: list[float] = []
        self.known = True
        self.prompt = len(prompt)
        self.steps: list[int] = []
        self.read(prompt)

    def read(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.temperatures += [1.0] * len(ids)

    def write(self, step: pb.Step, *, loss: bool) -> None:
        call = step.model_call
        count = len(call.completion_token_ids)
        self.ids += call.completion_token_ids
        self.mask += [int(loss)] * count
        self.temperatures += [_temperature(call)] * count
        if len(call.logprobs) == count:
            self.logprobs += call.logprobs
        else:
            self.logprobs += [0.0] * count
            self.known = self.known and not loss
        if loss:
            self.steps.append(step.index)

    def done(self) -> TokenSequence:
        logprobs = tuple(self.logprobs) if self.known else None
        return TokenSequence(
            tuple(self.ids), tuple(self.mask), logprobs, tuple(self.temperatures), self.prompt, tuple(self.steps)
        )


def token_sequences(record: Record, conversation: Conversation) -> list[TokenSequence]:
    """The sequences of a conversation: one where each prompt goes on from the tokens before it.

    A prompt that does not (the history was rendered anew into other tokens) begins another sequence, in which earlier
    responses are context: each response has loss once.

    Raises:
        NoExampleError: tokens of a response that has loss are not known.
    """
    done: list[TokenSequence] = []
    now: _Builder | None = None
    for index, loss in zip(conversation.path, conversation.loss, strict=True):
        step = record.steps[index]
        call = step.model_call
        if step.role != pb.ROLE_ASSISTANT or not (call.completion_token_ids and call.prompt_token_ids):
            if loss:
                raise NoExampleError(f"the tokens of step {index} are not known")
            continue
        prompt = list(call.prompt_token_ids)
        if now is not None and prompt[: len(now.ids)] == now.ids:
            now.read(prompt[len(now.ids) :])
        else:
            if now is not None and now.steps:
                done.append(now.done())
            now = _Builder(prompt)
        now.write(step, loss=loss)
    if now is not None and now.steps:
        done.append(now.done())
    return done


def _temperature(call: pb.ModelCall) -> float:
    parameters = json.loads(call.parameters_json) if call.parameters_json else {}
    value = parameters.get("temperature") if isinstance(parameters, dict) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 1.0
