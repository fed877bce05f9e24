"""Long trajectories are cut by the kind of their parts before they are judged, and what was cut is said.

Sources: the lengths of task, reasoning, command, observation, patch and gold patch are the released trainer's. Those of
tests (as the gold patch), of the final response (as the task), of all calls of a step and of all steps together are our
own choice, and so are the words by which errors and test summaries are found.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from services.judge.model import Cut

LIMITS: Final = {
    "task": 4000,
    "reasoning": 600,
    "command": 400,
    "observation": 1200,
    "patch": 4000,
    "gold_patch": 3000,
    "tests": 3000,
    "final_response": 4000,
}
"""Characters of each part."""
ERROR_CHARACTERS: Final = 800
_SUMMARY_CHARACTERS: Final = 300
_LINE_CHARACTERS: Final = 200
STEPS_CHARACTERS: Final = 240_000
"""Of all steps of an attempt together."""
CALLS_CHARACTERS: Final = 24_000
"""Of all calls of a step together."""
_MARK: Final = "[... {} characters left out ...]"

_ERROR: Final = re.compile(
    r"\b(error|exception|traceback|failed|failure|fatal|panic|segfault|assert\w*|undefined|not found)\b"
    r"|\w(Error|Exception)\b",
    re.IGNORECASE,
)
_SUMMARY: Final = re.compile(
    r"\b\d+ (passed|failed|errors?|passing|failing|skipped)\b"
    r"|^Ran \d+ tests?\b|^(OK|FAILED)( \(|$)|^test result: |^Tests?:\s|^(ok|FAIL|PASS)\t",
)


@dataclass
class Cutter:
    """Cuts texts and keeps account of it."""

    cuts: list[Cut] = field(default_factory=list)

    def cut(self, part: str, text: str, step_index: int = -1) -> str:
        """The text, or as much of it as its kind may have."""
        limit = LIMITS[part]
        if len(text) <= limit:
            return text
        kept = _observation(text, limit) if part == "observation" else _ends(text, limit)
        self.note(part, len(text), len(kept), step_index)
        return kept

    def note(self, part: str, original: int, kept: int, step_index: int = -1) -> None:
        """Something was left out."""
        self.cuts.append(Cut(part, step_index, original, kept))


def middle_out(sizes: Sequence[int], limit: int) -> tuple[int, int]:
    """How many of the first and of the last pieces to keep within a limit: the ends tell most.

    A fifth of the room is for the beginning. The first and the last piece are kept always.
    """
    if sum(sizes) <= limit or len(sizes) == 1:
        return len(sizes), 0
    first, room = 1, limit // 5 - sizes[0]
    while first < len(sizes) - 1 and sizes[first] <= room:
        room -= sizes[first]
        first += 1
    last, room = 1, limit - sum(sizes[:first]) - sizes[-1]
    while last < len(sizes) - first and sizes[-1 - last] <= room:
        room -= sizes[-1 - last]
        last += 1
    return first, last


def _ends(text: str, limit: int) -> str:
    mark = _MARK.format(len(text) - limit)
    room = max(limit - len(mark) - 2, 2)
    # Twice as much of the beginning: it says what this is.
    head = room * 2 // 3
    return f"{text[:head]}\n{mark}\n{text[len(text) - (room - head) :]}"


def _observation(text: str, limit: int) -> str:
    """Head, then lines that tell errors, then summaries of tests, all within the limit."""
    lines = text.splitlines()
    # The last summaries count: they are of the whole run.
    summaries = _within([line for line in lines if _SUMMARY.search(line)][::-1], _SUMMARY_CHARACTERS)[::-1]
    chosen = set(summaries)
    errors = _within([line for line in lines if _ERROR.search(line) and line not in chosen], ERROR_CHARACTERS)
    kept = "\n".join([*errors, *summaries])
    mark = _MARK.format(len(text) - limit)
    room = limit - len(kept) - len(mark) - 3
    if room <= 0:
        return f"{mark}\n{kept}"[:limit]
    if not kept:
        return _ends(text, limit)
    return f"{text[:room]}\n{mark}\n{kept}"


def _within(lines: Sequence[str], characters: int) -> list[str]:
    kept: list[str] = []
    for line in lines:
        short = line.strip()[:_LINE_CHARACTERS]
        if short in kept:
            continue
        if len(short) + 1 > characters:
            break
        characters -= len(short) + 1
        kept.append(short)
    return kept
