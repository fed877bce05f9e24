"""What a conversion could not carry, and what it left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from orchard.data.errors import Where

_MOST_KINDS = 10_000
"""Kinds of losses that are kept apart; beyond, they are counted together."""


@dataclass(frozen=True, slots=True)
class Loss:
    """One kind of thing that was not carried.

    Attributes:
        what: the field, or `record` where a whole record was left out.
        why: the reason.
        count: how often.
        first: the first place.
    """

    what: str
    why: str
    count: int
    first: str


@dataclass(slots=True)
class Report:
    """Collects what was not carried while records stream through. Its size does not grow with theirs."""

    records: int = 0
    rows: int = 0
    _losses: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)

    def lost(self, what: str, why: str, where: Where | str) -> None:
        """A field was not carried."""
        key = (what, why)
        if key not in self._losses and len(self._losses) >= _MOST_KINDS:
            key = ("other", "more kinds of losses than are kept apart")
        count, first = self._losses.get(key, (0, str(where)))
        self._losses[key] = (count + 1, first)

    def left_out(self, record: str, why: str) -> None:
        """A whole record gave nothing."""
        self.lost("record", why, record)

    @property
    def losses(self) -> tuple[Loss, ...]:
        """What was lost, the most frequent first."""
        found = (Loss(what, why, count, first) for (what, why), (count, first) in self._losses.items())
        return tuple(sorted(found, key=lambda loss: (-loss.count, loss.what, loss.why)))

    def restore(self, records: int, rows: int, losses: Iterable[Loss]) -> None:
        """Go on from what was counted before."""
        self.records, self.rows = records, rows
        self._losses = {(loss.what, loss.why): (loss.count, loss.first) for loss in losses}
