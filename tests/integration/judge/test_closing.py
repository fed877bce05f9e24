"""A question that one answer ends: answer and verdict are durable at once, by one write, and counted once."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from services.common.objects import ObjectStore
from services.judge.answers.reading import Finish
from services.judge.asking import Kept, Place
from services.judge.backends.base import Reply
from services.judge.journal import Answers, Closing, QuestionJournal
from services.judge.model import (
    Kind,
    Question,
    Role,
    Step,
    Task,
)
from services.judge.prompting.prompts import Prompt, build_prompt
from services.judge.store.calls import Call
from services.judge.store.claims import NOWHERE
from services.judge.store.endings import Ending
from tests.integration.judge.stores import USAGE, Stores, stores

PROMPT = build_prompt(Question(Kind.OUTCOME, Task("Do it."), ((Step(0, Role.ASSISTANT, "Done."),),)))
SHA256 = "0" * 64


async def test_a_repeat_counts_nothing_again(database: str) -> None:
    """As where the connection broke before it was known whether the write was done."""
    async with stores(database) as of:
        kept = Kept(Place("j", 0, False, 0), "t", SHA256, Finish.STOP, "", "m", USAGE, 0.1)
        call = Call(of.owner, USAGE, datetime.now(UTC).date(), kept, "It did.")
        ending = replace(of.ending("vd-1"), call=call)
        await asyncio.gather(of.endings.add(ending), of.endings.add(replace(of.ending("vd-2"), origin=NOWHERE)))
        await of.endings.add(ending)
        assert await of.counted() == (1, 1, 1)
        assert await of.texts.get(of.tenant, SHA256) == "It did."
        assert (await of.known()).answers == []


def journal(of: Stores, objects: Path, ending_of: Callable[[Prompt, Kept, str], Ending | None]) -> QuestionJournal:
    answers, closing = Answers(ObjectStore(objects.as_uri()), of.texts), Closing(of.endings, ending_of)
    return QuestionJournal((), of.calls, answers, of.owner, {"j": "m"}, lambda: datetime.now(UTC), closing=closing)


async def answered(given: QuestionJournal) -> Kept:
    return await given.answered(Place("j", 0, False, 0), PROMPT, Reply("It did.", Finish.STOP, "", "m"), USAGE, 0.1)


async def test_answer_and_verdict_are_stored_together(database: str, tmp_path: Path) -> None:
    async with stores(database) as of:
        given = journal(of, tmp_path, lambda _prompt, _kept, _text: of.ending("vd-1"))
        kept = await answered(given)
        assert given.verdict is not None
        known = await of.known()
        assert known.verdict is not None
        assert (known.verdict.verdict_id, known.answers) == (given.verdict.verdict_id, [])
        assert await of.texts.get(of.tenant, kept.sha256) == "It did."
        assert await of.counted() == (1, 1, 1)


async def test_an_answer_is_kept_alone_whose_verdict_the_database_does_not_take(database: str, tmp_path: Path) -> None:
    async with stores(database) as of:
        given = journal(of, tmp_path, lambda _prompt, _kept, _text: of.ending("no\0id"))
        kept = await answered(given)
        assert given.verdict is None
        known = await of.known()
        assert (known.verdict, [one.sha256 for one in known.answers]) == (None, [kept.sha256])
        assert await of.counted() == (1, 1, 0)


async def test_an_answer_is_kept_alone_that_cannot_be_read(database: str, tmp_path: Path) -> None:
    def broken(_prompt: Prompt, _kept: Kept, _text: str) -> Ending | None:
        raise RuntimeError("broken")

    async with stores(database) as of:
        given = journal(of, tmp_path, broken)
        kept = await answered(given)
        assert given.verdict is None
        assert [one.sha256 for one in (await of.known()).answers] == [kept.sha256]
