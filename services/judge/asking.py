"""Asking judges: each vote within its tries, every answer kept as soon as it is there, none asked for twice."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from orchard.rewards.scores import Excluded

from services.common.backoff import Backoff
from services.common.errors import NotFoundError
from services.judge.answers.reading import Finish, read_answer
from services.judge.backends.base import Ask, CallError, Reply
from services.judge.backends.endpoint import Endpoint
from services.judge.backends.limits import BudgetExhaustedError, Meter
from services.judge.building import Prompts
from services.judge.model import NOTHING, Kind, Parameters, Question, Reading, Reason, Usage, Vote
from services.judge.prompting.prompts import Prompt
from services.judge.votes import both_orders

_UNLIMITED_STEP: Final = 0.1


class Place(NamedTuple):
    """Where a call belongs: the vote of a judge, of a pair which order, and which try it is."""

    judge: str
    vote: int
    swapped: bool
    attempt: int


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer that was received, as the journal has it."""

    place: Place
    ticket: str
    sha256: str
    finish: Finish
    words: str
    model: str
    usage: Usage
    latency_seconds: float


def vote_of(kept: Kept, reading: Reading) -> Vote:
    """The vote of a judge whose first answer could be read."""
    return Vote(kept.place.judge, kept.model, reading, (kept.sha256,), kept.usage, kept.latency_seconds)


