"""The three states of any score. A score that could not be had is never a number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Scored:
    """A score. The only state with a number.

    Raises:
        ValueError: the value is not finite.
    """

    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"a score must be a finite number, not {self.value!r}")


@dataclass(frozen=True, slots=True)
class Excluded:
    """Infrastructure failed (judge, sandbox, budget): the sample says nothing, good or bad, and leaves its group."""

    reason: str


@dataclass(frozen=True, slots=True)
class Abstained:
    """The judge worked and would not decide. Like Excluded it has no number and moves no mean."""

    reason: str


Score = Scored | Excluded | Abstained


def exact(number: float) -> Fraction:
    """The decimal number that was written: 0.07 as 7/100 and not as the binary fraction next to it.

    Raises:
        ValueError: it is not a finite number.
    """
    if isinstance(number, bool) or not math.isfinite(number):
        raise ValueError(f"expected a finite number, not {number!r}")
    return Fraction(str(number))
