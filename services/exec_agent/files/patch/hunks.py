"""Finds where hunks fit, and puts their lines in place.

The rules are those of GNU patch: first the line that the header names, moved by what earlier hunks moved, then outward
from there, later lines first; then again with more fuzz. A hunk with less context at one end than at the other was cut
off by the start or the end of its file and fits only there, unless fuzz makes up for what is missing.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from services.exec_agent.files.patch.model import Hunk

_MAXIMUM_COMPARISONS: Final = 500_000  # a file of equal lines and many hunks would take for ever
_LINES_AT_ONCE: Final = 64  # so many lines more make a comparison as dear as two
_SHOWN_BYTES: Final = 120


@dataclass(frozen=True, slots=True)
class HunkResult:
    """What became of one hunk.

    Attributes:
        number: its position in its file's list, from 1.
        expected_line: the line of the old file that its header names.
        applied_line: the line at which it fits; zero if it does not.
        fuzz: context lines ignored at either end.
        error: why it does not fit; empty if it does.
    """

    number: int
    expected_line: int
    applied_line: int = 0
    fuzz: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Edit:
    start: int
    end: int
    lines: Sequence[bytes]


def split_lines(data: bytes) -> list[bytes]:
    """The lines of a file with their ends; only LF ends a line."""
    lines = data.split(b"\n")
    last = lines.pop()
    lines = [line + b"\n" for line in lines]
    if last:
        lines.append(last)
    return lines


def apply_hunks(data: bytes, hunks: Sequence[Hunk], fuzz: int) -> tuple[bytes, list[HunkResult]]:
    """Apply the hunks that fit; returns the new content and what became of each."""
    image = _Image(split_lines(data))
    results = [image.apply(number, hunk, fuzz) for number, hunk in enumerate(hunks, 1)]
    return image.content(), results


class _Pattern(NamedTuple):
    """A hunk at some fuzz: `lines` are the old ones that are compared, all but so many `before` and `after` them."""

    hunk: Hunk
    lines: list[bytes]
    before: int
    after: int

    @property
    def length(self) -> int:
        """Lines that must be there from its start on: those ignored at the end may lie past the end of the file."""
        return len(self.hunk.old) - self.after


class _Image:
    """The old file, which never changes, and the edits found so far in its coordinates."""

    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines
        self._edits: list[_Edit] = []
        self._starts: list[int] = []
        self._index: dict[bytes, list[int]] | None = None
        self._offset = 0
        self._frozen = 0
        self._comparisons_left = _MAXIMUM_COMPARISONS

    def apply(self, number: int, hunk: Hunk, fuzz: int) -> HunkResult:
        # With no old lines the header names the line before the new ones.
        stated = hunk.old_start - 1 if hunk.old else hunk.old_start
        expected = min(max(0, stated + self._offset), len(self._lines))
        context = max(hunk.leading, hunk.trailing)
        for level in range(min(fuzz, context) + 1):
            edit = self._locate(hunk, expected, level)
            if edit is None:
                continue
            self._offset = edit.start - stated
            self._insert(edit)
            return HunkResult(number, hunk.old_start, max(1, edit.start + (1 if hunk.old else 0)), level)
        return HunkResult(number, hunk.old_start, error=self._explain(hunk, expected))

    def content(self) -> bytes:
        pieces: list[bytes] = []
        position = 0
        for edit in self._edits:
            pieces.extend(self._lines[position : edit.start])
            pieces.extend(edit.lines)
            position = edit.end
        pieces.extend(self._lines[position:])
        return b"".join(pieces)

    def _insert(self, edit: _Edit) -> None:
        position = bisect(self._starts, edit.start)
        self._starts.insert(position, edit.start)
        self._edits.insert(position, edit)
        self._frozen = edit.end

    def _locate(self, hunk: Hunk, expected: int, level: int) -> _Edit | None:
        """What the hunk does at the place nearest to `expected` where it fits; None if there is none."""
        pattern = _pattern(hunk, level)
        last = len(self._lines) - pattern.length
        if last < 0:
            return None
        context = max(hunk.leading, hunk.trailing)
        at_start = level + hunk.leading < context and hunk.old_start <= 1
        at_end = level + hunk.trailing < context
        # Lines after one that has no newline would run into it.
        at_end = at_end or (bool(hunk.new) and not hunk.new[-1].endswith(b"\n") and not pattern.after)
        if at_start or at_end:
            place = 0 if at_start else last
            if not hunk.old and place != expected:
                return None  # nothing says that it belongs there
            return self._edit(pattern, place) if place == last or not at_end else None
        if not hunk.old:
            # Nothing to recognise the place by: the header's word counts.
            stated = expected if hunk.old_start <= len(self._lines) or self._offset else None
            return self._edit(pattern, stated) if stated is not None else None
        if expected <= last and (edit := self._edit(pattern, expected)):
            return edit
        for place in self._candidates(pattern, expected):
            if self._comparisons_left <= 0:
                break
            self._comparisons_left -= 1 + len(pattern.lines) // _LINES_AT_ONCE
            if 0 <= place <= last and (edit := self._edit(pattern, place)):
                return edit
        return None

    def _candidates(self, pattern: _Pattern, expected: int) -> Iterator[int]:
        """Places where the hunk's rarest line stands, nearest first; those before the last hunk's end come last."""
        if self._index is None:
            self._index = {}
            for position, text in enumerate(self._lines):
                self._index.setdefault(text, []).append(position)
        rarest: Sequence[int] | None = None
        shift = 0
        for position, text in enumerate(pattern.lines, pattern.before):
            places = self._index.get(text)
            if places is None:
                return
            if rarest is None or len(places) < len(rarest):
                rarest, shift = places, position
        if rarest is None:
            # All that could be compared is ignored: it fits wherever there are as many lines.
            rarest = range(len(self._lines) - pattern.length + 1)
        split = bisect_left(rarest, self._frozen + shift)
        for lowest, highest in ((split, len(rarest)), (0, split)):
            for line in _outward(rarest, lowest, highest, expected + shift):
                yield line - shift

    def _edit(self, pattern: _Pattern, start: int) -> _Edit | None:
        """What the hunk does at a place; None if it does not fit there."""
        first, last = start + pattern.before, start + pattern.length
        if self._lines[first:last] != pattern.lines:
            return None
        end = min(last + pattern.after, len(self._lines))
        position = bisect(self._starts, start)
        overlaps_next = position < len(self._edits) and self._edits[position].start < end
        overlaps_previous = position > 0 and self._edits[position - 1].end > start
        if overlaps_next or overlaps_previous:
            return None
        new = pattern.hunk.new[pattern.before : len(pattern.hunk.new) - pattern.after]
        edit = _Edit(start, end, [*self._lines[start:first], *new, *self._lines[last:end]])
        return None if self._joins(edit, position) else edit

    def _joins(self, edit: _Edit, position: int) -> bool:
        """Whether a line that has no newline would come before another, and the two become one."""
        before: Sequence[bytes] = self._lines[max(0, edit.start - 1) : edit.start]
        if position > 0 and self._edits[position - 1].end == edit.start:
            before = self._edits[position - 1].lines[-1:]
        lines = [*before, *edit.lines]
        if edit.end == len(self._lines) and position == len(self._edits):
            lines = lines[:-1]  # nothing comes after the last one
        return not all(line.endswith(b"\n") for line in lines)

    def _explain(self, hunk: Hunk, expected: int) -> str:
        """The first line that differs at the place where the hunk should be."""
        if self._comparisons_left <= 0:
            return "too many places to compare; the file has too many equal lines"
        for position, wanted in enumerate(hunk.old):
            line = expected + position
            if line >= len(self._lines):
                return f"line {line + 1}: expected {_shown(wanted)}, found the end of the file"
            if self._lines[line] != wanted:
                return f"line {line + 1}: expected {_shown(wanted)}, found {_shown(self._lines[line])}"
        if not hunk.old and self._offset == 0 and hunk.old_start > len(self._lines):
            return f"line {hunk.old_start}: expected a line here, found the end of the file"
        line = expected + len(hunk.old)
        overlapping = next((e for e in self._edits if e.start < line and e.end > expected), None)
        if overlapping is not None:
            return f"line {expected + 1}: expected lines that no other hunk changes, found an earlier hunk's place"
        if line < len(self._lines):
            at = "start or end" if hunk.old_start <= 1 else "end"
            return (
                f"line {line + 1}: expected the {at} of the file, since the hunk has less context there, "
                f"found {_shown(self._lines[line])}"
            )
        if expected > 0 and hunk.leading < hunk.trailing:
            return f"line 1: expected {_shown(hunk.old[0])} at the start of the file, found {_shown(self._lines[0])}"
        return f"line {line}: expected a newline at the end of the file, found none"


def _outward(numbers: Sequence[int], lowest: int, highest: int, centre: int) -> Iterator[int]:
    """Ascending numbers[lowest:highest], those nearest to `centre` first; of two as near the larger."""
    right = bisect_left(numbers, centre, lowest, highest)
    left = right - 1
    while left >= lowest or right < highest:
        if right < highest and (left < lowest or numbers[right] - centre <= centre - numbers[left]):
            yield numbers[right]
            right += 1
        else:
            yield numbers[left]
            left -= 1


def _pattern(hunk: Hunk, level: int) -> _Pattern:
    """The hunk without the context lines that are not compared at this fuzz."""
    context = max(hunk.leading, hunk.trailing)
    before = max(0, min(hunk.leading, level + hunk.leading - context))
    after = max(0, min(hunk.trailing, level + hunk.trailing - context, len(hunk.old) - before))
    return _Pattern(hunk, list(hunk.old[before : len(hunk.old) - after]), before, after)


def _shown(line: bytes) -> str:
    text = line.removesuffix(b"\n").decode("utf-8", "backslashreplace")
    if len(text) > _SHOWN_BYTES:
        text = text[:_SHOWN_BYTES] + "..."
    return repr(text) + ("" if line.endswith(b"\n") else " without a newline at the end of the file")
