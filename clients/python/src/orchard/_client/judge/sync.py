"""The synchronous judge: a thin typed face of the asynchronous one."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from typing import Any

from orchard._client.arguments import explained
from orchard._client.judge.batches import Items
from orchard._client.judge.client import AsyncJudge
from orchard._client.judge.types import (
    BatchProgress,
    Calibration,
    ItemVerdict,
    Judgement,
    JudgementKind,
    Rubric,
    UsageOf,
    Verdict,
)
from orchard._client.portal import Portal


@explained
class Judge:
    """Judges of the platform. See AsyncJudge."""

    def __init__(self, portal: Portal, judge: AsyncJudge) -> None:
        self._portal = portal
        self._async = judge

    def run(self, judgement: Judgement, *, request_id: str = "") -> Verdict:
        """Judge, or find the verdict that is stored. See AsyncJudge.run."""
        return self._portal.run(self._async.run(judgement, request_id=request_id))

    def batch(self, batch_id: str, items: Items, *, tokens: int = 0, cost_usd: float = 0.0) -> Iterator[ItemVerdict]:
        """Judge many items, each verdict as soon as it is there. See AsyncJudge.batch.

        Pairs that come from a generator are taken in a thread beside the client's own, so that it may use the client.
        """
        return self._portal.iterate(self._async.batch(batch_id, items, tokens=tokens, cost_usd=cost_usd))

    def progress(self, batch_id: str) -> BatchProgress:
        """How far a batch is."""
        return self._portal.run(self._async.progress(batch_id))

    def items(self, batch_id: str) -> Iterator[ItemVerdict]:
        """Verdicts of a batch by item id."""
        return self._portal.iterate(self._async.items(batch_id))

    def get(self, verdict_id: str) -> Verdict:
        """A verdict."""
        return self._portal.run(self._async.get(verdict_id))

    def answer(self, sha256: str) -> str:
        """A raw answer of a judge, by its hash in a vote."""
        return self._portal.run(self._async.answer(sha256))

    def calibrate(self, labels: Mapping[str, bool], *, threshold: float = 0.5) -> Calibration:
        """Compare verdicts with labels that people gave. See AsyncJudge.calibrate."""
        return self._portal.run(self._async.calibrate(labels, threshold=threshold))

    def usage(self, *, start: dt.datetime | None = None, before: dt.datetime | None = None) -> list[UsageOf]:
        """What judging took, by judge, model and rubric; of whole days in UTC."""
        return self._portal.run(self._async.usage(start=start, before=before))

    def rubrics(self) -> Iterator[Rubric]:
        """The newest version of each rubric, by name, built-in ones included."""
        return self._portal.iterate(self._async.rubrics())

    def rubric(self, name: str, version: int = 0) -> Rubric:
        """A rubric, by default its newest version."""
        return self._portal.run(self._async.rubric(name, version))

    def put_rubric(self, rubric: Rubric) -> Rubric:
        """Store a rubric. See AsyncJudge.put_rubric."""
        return self._portal.run(self._async.put_rubric(rubric))

    def of_trajectory(
        self, trajectory_id: str, kind: JudgementKind | str = JudgementKind.OUTCOME, **given: Any
    ) -> Judgement:
        """A judgement of a trajectory that the platform keeps. See AsyncJudge.of_trajectory."""
        return self._portal.run(self._async.of_trajectory(trajectory_id, kind, **given))
