"""Use cases of judging: one question at a time, each judged once. Each acts within a tenant."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from orchard.rewards.agreement import Confusion, confusion
from orchard.rewards.claw_eval import task_score
from orchard.rewards.scores import Excluded

from services.common.errors import InvalidArgumentError, NotFoundError
from services.judge.answers.reading import read_answer
from services.judge.asking import Asker, Kept, vote_of
from services.judge.backends.endpoint import Endpoint
from services.judge.backends.limits import Meter
from services.judge.building import Prompts, worked_out
from services.judge.endings import whole
from services.judge.journal import Answers, Closing, QuestionJournal
from services.judge.model import (
    NOTHING,
    Cut,
    Kind,
    Provenance,
    Question,
    Reading,
    Reason,
    Usage,
    Verdict,
    Vote,
    actions_of,
    attempts_json,
)
from services.judge.prompting.prompts import VERSIONS, Prompt, shown_images
from services.judge.requests import Prepared, Request, lacks_evidence, parameters_of, question_key
from services.judge.rubric_shelf import RubricShelf
from services.judge.rubrics import Rubric
from services.judge.store.calls import CallStore, Owner
from services.judge.store.claims import NOWHERE, ClaimStore, Earlier, Origin, Sought
from services.judge.store.endings import Ending, EndingStore, Settled
from services.judge.store.lanes import Lines
from services.judge.store.locks import HeldLock, LockLostError, QuestionLocks
from services.judge.store.verdicts import VerdictStore
from services.judge.votes import combine


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well verdicts agree with labels. `unscored`: verdicts without a number, in no other count."""

    counts: Confusion
    unscored: int


@dataclass(frozen=True, slots=True)
class Errand:
    """For whom a question is judged.

    Attributes:
        meters: budgets.
        origin: what it is told again by.
    """

    meters: Sequence[Meter] = ()
    origin: Origin = NOWHERE


NO_ERRAND = Errand()
_TURNS: Final = 5
"""How often a question is gone on with whose lock was lost."""


