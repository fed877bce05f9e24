"""How well a judge agrees with human labels, and with itself after a change.

Source of kappa: Cohen, "A Coefficient of Agreement for Nominal Scales" (1960). The bins of `reliability` are those of
reliability diagrams: Niculescu-Mizil and Caruana, "Predicting Good Probabilities with Supervised Learning" (2005).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean


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


@dataclass(frozen=True, slots=True)
class Bin:
    """Items whose values lie close together.

    Attributes:
        low: least value that belongs here.
        high: least value that does not; of the last bin, 1, it does.
        count: how many items.
        mean_value: of what the judge said; None of no items.
        positive_share: of those that people said yes to; None of no items. Equal to the mean value where the judge's
            values are probabilities.
    """

    low: float
    high: float
    count: int
    mean_value: float | None
    positive_share: float | None


def reliability(pairs: Iterable[tuple[float, bool]], bins: int = 10) -> list[Bin]:
    """What people said, by what the judge said: pairs of (value from 0 to 1, label) in bins of equal width.

    Raises:
        ValueError: a value is not from 0 to 1, or there is no bin.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, not {bins}")
    values: list[list[float]] = [[] for _ in range(bins)]
    labels: list[list[bool]] = [[] for _ in range(bins)]
    for value, label in pairs:
        if not 0 <= value <= 1:
            raise ValueError(f"a value must be from 0 to 1, not {value!r}")
        # 0.3 belongs to the bin that begins with it, whatever 0.3 * 10 is in binary.
        place = min(int(Fraction(str(value)) * bins), bins - 1)
        values[place].append(value)
        labels[place].append(label)
    return [
        Bin(
            place / bins,
            (place + 1) / bins,
            len(values[place]),
            fmean(values[place]) if values[place] else None,
            sum(labels[place]) / len(labels[place]) if labels[place] else None,
        )
        for place in range(bins)
    ]


@dataclass(frozen=True, slots=True)
class Drift:
    """What became of the same items' values, as after a change of prompt or model.

    Attributes:
        items: in both.
        scored: with a number in both; all below is of these, but `gained` and `lost`.
        gained: with a number only after.
        lost: with a number only before.
        mean_before: of the values.
        mean_after: of the values.
        mean_change: after - before.
        mean_absolute_change: of after - before; 0 where every change is undone by another in the mean alone.
        decisions: yes or no, after against before.
    """

    items: int
    scored: int
    gained: int
    lost: int
    mean_before: float | None
    mean_after: float | None
    mean_change: float | None
    mean_absolute_change: float | None
    decisions: Confusion

    @property
    def changed(self) -> int:
        """Decisions that are others now."""
        return self.decisions.false_positive + self.decisions.false_negative


def drift(before: Mapping[str, float | None], after: Mapping[str, float | None], *, threshold: float = 0.5) -> Drift:
    """Compare values of the same items; None is a verdict without a number.

    Args:
        before: by item.
        after: by item; items that are in one of the two alone do not count.
        threshold: a value says yes from here on.
    """
    both = before.keys() & after.keys()
    pairs = [(old, new) for one in both if (old := before[one]) is not None and (new := after[one]) is not None]
    changes = [new - old for old, new in pairs]
    return Drift(
        items=len(both),
        scored=len(pairs),
        gained=sum(before[one] is None and after[one] is not None for one in both),
        lost=sum(before[one] is not None and after[one] is None for one in both),
        mean_before=fmean(old for old, _ in pairs) if pairs else None,
        mean_after=fmean(new for _, new in pairs) if pairs else None,
        mean_change=fmean(changes) if pairs else None,
        mean_absolute_change=fmean(map(abs, changes)) if pairs else None,
        decisions=confusion((new >= threshold, old >= threshold) for old, new in pairs),
    )
