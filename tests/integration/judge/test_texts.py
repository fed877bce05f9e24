"""Texts of answers wait in the database for their way to the object store, and are found on either side of it."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest

from services.common.db import connect, migrate
from services.common.objects import ObjectStore
from services.judge.__main__ import MIGRATIONS
from services.judge.answers.reading import Finish
from services.judge.asking import Place
from services.judge.backends.base import Reply
from services.judge.journal import Answers, QuestionJournal
from services.judge.model import Kind, Question, Role, Step, Task, Usage
from services.judge.prompting.prompts import build_prompt
from services.judge.store.calls import CallStore, Owner
from services.judge.store.claims import NOWHERE, ClaimStore
from services.judge.store.lanes import Lines
from services.judge.store.tables import SCHEMA
from services.judge.store.texts import TextStore
from services.judge.store.turns import Turns

PROMPT = build_prompt(Question(Kind.OUTCOME, Task("Do it."), ((Step(0, Role.ASSISTANT, "Done."),),)))


@pytest.fixture
def own_database(database: str) -> str:
    """A database that no service moves texts of."""
    name = f"texts_{os.urandom(4).hex()}"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    base, query = (database.partition("?")[part] for part in (0, 2))
    url = f"{base.rpartition('/')[0]}/{name}?{query}"
    migrate(url, schema=SCHEMA, migrations=MIGRATIONS)
    return url


@asynccontextmanager
async def journals(url: str, folder: Path) -> AsyncIterator[tuple[Answers, QuestionJournal, TextStore, ClaimStore]]:
    """Of one question, whose answers so far are not looked up."""
    engine = connect(url)
    turns, lines = Turns(engine, 1), Lines(engine, 1)
    texts, calls, claims = TextStore(turns), CallStore(turns, lines), ClaimStore(lines)
    answers = Answers(ObjectStore(folder.as_uri()), texts)
    owner = Owner("t", "run", "", "", "outcome")
    journal = QuestionJournal((), calls, answers, owner, {"j": "m"}, lambda: datetime.now(UTC))
    try:
        yield answers, journal, texts, claims
    finally:
        for lanes in (calls, claims, lines):
            await lanes.close()
        await engine.dispose()


async def answered(journal: QuestionJournal, text: str, vote: int = 0) -> str:
    kept = await journal.answered(Place("j", vote, False, 0), PROMPT, Reply(text, Finish.STOP, "", "m"), Usage(1), 0.1)
    return kept.sha256


async def read(answers: Answers, sha256: str) -> bytes:
    return b"".join([chunk async for chunk in answers.chunks("t", sha256)])


async def test_a_text_is_there_before_and_after_its_way(own_database: str, tmp_path: Path) -> None:
    async with journals(own_database, tmp_path) as (answers, journal, texts, claims):
        sha256 = await answered(journal, "It did.")
        assert sha256 == hashlib.sha256(b"It did.").hexdigest()
        path = tmp_path / "answers" / "t" / sha256
        assert not path.exists()
        assert await read(answers, sha256) == b"It did."
        # One who died would have left it so; the next one goes on from there.
        (kept,) = (await claims.known("t", "run", "", NOWHERE)).answers
        assert await journal.text(kept) == "It did."
        moving = asyncio.create_task(answers.move())
        async with asyncio.timeout(60):
            while await texts.some(1):
                pass
        moving.cancel()
        assert path.read_bytes() == b"It did."
        assert await read(answers, sha256) == b"It did."


async def test_what_cannot_wait_is_put_at_once(own_database: str, tmp_path: Path) -> None:
    """A long text, one that PostgreSQL does not take, and every one while the object store is away."""
    async with journals(own_database, tmp_path) as (answers, journal, texts, _claims):
        for vote, text in enumerate(("x" * (64 << 10) + "y", "a\0b", "half \ud800")):
            sha256 = await answered(journal, text, vote)
            assert await read(answers, sha256) == text.encode(errors="replace")
        assert await texts.some(1) == []
        folder, aside = tmp_path / "answers" / "t", tmp_path / "aside"
        waits = await answered(journal, "It waits.", 3)
        folder.rename(aside)
        folder.write_text("in the way")
        moving = asyncio.create_task(answers.move())
        async with asyncio.timeout(60):
            while answers.may_wait("x", b"x"):
                await asyncio.sleep(0)
        moving.cancel()
        folder.unlink()
        aside.rename(folder)
        assert await read(answers, waits) == b"It waits."
        assert [one.text for one in await texts.some(2)] == ["It waits."]


def test_a_downgrade_loses_no_text(own_database: str) -> None:
    with psycopg.connect(own_database, autocommit=True) as connection:
        connection.execute("INSERT INTO judge.waiting_texts VALUES ('t', 'a', 'It did.')")
        with pytest.raises(RuntimeError, match="1 answers are not yet in the object store"):
            migrate(own_database, schema=SCHEMA, migrations=MIGRATIONS, revision="-1")
        connection.execute("DELETE FROM judge.waiting_texts")
        migrate(own_database, schema=SCHEMA, migrations=MIGRATIONS, revision="-1")
        row = connection.execute("SELECT to_regclass('judge.waiting_texts')").fetchone()
        assert row == (None,)
        migrate(own_database, schema=SCHEMA, migrations=MIGRATIONS)
