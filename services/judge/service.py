"""Use cases of judging: one question at a time, each judged once. Each acts within a tenant."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Final

from orchard.rewards.agreement import Confusion, confusion
from orchard.rewards.claw_eval import task_score
from orchard.rewards.scores import Excluded

from services.common.errors import InvalidArgumentError, NotFoundError
from services.judge.asking import Asker
from services.judge.backends.endpoint import Endpoint
from services.judge.backends.limits import UNLIMITED, Amount, Meter
from services.judge.journal import Answers, QuestionJournal
from services.judge.model import (
    NOTHING,
    Aggregation,
    Image,
    Kind,
    Parameters,
    Provenance,
    Question,
    Reading,
    Reason,
    Step,
    Task,
    Usage,
    Verdict,
    Vote,
    actions_of,
)
from services.judge.prompting.prompts import VERSIONS, build_prompt, shown_images
from services.judge.rubric_shelf import RubricShelf
from services.judge.rubrics import Rubric
from services.judge.store.locks import QuestionLocks
from services.judge.store.verdicts import Owner, VerdictStore
from services.judge.votes import combine, default_aggregation

DEFAULT_OUTPUT_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class Request:
    """A judgement as it was asked for; see orchard.judge.v1.Judgement. Zeros and None: the default."""

    kind: Kind
    task: Task
    attempts: tuple[tuple[Step, ...], ...]
    images: Mapping[str, Image]
    judges: tuple[str, ...] = ()
    rubric_name: str = ""
    rubric_version: int = 0
    votes: int = 0
    aggregation: Aggregation | None = None
    quorum: int = 0
    temperature: float | None = None
    max_output_tokens: int = 0
    fresh: bool = False
    budget: Amount = UNLIMITED


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request with everything that it refers to. `key`: what its verdict is found by."""

    question: Question
    key: str
    endpoints: tuple[Endpoint, ...]
    parameters: Parameters
    fresh: bool
    budget: Amount


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well verdicts agree with labels. `unscored`: verdicts without a number, in no other count."""

    counts: Confusion
    unscored: int


class Judging:
    """Questions of every tenant.

    Args:
        endpoints: the judges by name; the first is the default.
    """

    def __init__(  # noqa: PLR0917
        self,
        endpoints: Mapping[str, Endpoint],
        store: VerdictStore,
        shelf: RubricShelf,
        locks: QuestionLocks,
        answers: Answers,
        clock: Callable[[], datetime],
    ) -> None:
        self._endpoints = endpoints
        self._store = store
        self._shelf = shelf
        self._locks = locks
        self._answers = answers
        self._clock = clock
        self._flights: dict[str, asyncio.Future[Verdict | None]] = {}

    async def prepare(self, tenant: str, request: Request) -> Prepared:
        """Check a request and find what it refers to.

        Raises:
            InvalidArgumentError: a judge is unknown, the quorum is above the votes, an image is missing.
            NotFoundError: there is no such rubric.
        """
        rubric = await self._rubric(tenant, request)
        question = Question(request.kind, request.task, request.attempts, rubric, request.images)
        for sha256 in shown_images(question):
            if sha256 not in request.images:
                raise InvalidArgumentError.of("image", f"image {sha256}, which the judge is shown, was not sent")
        endpoints = self._judges(request.judges)
        parameters = _parameters(request, len(endpoints))
        key = question_key(question, endpoints, parameters)
        return Prepared(question, key, endpoints, parameters, request.fresh, request.budget)

    async def judge(
        self, tenant: str, prepared: Prepared, *, meters: Sequence[Meter] = (), batch_id: str = "", item_id: str = ""
    ) -> Verdict:
        """The verdict: a stored one, the one that somebody else waits for, or a new one."""
        run = prepared.key
        if prepared.fresh:
            run += f"/{batch_id}/{item_id}" if batch_id else f"/{secrets.token_hex(8)}"
        name = f"{tenant}/{run}"
        while True:
            if not prepared.fresh and (found := await self._store.find(tenant, prepared.key)):
                return _again(found)
            flight = self._flights.get(name)
            if flight is None:
                break
            # Nothing where the one in front gave up, or had no budget: the next one in line tries.
            if (verdict := await asyncio.shield(flight)) is not None:
                return _again(verdict)
        flight = self._flights[name] = asyncio.get_running_loop().create_future()
        verdict = None
        try:
            async with self._locks.held(name):
                verdict = await self._judged(tenant, run, prepared, meters, batch_id)
            return verdict
        finally:
            del self._flights[name]
            spent = verdict is None or verdict.reading.score == Excluded(Reason.BUDGET)
            flight.set_result(None if spent else verdict)

    async def verdict(self, tenant: str, verdict_id: str) -> Verdict:
        """A stored verdict.

        Raises:
            NotFoundError: there is none.
        """
        found = (await self._store.get(tenant, [verdict_id])).get(verdict_id)
        if found is None:
            raise _no_verdict(verdict_id)
        return found

    async def calibrate(self, tenant: str, labels: Mapping[str, bool], threshold: float) -> Agreement:
        """Compare verdicts with labels.

        Raises:
            NotFoundError: one of the verdicts is not there.
        """
        values = await self._store.values(tenant, list(labels))
        for verdict_id in labels:
            if verdict_id not in values:
                raise _no_verdict(verdict_id)
        numbers = [(value, labels[verdict_id]) for verdict_id, value in values.items() if value is not None]
        counts = confusion((value >= threshold, label) for value, label in numbers)
        return Agreement(counts, len(values) - len(numbers))

    async def _rubric(self, tenant: str, request: Request) -> Rubric | None:
        if request.kind is not Kind.RUBRIC:
            return None
        return await self._shelf.use(tenant, request.rubric_name, request.rubric_version)

    def _judges(self, names: Sequence[str]) -> tuple[Endpoint, ...]:
        chosen = names or [next(iter(self._endpoints))]
        for name in chosen:
            if name not in self._endpoints:
                known = ", ".join(self._endpoints)
                raise InvalidArgumentError.of(
                    "judgement.judges", f"{name!r} is no judge; there are {known}", reason="JUDGE_UNKNOWN", judge=name
                )
        return tuple(self._endpoints[name] for name in chosen)

    async def _judged(
        self, tenant: str, run: str, prepared: Prepared, meters: Sequence[Meter], batch_id: str
    ) -> Verdict:
        question, started = prepared.question, time.monotonic()
        # Another replica may have been first.
        if not prepared.fresh and (found := await self._store.find(tenant, prepared.key)):
            return _again(found)
        shown = shown_images(question)
        for sha256 in dict.fromkeys(shown):
            await self._answers.put_image(tenant, question.images[sha256])
        rubric = question.rubric.name if question.rubric else question.kind.name.lower()
        owner = Owner(tenant, run, "", "", rubric, batch_id)
        models = {endpoint.settings.name: endpoint.settings.model for endpoint in prepared.endpoints}
        journal = QuestionJournal(self._store, self._answers, owner, models, self._clock)
        asker = Asker(
            question,
            f"{tenant}/{run}",
            prepared.parameters,
            prepared.endpoints,
            [*meters, Meter(prepared.budget)],
            journal,
        )
        votes = await asker.votes()
        verdict = self._verdict(prepared, votes, shown, time.monotonic() - started)
        ended = verdict.reading.score != Excluded(Reason.BUDGET)
        await self._store.add(tenant, run, prepared.key, verdict, ended=ended)
        return verdict

    def _verdict(
        self, prepared: Prepared, votes: Sequence[Vote], shown: Sequence[str], latency_seconds: float
    ) -> Verdict:
        question, rubric = prepared.question, prepared.question.rubric
        reading = _together(prepared, votes)
        passed = None
        if question.kind is Kind.CLAW_EVAL and reading.value is not None:
            passed = task_score(**reading.scores).passed
        actions: tuple[int, ...] = ()
        if question.kind is Kind.VALUE_CURVE:
            steps = question.attempts[0]
            actions = (*(step.index for step in actions_of(steps)), len(steps))
        provenance = Provenance(
            judges_json=json.dumps([endpoint.settings.identity() for endpoint in prepared.endpoints]),
            parameters=prepared.parameters,
            prompt_version=VERSIONS[question.kind],
            rubric_name=rubric.name if rubric else "",
            rubric_version=rubric.version if rubric else 0,
            rubric_hash=rubric.hash if rubric else "",
            trajectory_hash=question.trajectory_hash(),
            image_hashes=tuple(shown),
            cuts=build_prompt(question).cuts,
        )
        return Verdict(
            verdict_id=f"vd-{secrets.token_hex(12)}",
            kind=question.kind,
            reading=reading,
            passed=passed,
            votes=tuple(votes),
            provenance=provenance,
            usage=sum((vote.usage for vote in votes), NOTHING),
            latency_seconds=latency_seconds,
            create_time=self._clock(),
            action_steps=actions,
        )


def question_key(question: Question, endpoints: Sequence[Endpoint], parameters: Parameters) -> str:
    """SHA-256 of all that a verdict rests on: judges, parameters, prompt, rubric, trajectory and images."""
    content = [
        [endpoint.settings.identity() for endpoint in endpoints],
        asdict(parameters),
        VERSIONS[question.kind],
        question.rubric.hash if question.rubric else "",
        question.trajectory_hash(),
        shown_images(question),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _parameters(request: Request, judges: int) -> Parameters:
    votes = request.votes or 1
    total = votes * judges
    if request.quorum > total:
        raise InvalidArgumentError.of("judgement.parameters.quorum", f"must be at most {total}, the number of votes")
    return Parameters(
        votes=votes,
        aggregation=request.aggregation or default_aggregation(request.kind),
        quorum=request.quorum or total // 2 + 1,
        temperature=request.temperature,
        max_output_tokens=request.max_output_tokens or DEFAULT_OUTPUT_TOKENS,
    )


def _together(prepared: Prepared, votes: Sequence[Vote]) -> Reading:
    readings = [vote.reading for vote in votes]
    # A verdict of fewer votes than were asked for would be stored as if that were what the judges say.
    stopped = next((reading for reading in readings if reading.score == Excluded(Reason.BUDGET)), None)
    return stopped or combine(prepared.question, readings, prepared.parameters)


def _again(verdict: Verdict) -> Verdict:
    return replace(verdict, cached=True, usage=Usage(), latency_seconds=0.0)


def _no_verdict(verdict_id: str) -> NotFoundError:
    return NotFoundError(f"there is no verdict {verdict_id!r}", reason="VERDICT_NOT_FOUND", verdict_id=verdict_id)
