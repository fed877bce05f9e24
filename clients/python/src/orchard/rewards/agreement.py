"""How well a judge agrees with human labels on a yes-or-no question.

Source of kappa: Cohen, "A Coefficient of Agreement for Nominal Scales" (1960).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Confusion:
    """Counts of judged against labelled.

    Attributes:
        true_positive: both say yes.
        false_positive: the judge alone says yes.
        false_negative: the label alone says yes.
        true_negative: both say no.
    """

    true_positive: int
    false_positive: int
    false_negative: int
    true_negative: int

    @property
    def total(self) -> int:
        """Items compared."""
        return self.true_positive + self.false_positive + self.false_negative + self.true_negative

    @property
    def accuracy(self) -> float | None:
        """The share of items on which both say the same; None of no items."""
        return (self.true_positive + self.true_negative) / self.total if self.total else None

    @property
    def kappa(self) -> float | None:
        """Agreement above chance: 1 is perfect, 0 is chance, below is worse. None where it is undefined.

        It is undefined without items, and where judge and labels are both constant and the same: chance alone would
        explain everything.
        """
        if not self.total:
            return None
        judged_yes = self.true_positive + self.false_positive
        labelled_yes = self.true_positive + self.false_negative
        chance = Fraction(
            judged_yes * labelled_yes + (self.total - judged_yes) * (self.total - labelled_yes), self.total**2
        )
        if chance == 1:
            return None
        observed = Fraction(self.true_positive + self.true_negative, self.total)
        return float((observed - chance) / (1 - chance))


def confusion(pairs: Iterable[tuple[bool, bool]]) -> Confusion:
    """Count pairs of (judged, labelled)."""
    counts = {(judged, labelled): 0 for judged in (True, False) for labelled in (True, False)}
    for judged, labelled in pairs:
        counts[judged, labelled] += 1
    return Confusion(counts[True, True], counts[True, False], counts[False, True], counts[False, False])