class Journal(Protocol):
    """What was received for one question."""

    async def kept(self) -> Sequence[Kept]:
        """Answers of an earlier run that did not come to its end."""

    async def text(self, kept: Kept) -> str:
        """The text of one of these.

        Raises:
            NotFoundError: it is not stored any more.
        """

    async def ready(self) -> None:
        """Raise where the answer of a call that is about to be made could not be kept."""

    async def answered(self, place: Place, prompt: Prompt, reply: Reply, usage: Usage, latency: float) -> Kept:
        """Keep an answer; it is durable when this returns."""

    async def failed(self, place: Place, usage: Usage) -> None:
        """A call gave no answer."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """What came of one place of a vote, over all its tries."""

    reading: Reading
    model: str = ""
    answers: tuple[str, ...] = ()
    usage: Usage = NOTHING
    latency_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Keeper:
    """Keeps what comes of one call."""

    journal: Journal
    endpoint: Endpoint
    place: Place
    prompt: Prompt

    async def ready(self) -> None:
        """See endpoint.Keeper."""
        await self.journal.ready()

    async def answered(self, reply: Reply, seconds: float) -> tuple[Kept, str]:
        """See endpoint.Keeper."""
        usage = self.endpoint.usage(reply)
        return await self.journal.answered(self.place, self.prompt, reply, usage, seconds), reply.text

    async def failed(self) -> None:
        """See endpoint.Keeper."""
        await self.journal.failed(self.place, self.endpoint.usage(None))


class Asker:
    """Asks all judges of one question.

    Args:
        prompts: what is asked.
        key: what its verdict is found by; part of each call's idempotency key.
        parameters: how.
        endpoints: the judges, each asked `parameters.votes` times.
        meters: budgets.
        journal: where answers are kept.
    """

    def __init__(  # noqa: PLR0917
        self,
        prompts: Prompts,
        key: str,
        parameters: Parameters,
        endpoints: Sequence[Endpoint],
        meters: Sequence[Meter],
        journal: Journal,
    ) -> None:
        self._prompts = prompts
        self._key = key
        self._parameters = parameters
        self._endpoints = endpoints
        self._meters = meters
        self._journal = journal
        self._kept: Sequence[Kept] = ()
        self.settled: set[tuple[str, int, bool]] = set()
        """Judge, vote and order of those that have an answer that could be read: they need not be asked again."""

    async def votes(self) -> list[Vote]:
        """Every vote, in the order of the judges. No failure of a judge is raised.

        Where something of ours fails, such as the database, the other votes come to their end before that is raised:
        their answers are paid for.
        """
        self._kept = await self._journal.kept()
        wanted = [(endpoint, number) for endpoint in self._endpoints for number in range(self._parameters.votes)]
        if len(wanted) == 1:
            return [await self._vote(*wanted[0])]
        asked = [
            asyncio.create_task(self._vote(endpoint, number), name=f"vote {number} of {endpoint.settings.name}")
            for endpoint, number in wanted
        ]
        results = await asyncio.gather(*asked, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [task.result() for task in asked]

    async def _vote(self, endpoint: Endpoint, number: int) -> Vote:
        first = await self._answer(endpoint, number, swapped=False)
        answered = [first]
        reading = first.reading
        question, _prompt = await self._prompts.of()
        if question.kind is Kind.PAIRWISE and first.reading.value is not None:
            second = await self._answer(endpoint, number, swapped=True)
            answered.append(second)
            reading = both_orders(first.reading, second.reading)
        return Vote(
            judge=endpoint.settings.name,
            model=next((part.model for part in answered if part.model), ""),
            reading=reading,
            answers=tuple(sha256 for part in answered for sha256 in part.answers),
            usage=sum((part.usage for part in answered), Usage()),
            latency_seconds=sum(part.latency_seconds for part in answered),
        )

    async def _answer(self, endpoint: Endpoint, number: int, *, swapped: bool) -> _Answered:
        """Try until there is an answer that can be read, or no try is left."""
        question, prompt = await self._prompts.of(swapped=swapped)
        backoff: Backoff | None = None
        found = _Answered(Reading(Excluded(Reason.UNAVAILABLE), "the judge was not asked"))
        kept = self._kept_of(endpoint.settings.name, number, swapped=swapped)
        for one in kept:
            found = await self._with_kept(found, question, prompt, one)
        first = kept[-1].place.attempt + 1 if kept else 0
        if kept and not found.reading.again:
            first = endpoint.settings.attempts
        for attempt in range(first, endpoint.settings.attempts):
            place = Place(endpoint.settings.name, number, swapped, attempt)
            found, delay = await self._try(endpoint, found, question, prompt, place)
            if not found.reading.again:
                break
            if delay is not None and attempt + 1 < endpoint.settings.attempts:
                backoff = backoff or endpoint.backoff()
                await asyncio.sleep(max(delay, backoff.next()))
        if not isinstance(found.reading.score, Excluded):
            self.settled.add((endpoint.settings.name, number, swapped))
        return found

    def _kept_of(self, judge: str, number: int, *, swapped: bool) -> list[Kept]:
        """What this vote was answered before, in the order of its tries."""
        found = [kept for kept in self._kept if kept.place[:3] == (judge, number, swapped)]
        return sorted(found, key=lambda kept: kept.place.attempt)

    async def _try(
        self, endpoint: Endpoint, found: _Answered, question: Question, prompt: Prompt, place: Place
    ) -> tuple[_Answered, float | None]:
        """One call; with a delay, where the next one should wait."""
        started = time.monotonic()
        asked = self._ask(question, prompt, place, len(found.answers))
        keeper = _Keeper(self._journal, endpoint, place, prompt)
        try:
            kept, text = await endpoint.ask(asked, self._meters, keeper)
        except BudgetExhaustedError:
            message = "the budget has no room for the next call"
            return replace(found, reading=Reading(Excluded(Reason.BUDGET), message)), None
        except CallError as error:
            latency = time.monotonic() - started
            usage = endpoint.usage(None) if error.made else Usage()
            reading = Reading(Excluded(error.reason), error.message, again=error.again)
            found = replace(
                found, reading=reading, usage=found.usage + usage, latency_seconds=found.latency_seconds + latency
            )
            return found, error.retry_after_seconds or 0.0
        return self._with_answer(found, question, prompt, kept, text), None

    async def _with_kept(self, found: _Answered, question: Question, prompt: Prompt, kept: Kept) -> _Answered:
        try:
            text = await self._journal.text(kept)
        except NotFoundError:
            # Whoever keeps the object store has cleared it. An answer that cannot be read must not stop its question.
            reading = Reading(Excluded(Reason.UNAVAILABLE), "an answer of before is not stored any more", again=True)
            return replace(found, reading=reading, usage=found.usage + kept.usage)
        return self._with_answer(found, question, prompt, kept, text)

    def _with_answer(self, found: _Answered, question: Question, prompt: Prompt, kept: Kept, text: str) -> _Answered:
        told = replace(prompt, ticket=kept.ticket)
        return _Answered(
            reading=read_answer(question, told, text, kept.finish, kept.words),
            model=kept.model,
            answers=(*found.answers, kept.sha256),
            usage=found.usage + kept.usage,
            latency_seconds=found.latency_seconds + kept.latency_seconds,
        )

    def _ask(self, question: Question, prompt: Prompt, place: Place, answers: int) -> Ask:
        rubric = question.rubric
        # Of the request, not of the try: a server that knows such keys answers it once, however often it is sent. An
        # answer that could not be read must not come again, so the next request has another key; the ticket is in it
        # because servers refuse a key that comes with another body.
        name = f"{self._key}/{place.judge}/{place.vote}/{place.swapped}/{prompt.ticket}/{answers}"
        return Ask(
            kind=question.kind,
            prompt=prompt,
            content_hash=f"{self._key}/{place.vote}",
            instruction=question.task.instruction,
            step=rubric.step if rubric else _UNLIMITED_STEP,
            temperature=self._parameters.temperature,
            max_output_tokens=self._parameters.max_output_tokens,
            idempotency_key=hashlib.sha256(name.encode()).hexdigest(),
        )
