"""Small data sets of one run of the demo, in files that a person can read: conversations to imitate, and groups."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orchard

from services.local.demo.rollouts import LABEL, Rollouts
from services.local.demo.tasks import Task

_MOST_CHARACTERS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Datasets:
    """What was written.

    Attributes:
        conversations: JSONL, a resolved trajectory a line: messages in OpenAI's form.
        groups: JSONL, a task a line: rewards and advantages of its attempts.
        counts: lines of each.
    """

    conversations: Path
    groups: Path
    counts: tuple[int, int]


async def write_datasets(
    client: orchard.AsyncSandboxClient, rollouts: Rollouts, tasks: Iterable[Task], folder: Path
) -> Datasets:
    """Export what this run kept.

    Raises:
        OrchardError: it cannot be read.
        OSError: it cannot be written.
    """
    conversations = [
        await _conversation(client, found)
        async for found in client.trajectories.export(labels={LABEL: rollouts.run}, outcome_least=1.0)
    ]
    groups = [_group(await client.trajectories.groups.get(rollouts.group_of(task))) for task in tasks]
    return await asyncio.to_thread(_write_all, folder, conversations, groups)


def _write_all(folder: Path, conversations: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> Datasets:
    folder.mkdir(parents=True, exist_ok=True)
    return Datasets(
        _write(folder / "conversations.jsonl", conversations),
        _write(folder / "groups.jsonl", groups),
        (len(conversations), len(groups)),
    )


async def _conversation(client: orchard.AsyncSandboxClient, found: orchard.ExportedTrajectory) -> dict[str, Any]:
    info = found.info
    return {
        "trajectory_id": info.trajectory_id,
        "instance_id": info.task.instance_id,
        "reward": info.outcome.value if info.outcome else None,
        "tools": list(info.tools),
        "messages": [_shortened(await client.trajectories.message(step)) for step in found.steps],
    }


def _shortened(message: dict[str, Any]) -> dict[str, Any]:
    """Without the middle of a text that no model could read, as of a candidate that prints megabytes."""
    text = message["content"]
    if len(text) <= _MOST_CHARACTERS:
        return message
    half = _MOST_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return message | {"content": f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"}


def _group(group: orchard.Group) -> dict[str, Any]:
    members = [
        {
            "attempt": member.sample.index,
            "trajectory_id": member.sample.trajectory_id,
            "reward": member.sample.reward,
            "advantage": member.advantage,
            "trainable": member.trainable,
        }
        for member in group.members
    ]
    return {
        "group_id": group.group_id,
        "instance_id": group.task.instance_id,
        "keep": group.keep,
        "reason": group.keep_reason,
        "members": members,
    }


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
