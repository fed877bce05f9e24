"""Running a curation: one pass over the trajectories, then the steps in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchard.data.counting import Estimate, TokenCounter
from orchard.data.curation.features import Features, features_of
from orchard.data.curation.filters import Filter
from orchard.data.curation.selectors import Selector
from orchard.data.errors import DataError
from orchard.data.sources import Source

Step = Filter | Selector


@dataclass(frozen=True, slots=True)
class Curation:
    """What to choose.

    Attributes:
        steps: filters and selectors, in their order.
        seed: of everything that is drawn.
        counter: counts tokens.
    """

    steps: tuple[Step, ...]
    seed: int = 0
    counter: TokenCounter = field(default_factory=Estimate)


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a trajectory.

    Attributes:
        id: its id.
        sha256: of all that it says.
        step: name of the step that dropped it; empty: it was kept.
        reason: why.
    """

    id: str
    sha256: str
    step: str = ""
    reason: str = ""

    @property
    def kept(self) -> bool:
        """Whether it was kept."""
        return not self.step


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did.

    Attributes:
        name: of the step.
        options: of the step.
        before: trajectories that came to it.
        after: trajectories that it left.
        reasons: how many went for which reason; reasons that name another trajectory are counted as one.
    """

    name: str
    options: Mapping[str, Any]
    before: int
    after: int
    reasons: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The result of a curation.

    Attributes:
        fates: of every trajectory, in the order of the source.
        steps: what each did.
        features: of those that were kept, by id.
    """

    fates: tuple[Fate, ...]
    steps: tuple[StepReport, ...]
    features: Mapping[str, Features]

    @property
    def kept(self) -> dict[str, str]:
        """The hash of each trajectory that was kept, by id, in the order of the source."""
        return {fate.id: fate.sha256 for fate in self.fates if fate.kept}


def curate(source: Source, curation: Curation, progress: Callable[[int], None] | None = None) -> Chosen:
    """Choose among the trajectories of a source. The same source and curation choose the same.

    Args:
        source: is read once; of each trajectory some numbers and names are kept.
        curation: what to choose.
        progress: called with the number of trajectories that were read.

    Raises:
        DataError: an id comes twice.
    """
    intents = any(isinstance(step, Selector) and step.intents for step in curation.steps)
    pool: list[Features] = []
    refused: dict[str, dict[int, str]] = {}
    for record, _ in source.records():
        if record.id in refused:
            raise DataError(
                f"the trajectory {record.id!r} comes twice", where=record.where, fix="name each source once"
            )
        reasons = {}
        for number, step in enumerate(curation.steps):
            if isinstance(step, Filter) and (reason := step.reason(record, curation.counter)):
                reasons[number] = reason
        refused[record.id] = reasons
        pool.append(features_of(record, len(pool), curation.counter, intent=intents))
        if progress is not None:
            progress(len(pool))
    return _run(pool, refused, curation)


def _run(pool: list[Features], refused: Mapping[str, Mapping[int, str]], curation: Curation) -> Chosen:
    fates = {one.id: Fate(one.id, one.sha256) for one in pool}
    left, reports = pool, []
    for number, step in enumerate(curation.steps):
        if isinstance(step, Filter):
            drops = {one.id: refused[one.id][number] for one in left if number in refused[one.id]}
        else:
            drops = step.drops(left, f"{curation.seed}/{number}")
        for name, reason in drops.items():
            fates[name] = Fate(name, fates[name].sha256, step.name, reason)
        kept = [one for one in left if one.id not in drops]
        reasons = Counter(_kind(reason, fates) for reason in drops.values())
        reports.append(StepReport(step.name, step.options, len(left), len(kept), dict(sorted(reasons.items()))))
        left = kept
    return Chosen(tuple(fates.values()), tuple(reports), {one.id: one for one in left})


def _kind(reason: str, fates: Mapping[str, Fate]) -> str:
    """A reason without the id of another trajectory in it."""
    words = ["another" if word in fates else word for word in reason.split(" ")]
    return " ".join(words)
