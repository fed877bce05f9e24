"""Rows of trainers that take tokens: slime, verl and prime-rl.

Sources: `Sample` of slime (slime/utils/types.py), `AgentLoopOutput` of verl 0.9 (verl/experimental/agent_loop), and
`TrainingSample` of prime-rl (src/prime_rl/transport/types.py). What has no reward leaves its group before: slime would
zero its loss only after it had normalised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from orchard.data.codecs.base import Carries, Codec, Container, Row
from orchard.data.errors import NoExampleError
from orchard.data.options import ExportOptions
from orchard.data.record import Record, text_of
from orchard.data.report import Report
from orchard.data.training.conversations import Conversation, conversations
from orchard.data.training.examples import plain_messages, sequences_of
from orchard.data.training.groups import Group, judge
from orchard.data.training.tokens import TokenSequence
from orchard.rewards.scores import Scored
from orchard.trajectory.v1 import trajectory_pb2 as pb

_CARRIES: Final = frozenset({Carries.TOKENS, Carries.LOGPROBS, Carries.REWARDS, Carries.LOSS})
_STATUS: Final = {pb.TRAJECTORY_STATUS_COMPLETED: "completed", pb.TRAJECTORY_STATUS_FAILED: "truncated"}


def _sequences(member: Record, options: ExportOptions, report: Report) -> Iterator[tuple[Conversation, TokenSequence]]:
    for conversation in conversations(member):
        if any(conversation.loss):
            for sequence in sequences_of(member, conversation, options, report):
                yield conversation, sequence


def _scored(group: Group, options: ExportOptions, report: Report) -> Iterator[tuple[int, Record, float, float]]:
    """Position, record, reward and advantage of each member that counts, of a group that is kept."""
    judged = judge(group, options)
    if judged.reason:
        report.left_out(group.key, judged.reason)
        return
    for position, member in enumerate(group.members):
        score = judged.scores[position]
        if isinstance(score, Scored):
            yield position, member, score.value, judged.advantages.values[position]
        else:
            report.left_out(member.id, f"it does not count: {score.reason}")


def slime_rows(group: Group, options: ExportOptions, report: Report) -> Iterator[Row]:
    """A Sample for each token sequence. Those of one attempt share their rollout_id, so that it counts once."""
    index = report.rows
    for position, member, reward, _ in _scored(group, options, report):
        for conversation, one in _sequences(member, options, report):
            value: dict[str, Any] = {
                "group_index": group.number,
                "index": index,
                "rollout_id": group.first + position,
                "prompt": _prompt(member, conversation),
                "tokens": list(one.ids),
                "response": "\n".join(text_of(member.steps[step], member.bodies) for step in one.steps),
                "response_length": len(one.ids) - one.prompt,
                "label": member.trajectory.task.instance_id or None,
                "reward": reward,
                "loss_mask": list(one.mask[one.prompt :]),
                "rollout_log_probs": None if one.logprobs is None else list(one.logprobs[one.prompt :]),
                "weight_versions": _versions(member, one),
                "status": _STATUS.get(member.trajectory.status, "completed"),
                "remove_sample": False,
                "metadata": {"trajectory_id": member.id, "group": group.key},
                "train_metadata": None,
            }
            yield Row(value, member.id)
            index += 1


def _prompt(record: Record, conversation: Conversation) -> list[dict[str, Any]]:
    """What stands before the first response, as messages."""
    first = next(p for p, index in enumerate(conversation.path) if record.steps[index].role == pb.ROLE_ASSISTANT)
    try:
        return plain_messages(record, conversation.path[:first])[0]
    except NoExampleError:
        return []


def _versions(record: Record, sequence: TokenSequence) -> list[str]:
    """Weight versions of the responses, where they are known."""
    found = [
        record.steps[index].model_call.policy_version or record.trajectory.policy_version for index in sequence.steps
    ]
    return found if all(found) else []


def verl_rows(group: Group, options: ExportOptions, report: Report) -> Iterator[Row]:
    """An AgentLoopOutput for each token sequence; those of one group share their `uid`."""
    for _, member, reward, _advantage in _scored(group, options, report):
        for conversation, one in _sequences(member, options, report):
            called = sum(len(member.steps[index].tool_calls) for index in conversation.path)
            value: dict[str, Any] = {
                "prompt_ids": list(one.ids[: one.prompt]),
                "response_ids": list(one.ids[one.prompt :]),
                "response_mask": list(one.mask[one.prompt :]),
                "response_logprobs": None if one.logprobs is None else list(one.logprobs[one.prompt :]),
                "reward_score": reward,
                "num_turns": sum(member.steps[index].role != pb.ROLE_SYSTEM for index in conversation.path),
                "metrics": {"generate_sequences": 0.0, "tool_calls": 0.0, "compute_score": 0.0, "num_preempted": -1},
                "extra_fields": {"uid": group.key, "trajectory_id": member.id, "calls": called},
            }
            yield Row(value, member.id)


def prime_rl_rows(group: Group, options: ExportOptions, report: Report) -> Iterator[Row]:
    """A TrainingSample for each token sequence, with the advantage of its attempt on each token that has loss."""
    for _, member, reward, advantage in _scored(group, options, report):
        for _conversation, one in _sequences(member, options, report):
            if one.logprobs is None:
                report.left_out(member.id, "log-probs are not known, and prime-rl needs them")
                continue
            mask = [bool(token) for token in one.mask]
            values = [advantage if token else 0.0 for token in mask]
            value: dict[str, Any] = {
                "token_ids": list(one.ids),
                "mask": mask,
                "logprobs": list(one.logprobs),
                "temperatures": list(one.temperatures),
                "env_name": options.environment,
                "advantages": [{"loss": "rl", "values": values, "mask": mask}],
                "reward": reward,
            }
            yield Row(value, member.id)


SLIME: Final = Codec(
    name="slime",
    summary="slime Samples, with tokens, masks and log-probs of the response.",
    carries=_CARRIES,
    group_rows=slime_rows,
    containers=(Container.JSONL,),
)
VERL: Final = Codec(
    name="verl",
    summary="verl AgentLoopOutputs.",
    carries=_CARRIES,
    group_rows=verl_rows,
    containers=(Container.JSONL,),
)
PRIME_RL: Final = Codec(
    name="prime-rl",
    summary="prime-rl TrainingSamples, with advantages.",
    carries=_CARRIES | {Carries.ADVANTAGES},
    group_rows=prime_rl_rows,
    containers=(Container.JSONL,),
)
