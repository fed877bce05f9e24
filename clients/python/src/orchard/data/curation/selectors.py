"""Selectors: each looks at a whole pool and says which trajectories go, and why.

A choice that is drawn depends on the seed and on the ids, not on the order of the pool. Sources: the paper for which
selectors there are; how a composite score is made up is our own choice, stated with its weights.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchard.data.curation.features import Features
from orchard.data.errors import DataError

COMPOSITE_WEIGHTS: Final[Mapping[str, float]] = {"lines": 0.4, "files": 0.3, "rare_repo": 0.3}
"""Our own: large diffs, several files, repositories that are rare in the pool."""
SCOPES: Final = ("all", "resolved", "unresolved")

Drops = dict[str, str]
"""The reason of each trajectory that goes, by id."""


@dataclass(frozen=True, slots=True)
class Selector:
    """A selector.

    Attributes:
        name: as in a plan.
        options: as in a plan.
        choose: which of a pool go, and why; takes the pool in the order of the source, and the seed.
        scope: which trajectories it looks at; the others stay.
        intents: whether it needs tasks in words.
    """

    name: str
    options: Mapping[str, Any]
    choose: Callable[[Sequence[Features], str], Drops]
    scope: str = "all"
    intents: bool = False

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise DataError(f"{self.name} looks at {self.scope!r}", fix=f"use {', '.join(SCOPES)}")

    def drops(self, pool: Sequence[Features], seed: str) -> Drops:
        """Which of a pool go, and why."""
        wanted = {"resolved": True, "unresolved": False}.get(self.scope)
        looked = pool if wanted is None else [one for one in pool if one.resolved is wanted]
        return self.choose(looked, seed)


def drawn(pool: Iterable[Features], seed: str) -> list[Features]:
    """A pool in an order that the seed and the ids decide."""
    return sorted(pool, key=lambda one: (hashlib.sha256(f"{seed}\0{one.id}".encode()).digest(), one.id))


def _others(pool: Sequence[Features], kept: Iterable[Features], reason: str) -> Drops:
    ids = {one.id for one in kept}
    return {one.id: reason for one in pool if one.id not in ids}


def _positive(name: str, number: int | None) -> None:
    if number is not None and number < 1:
        raise DataError(f"{name} is {number}", fix="give at least 1")


def random(count: int, of: str = "all") -> Selector:
    """So many, drawn at random."""
    _positive("count", count)

    def choose(pool: Sequence[Features], seed: str) -> Drops:
        return _others(pool, drawn(pool, seed)[:count], "not drawn")

    return Selector("random", {"count": count, "of": of}, choose, of)


def diverse_repo(per_repo: int, count: int | None = None, of: str = "resolved") -> Selector:
    """At most so many of each repository, drawn; then so many in all."""
    _positive("per_repo", per_repo)
    _positive("count", count)

    def choose(pool: Sequence[Features], seed: str) -> Drops:
        taken: Counter[str] = Counter()
        drops: Drops = {}
        kept = 0
        for one in drawn(pool, seed):
            if not one.repo:
                drops[one.id] = "it names no repository"
            elif taken[one.repo] >= per_repo:
                drops[one.id] = f"its repository has {per_repo} already"
            elif count is not None and kept >= count:
                drops[one.id] = "not drawn"
            else:
                taken[one.repo] += 1
                kept += 1
        return drops

    options = {"per_repo": per_repo, "of": of} | ({} if count is None else {"count": count})
    return Selector("diverse_repo", options, choose, of)


def concentrated_repo(repos: int, count: int | None = None, of: str = "resolved") -> Selector:
    """Only the repositories with the most resolved trajectories, ties by name; then so many in all, drawn."""
    _positive("repos", repos)
    _positive("count", count)

    def choose(pool: Sequence[Features], seed: str) -> Drops:
        resolved = Counter(one.repo for one in pool if one.repo and one.resolved)
        best = {repo for repo, _ in sorted(resolved.items(), key=lambda item: (-item[1], item[0]))[:repos]}
        inside = [one for one in pool if one.repo in best]
        drops = _others(pool, inside, f"its repository is none of the {repos} with the most resolved")
        return drops | _others(inside, drawn(inside, seed)[:count], "not drawn")

    options = {"repos": repos, "of": of} | ({} if count is None else {"count": count})
    return Selector("concentrated_repo", options, choose, of)


def multi_file(least_files: int = 2, count: int | None = None, of: str = "resolved") -> Selector:
    """Only patches of several files; then so many in all, drawn."""
    _positive("count", count)

    def choose(pool: Sequence[Features], seed: str) -> Drops:
        drops = {one.id: "nothing was handed in" for one in pool if one.patch is None}
        patched = [one for one in pool if one.patch is not None]
        wide = [one for one in patched if one.patch is not None and one.patch.files >= least_files]
        drops |= _others(patched, wide, f"its patch has fewer than {least_files} files")
        return drops | _others(wide, drawn(wide, seed)[:count], "not drawn")

    options = {"least_files": least_files, "of": of} | ({} if count is None else {"count": count})
    return Selector("multi_file", options, choose, of)


def large_diff(count: int | None = None, least_lines: int = 0, of: str = "resolved") -> Selector:
    """Only the patches that change the most lines, ties by id."""
    _positive("count", count)
    if count is None and not least_lines:
        raise DataError("large_diff has no bound", fix="give count or least_lines")

    def choose(pool: Sequence[Features], seed: str) -> Drops:
        del seed
        drops = {one.id: "nothing was handed in" for one in pool if one.patch is None}
        patched = [(one.patch.lines, one) for one in pool if one.patch is not None]
        large = [(lines, one) for lines, one in patched if lines >= least_lines]
        drops |= {one.id: f"its patch changes fewer than {least_lines} lines" for n, one in patched if n < least_lines}
        ordered = [one for _, one in sorted(large, key=lambda pair: (-pair[0], pair[1].id))]
        return drops | _others(ordered, ordered[:count], "others change more lines")

    options = {"least_lines": least_lines, "of": of} | ({} if count is None else {"count": count})
    return Selector("large_diff", options, choose, of)


def composite(count: int, weights: Mapping[str, float] | None = None, of: str = "resolved") -> Selector:
    """So many with the highest score, ties by id: the weighted mean of their ranks from 0 to 1.

    Args:
        count: how many.
        weights: of "lines" and "files" of the patch, of "rare_repo", and of "turns"; default COMPOSITE_WEIGHTS.
        of: which trajectories are looked at.
    """
    _positive("count", count)
    given = dict(weights or COMPOSITE_WEIGHTS)
    known = {"lines", "files", "rare_repo", "turns"}
    if set(given) - known or any(weight < 0 for weight in given.values()) or sum(given.values()) <= 0:
        raise DataError(f"the weights are {given}", fix=f"weigh {', '.join(sorted(known))}, none below 0, not all 0")

    def choose(pool: Sequence[Features], seed: str) -> Drops:
        del seed
        scores = composite_scores(pool, given)
        ordered = sorted(pool, key=lambda one: (-scores[one.id], one.id))
        return _others(pool, ordered[:count], "others have a higher composite score")

    return Selector("composite", {"count": count, "weights": given, "of": of}, choose, of)


def composite_scores(pool: Sequence[Features], weights: Mapping[str, float]) -> dict[str, float]:
    """The weighted mean of ranks: for each measure the share of the pool below, ties counted half."""
    repos = Counter(one.repo for one in pool)
    measures: Mapping[str, Callable[[Features], float]] = {
        "lines": lambda one: one.patch.lines if one.patch else 0,
        "files": lambda one: one.patch.files if one.patch else 0,
        "rare_repo": lambda one: -repos[one.repo],
        "turns": lambda one: one.turns,
    }
    total = sum(weights.values())
    scores: dict[str, float] = defaultdict(float)
    for name, weight in weights.items():
        numbers = {one.id: measures[name](one) for one in pool}
        counts = Counter(numbers.values())
        below, ranks = 0, {}
        for number in sorted(counts):
            ranks[number] = (below + counts[number] / 2) / len(pool)
            below += counts[number]
        for one in pool:
            scores[one.id] += weight / total * ranks[numbers[one.id]]
    return scores


def shortest_per_task(of: str = "resolved") -> Selector:
    """One for each task: with the fewest turns, then the shortest responses in all, then the first id."""

    def choose(pool: Sequence[Features], seed: str) -> Drops:
        del seed
        best: dict[str, Features] = {}
        for one in sorted(pool, key=lambda one: (one.turns, one.response_length, one.id)):
            best.setdefault(one.task, one)
        return {one.id: f"{best[one.task].id} is shorter" for one in pool if best[one.task] is not one}

    return Selector("shortest_per_task", {"of": of}, choose, of)


def cap(by: str, most: int, of: str = "all") -> Selector:
    """At most so many of each website, repository or task, drawn."""
    _positive("most", most)
    if by not in {"website", "repo", "task"}:
        raise DataError(f"there is no cap by {by!r}", fix="use website, repo or task")

    def choose(pool: Sequence[Features], seed: str) -> Drops:
        taken: Counter[str] = Counter()
        drops: Drops = {}
        for one in drawn(pool, seed):
            key = getattr(one, by)
            if key and taken[key] >= most:
                drops[one.id] = f"its {by} has {most} already"
            taken[key] += 1
        return drops

    return Selector("cap", {"by": by, "most": most, "of": of}, choose, of)


def balance() -> Selector:
    """As many successes as failures: of the larger class so many are drawn. What has no number goes."""

    def choose(pool: Sequence[Features], seed: str) -> Drops:
        drops = {one.id: "its outcome is no number" for one in pool if one.resolved is None}
        classes = [[one for one in pool if one.resolved is wanted] for wanted in (True, False)]
        size = min(map(len, classes))
        for members in classes:
            drops |= _others(members, drawn(members, seed)[:size], "not drawn from the larger class")
        return drops

    return Selector("balance", {}, choose)
