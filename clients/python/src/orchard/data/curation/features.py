"""What selectors know of a trajectory: numbers and names, not its text, so that a whole pool fits into memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from orchard.data.counting import TokenCounter, tokens_of, written_text
from orchard.data.record import Record, submission_of, text_of
from orchard.data.sources import hash_of
from orchard.data.training.conversations import conversations, is_action
from orchard.trajectory.v1 import trajectory_pb2 as pb

_FILE: Final = re.compile(r"^diff --git a/.+ b/(?P<name>.+)$|^\+\+\+ (?:b/)?(?P<new>\S.*)$", re.MULTILINE)
_HUNK: Final = re.compile(r"^@@ -\d+(?:,(?P<old>\d+))? \+\d+(?:,(?P<new>\d+))? @@")


@dataclass(frozen=True, slots=True)
class Patch:
    """What a patch changes.

    Attributes:
        files: how many files.
        lines: lines that it adds or removes.
    """

    files: int
    lines: int


@dataclass(frozen=True, slots=True)
class Features:
    """One trajectory.

    Attributes:
        position: in the source, from 0.
        id: its id.
        sha256: of all that it says.
        task: what it is an attempt at: dataset and instance, or the intent where it names none.
        repo: the repository; empty: none.
        website: the website; empty: none.
        resolved: whether its outcome is a success; None: no number says so.
        turns: responses of the model.
        tokens: of its longest conversation.
        response_length: characters that the model wrote.
        patch: what was handed in, as far as it is a patch; None: nothing was.
        intent: the task in words; empty where no step asks for it.
    """

    position: int
    id: str
    sha256: str
    task: str
    repo: str
    website: str
    resolved: bool | None
    turns: int
    tokens: int
    response_length: int
    patch: Patch | None
    intent: str


def features_of(record: Record, position: int, counter: TokenCounter, *, intent: bool) -> Features:
    """The features of a trajectory."""
    task = record.trajectory.task
    found = conversations(record)
    actions = [step for step in record.steps if is_action(step)]
    submission = submission_of(record)
    asked = intent_of(record)
    return Features(
        position=position,
        id=record.id,
        sha256=hash_of(record),
        task=f"{task.dataset}/{task.instance_id}" if task.instance_id else f"{task.dataset}/{asked}",
        repo=task.repo,
        website=task.website,
        resolved=record.resolved,
        turns=len(actions),
        tokens=max((tokens_of(record, one.path, counter) for one in found), default=0),
        response_length=sum(len(written_text(record, step)) for step in actions),
        patch=None if submission is None else patch_of(submission),
        intent=asked if intent else "",
    )


def intent_of(record: Record) -> str:
    """What was asked for: the first message of a user."""
    first = next((step for step in record.steps if step.role == pb.ROLE_USER), None)
    return "" if first is None else text_of(first, record.bodies)


def patch_of(text: str) -> Patch:
    """Files and changed lines of a unified diff. Lines are counted within hunks, as their headers say."""
    files: set[str] = set()
    changed = old = new = 0
    for line in text.splitlines():
        if old > 0 or new > 0:
            if line.startswith("-"):
                changed, old = changed + 1, old - 1
            elif line.startswith("+"):
                changed, new = changed + 1, new - 1
            elif not line.startswith("\\"):
                old, new = old - 1, new - 1
        elif hunk := _HUNK.match(line):
            old, new = int(hunk["old"] or 1), int(hunk["new"] or 1)
        elif (name := _FILE.match(line)) and (found := name["name"] or name["new"]) != "/dev/null":
            files.add(found.split("\t")[0])
    return Patch(len(files), changed)