class Judging:
    """Questions of every tenant.

    Args:
        endpoints: the judges by name; the first is the default.
    """

    def __init__(  # noqa: PLR0917
        self,
        endpoints: Mapping[str, Endpoint],
        store: VerdictStore,
        claims: ClaimStore,
        calls: CallStore,
        endings: EndingStore,
        shelf: RubricShelf,
        locks: QuestionLocks,
        answers: Answers,
        clock: Callable[[], datetime],
        lines: Lines,
    ) -> None:
        self._endpoints = endpoints
        self._store = store
        self._claims = claims
        self._calls = calls
        self._endings = endings
        self._shelf = shelf
        self._locks = locks
        self._answers = answers
        self._clock = clock
        self._lines = lines
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
        parameters = parameters_of(request, len(endpoints))

        def prepared() -> Prepared:
            attempts = attempts_json(question.attempts)
            trajectory_hash = question.trajectory_hash(attempts)
            key = question_key(question, trajectory_hash, endpoints, parameters)
            fresh, budget = request.fresh, request.budget
            return Prepared(
                question, request.hash(attempts), key, trajectory_hash, endpoints, parameters, fresh, budget
            )

        return await worked_out(question, prepared)

    async def judge_request(self, tenant: str, request_id: str, prepared: Prepared) -> Verdict:
        """The verdict of a request, which is judged once however often it comes; without an id, see `judge`.

        Raises:
            AlreadyExistsError: the id was used for something else.
        """
        if not request_id:
            known = await self._claims.known(tenant, "", prepared.sought, NOWHERE)
            return _again(known.verdict) if known.verdict else await self.judge(tenant, prepared)
        origin = Origin(prepared.asked, request_id=request_id)
        earlier = await self._claims.begin(tenant, prepared.sought, origin, self._clock())
        if (verdict := _of_earlier(origin, earlier)) is not None:
            return verdict
        return await self.judge(tenant, prepared, Errand(origin=origin))

    async def judge(self, tenant: str, prepared: Prepared, errand: Errand = NO_ERRAND) -> Verdict:
        """The verdict: a stored one, the one that somebody else waits for, or a new one.

        Raises:
            AlreadyExistsError: the id of its request or item was used for something else.
        """
        run = prepared.key
        if prepared.fresh:
            run += f"/{errand.origin.repeat or secrets.token_hex(8)}"
        name = f"{tenant}/{run}"
        while (flight := self._flights.get(name)) is not None:
            # Nothing where the one in front gave up, or had no budget: the next one in line tries.
            if (found := await asyncio.shield(flight)) is not None:
                if (verdict := await self._of_item(tenant, errand.origin)) is not None:
                    return verdict
                return await self._told_again(tenant, run, prepared, found, errand)
        flight = self._flights[name] = asyncio.get_running_loop().create_future()
        verdict = None
        try:
            with self._lines.joined():
                verdict = await self._alone(name, tenant, run, prepared, errand)
            return verdict
        finally:
            del self._flights[name]
            flight.set_result(None if verdict is None or verdict.is_unpaid else verdict)

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

    async def _of_item(self, tenant: str, origin: Origin) -> Verdict | None:
        """The verdict of an item that came before; a request was looked for when it began."""
        if not origin.batch_id:
            return None
        known = await self._claims.known(tenant, "", "", origin)
        return _of_earlier(origin, known.earlier) if known.earlier else None

    async def _told_again(self, tenant: str, run: str, prepared: Prepared, found: Verdict, errand: Errand) -> Verdict:
        """A verdict that is there, as that of another request or item."""
        verdict = _again(found)
        if errand.origin is not NOWHERE:
            await whole(self._endings.add(Ending(tenant, run, prepared.key, verdict, None, errand.origin)))
        return verdict

    async def _alone(self, name: str, tenant: str, run: str, prepared: Prepared, errand: Errand) -> Verdict:
        """Judge under the lock; where that is lost to another replica, go on from what that one leaves."""
        turns = 0
        while True:
            turns += 1
            try:
                async with self._locks.held(name, Sought(tenant, run, prepared.sought, errand.origin)) as held:
                    return await self._judged(tenant, run, prepared, errand, held)
            except LockLostError:
                if turns == _TURNS:
                    raise

    async def _judged(self, tenant: str, run: str, prepared: Prepared, errand: Errand, held: HeldLock) -> Verdict:
        question, started, known = prepared.question, time.monotonic(), held.known
        assert known is not None  # noqa: S101 (it was asked for)
        # Another replica may have been first.
        if known.earlier and (verdict := _of_earlier(errand.origin, known.earlier)):
            return verdict
        if known.verdict:
            return await self._told_again(tenant, run, prepared, known.verdict, errand)
        prompts, settled = Prompts(question), set[Settled]()
        votes: list[Vote] = []
        cuts: tuple[Cut, ...] = ()
        if missing := lacks_evidence(question):
            reading = Reading(Excluded(Reason.NO_EVIDENCE), missing)
        else:
            journal = await self._journal(tenant, run, prepared, errand, known.answers, held.sure, started)
            asker = self._asker(tenant, run, prepared, prompts, errand, journal)
            votes = await asker.votes()
            if journal.verdict is not None:
                return journal.verdict
            reading, settled, cuts = _together(prepared, votes), asker.settled, (await prompts.of())[1].cuts
        verdict = self._verdict(prepared, reading, votes, cuts, time.monotonic() - started)
        comes_again = not prepared.fresh or bool(errand.origin.batch_id) or verdict.is_unpaid
        kept = _kept(reading, settled) if comes_again else set()
        await whole(self._endings.add(Ending(tenant, run, prepared.key, verdict, kept, errand.origin)))
        return verdict

    async def _journal(  # noqa: PLR0917
        self,
        tenant: str,
        run: str,
        prepared: Prepared,
        errand: Errand,
        kept: Sequence[Kept],
        sure: Callable[[], Awaitable[None]],
        started: float,
    ) -> QuestionJournal:
        question = prepared.question
        for sha256 in dict.fromkeys(shown_images(question)):
            await self._answers.put_image(tenant, question.images[sha256])
        rubric = question.rubric.name if question.rubric else question.kind.name.lower()
        models = {endpoint.settings.name: endpoint.settings.model for endpoint in prepared.endpoints}
        owner = Owner(tenant, run, "", "", rubric, errand.origin.batch_id)

        def ending_of(prompt: Prompt, answer: Kept, text: str) -> Ending | None:
            # What earlier tries took is part of the verdict too, and an answer that ends nothing is asked for again.
            reading = read_answer(question, prompt, text, answer.finish, answer.words)
            if answer.place.attempt or isinstance(reading.score, Excluded):
                return None
            vote = vote_of(answer, reading)
            reading, latency = _together(prepared, [vote]), time.monotonic() - started
            verdict = self._verdict(prepared, reading, [vote], prompt.cuts, latency)
            return Ending(tenant, run, prepared.key, verdict, None, errand.origin)

        single = len(prepared.endpoints) == prepared.parameters.votes == 1 and question.kind is not Kind.PAIRWISE
        closing = Closing(self._endings, ending_of) if single and not kept else None
        return QuestionJournal(kept, self._calls, self._answers, owner, models, self._clock, sure, closing)

    def _asker(  # noqa: PLR0917
        self, tenant: str, run: str, prepared: Prepared, prompts: Prompts, errand: Errand, journal: QuestionJournal
    ) -> Asker:
        meters = [*errand.meters, Meter(prepared.budget)]
        return Asker(prompts, f"{tenant}/{run}", prepared.parameters, prepared.endpoints, meters, journal)

    def _verdict(
        self, prepared: Prepared, reading: Reading, votes: Sequence[Vote], cuts: tuple[Cut, ...], latency_seconds: float
    ) -> Verdict:
        question, rubric = prepared.question, prepared.question.rubric
        passed = None
        if question.kind is Kind.CLAW_EVAL and reading.value is not None:
            passed = task_score(**reading.scores).passed
        actions: tuple[int, ...] = ()
        if question.kind is Kind.VALUE_CURVE:
            steps = question.attempts[0]
            actions = (*(step.index for step in actions_of(steps)), len(steps))
        provenance = Provenance(
            judges_json=json.dumps([endpoint.described for endpoint in prepared.endpoints]),
            parameters=prepared.parameters,
            prompt_version=VERSIONS[question.kind],
            rubric_name=rubric.name if rubric else "",
            rubric_version=rubric.version if rubric else 0,
            rubric_hash=rubric.hash if rubric else "",
            trajectory_hash=prepared.trajectory_hash,
            image_hashes=tuple(shown_images(question)),
            cuts=cuts,
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


def _together(prepared: Prepared, votes: Sequence[Vote]) -> Reading:
    readings = [vote.reading for vote in votes]
    # A verdict of fewer votes than were asked for would be stored as if that were what the judges say.
    stopped = next((reading for reading in readings if reading.score == Excluded(Reason.BUDGET)), None)
    return stopped or combine(prepared.question, readings, prepared.parameters)


def _kept(reading: Reading, settled: set[Settled]) -> set[Settled] | None:
    """What the journal keeps when there is a verdict, None for all of it.

    Nothing, where the verdict says it all. Where judges failed, what the others answered was paid for: a repeat asks
    those that failed alone. Where the budget ended, also the tries that are used up.
    """
    if not isinstance(reading.score, Excluded):
        return set()
    return None if reading.score == Excluded(Reason.BUDGET) else settled


def _of_earlier(origin: Origin, earlier: Earlier) -> Verdict | None:
    """The verdict of a request or item that came before, if it has one that stays.

    Raises:
        AlreadyExistsError: it was something else.
    """
    if earlier.asked not in {"", origin.asked}:
        raise origin.taken()
    if earlier.verdict is None or earlier.again:
        return None
    return _again(earlier.verdict) if earlier.cached else earlier.verdict


def _again(verdict: Verdict) -> Verdict:
    return replace(verdict, cached=True, usage=Usage(), latency_seconds=0.0)


def _no_verdict(verdict_id: str) -> NotFoundError:
    return NotFoundError(f"there is no verdict {verdict_id!r}", reason="VERDICT_NOT_FOUND", verdict_id=verdict_id)
