"""Texts of answers wait in the database for their way to the object store, and are found on either side of it."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import psycopg
import pytest

from services.common.db import connect, migrate
from services.common.errors import UnavailableError
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


class Counting(ObjectStore):
    """Counts what it is given; `tried` is told each time."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.tries, self.tried = 0, asyncio.Event()

    async def put(self, name: str, body: bytes | IO[bytes]) -> None:
        self.tries += 1
        self.tried.set()
        await super().put(name, body)


@contextmanager
def away(url: str) -> Iterator[None]:
    """A database takes no connection, and has none, for the time of the context."""
    base, query = (url.partition("?")[part] for part in (0, 2))
    server, _, name = base.rpartition("/")
    with psycopg.connect(f"{server}/postgres?{query}", autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")  # type: ignore[arg-type]
        try:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            yield
        finally:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")  # type: ignore[arg-type]


@asynccontextmanager
async def journals(
    url: str,
    objects: ObjectStore | Path,
    stopping: asyncio.Event | None = None,
    gathering: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[tuple[Answers, QuestionJournal, TextStore, ClaimStore]]:
    """Of one question, whose answers so far are not looked up."""
    engine = connect(url)
    turns, lines = Turns(engine, 1), Lines(engine, 1)
    texts, calls, claims = TextStore(turns), CallStore(turns, lines), ClaimStore(lines)
    store = objects if isinstance(objects, ObjectStore) else ObjectStore(objects.as_uri())
    answers = Answers(store, texts, stopping, gathering=gathering)
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
        async with asyncio.timeout(110):
            while await texts.some(1):
                pass
        moving.cancel()
        assert path.read_bytes() == b"It did."
        assert await read(answers, sha256) == b"It did."


@pytest.mark.parametrize("sizes", [[1] * 40, [1] * 250, [30_000] * 90])
async def test_texts_wait_while_many_come_until_many_wait(own_database: str, tmp_path: Path, sizes: list[int]) -> None:
    """Each is how large those texts are that come in one time of gathering, 50 of them; then no more come."""
    rounds = iter(sizes)
    came = 1

    async def gathering(_seconds: float) -> None:
        nonlocal came
        assert await texts.some(1)
        for size in [next(rounds, 0)] * 50:
            if size:
                came += 1
                answers.waits(size)

    async with journals(own_database, tmp_path, gathering=gathering) as (answers, journal, texts, _claims):
        await answered(journal, "It did.")
        moving = asyncio.create_task(answers.move())
        async with asyncio.timeout(110):
            while await texts.some(1):
                if moving.done():
                    await moving
        moving.cancel()
    half_full = {1: 10_000, 30_000: (128 << 20) // 30_000 + 1}[sizes[0]]
    assert min(half_full, 50 * len(sizes)) <= came <= half_full + 50


async def test_what_cannot_wait_is_put_at_once(own_database: str, tmp_path: Path) -> None:
    """A long text, and one that PostgreSQL does not take."""
    async with journals(own_database, tmp_path) as (answers, journal, texts, _claims):
        for vote, text in enumerate(("x" * (64 << 10) + "y", "a\0b", "half \ud800")):
            sha256 = await answered(journal, text, vote)
            assert await read(answers, sha256) == text.encode(errors="replace")
        assert await texts.some(1) == []


async def test_the_database_keeps_answers_while_the_object_store_is_away(own_database: str, tmp_path: Path) -> None:
    async with journals(own_database, tmp_path) as (answers, journal, texts, _claims):
        folder = tmp_path / "answers"
        folder.write_text("in the way")
        await answered(journal, "It waits.")
        moving = asyncio.create_task(answers.move())
        async with asyncio.timeout(110):
            while not answers.are_stuck:
                await asyncio.sleep(0)
        later = await answered(journal, "It waits too.", 1)
        assert await read(answers, later) == b"It waits too."
        await journal.ready()
        folder.unlink()
        await answered(journal, "It does not.", 2)
        async with asyncio.timeout(110):
            while await texts.some(1):
                pass
        moving.cancel()
        assert (folder / "t" / later).read_bytes() == b"It waits too."


async def test_an_answer_waits_for_a_store_that_is_away_for_long(own_database: str, tmp_path: Path) -> None:
    objects, folder = Counting(tmp_path.as_uri()), tmp_path / "answers"
    folder.write_text("in the way")
    text = "x" * (64 << 10) + "y"
    async with journals(own_database, objects) as (answers, journal, _texts, _claims):
        keeping = asyncio.create_task(answered(journal, text))
        async with asyncio.timeout(90):
            while objects.tries < 6:
                assert not keeping.done()
                objects.tried.clear()
                await objects.tried.wait()
        # The database takes all others meanwhile.
        await journal.ready()
        folder.unlink()
        assert await read(answers, await keeping) == text.encode()


async def test_nothing_is_asked_while_the_database_takes_no_answer(own_database: str, tmp_path: Path) -> None:
    async with journals(own_database, tmp_path) as (answers, journal, _texts, _claims):
        await journal.ready()
        with away(own_database):
            keeping = asyncio.create_task(answered(journal, "It did."))
            async with asyncio.timeout(110):
                while True:
                    try:
                        await journal.ready()
                    except UnavailableError as error:
                        assert error.reason == "ANSWERS_NOT_KEPT"
                        break
                    await asyncio.sleep(0)
        assert await read(answers, await asyncio.wait_for(keeping, 90)) == b"It did."
        await journal.ready()


async def test_a_service_that_stops_gives_up_what_no_store_takes(own_database: str, tmp_path: Path) -> None:
    stopping = asyncio.Event()
    async with journals(own_database, tmp_path, stopping) as (_answers, journal, _texts, _claims):
        with away(own_database):
            stopping.set()
            with pytest.raises(UnavailableError):
                await asyncio.wait_for(answered(journal, "It did."), 110)
            await journal.ready()


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
