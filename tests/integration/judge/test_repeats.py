"""Requests and items that come again: what was answered is not paid for twice, what an outage left out is judged."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
import sqlalchemy as sa
from orchard.judge.v1 import judge_pb2
from orchard.judge.v1 import judge_service_pb2 as pb
from orchard.trajectory.v1 import trajectory_pb2

from services.common.db import connect, migrate
from services.common.objects import ObjectStore
from services.judge.__main__ import MIGRATIONS
from services.judge.answers.reading import Finish
from services.judge.asking import Kept, Place
from services.judge.backends.endpoint import make_endpoint
from services.judge.backends.limits import Amount
from services.judge.backends.settings import JudgeSettings
from services.judge.batches import Batches, Given
from services.judge.journal import Answers
from services.judge.model import Kind, Role, Step, Task, Usage
from services.judge.requests import Request
from services.judge.rubric_shelf import RubricShelf
from services.judge.service import Judging
from services.judge.store.calls import CallStore, Owner
from services.judge.store.claims import NOWHERE, ClaimStore
from services.judge.store.endings import EndingStore
from services.judge.store.lanes import Lines
from services.judge.store.locks import QuestionLocks
from services.judge.store.rubrics import RubricStore
from services.judge.store.tables import SCHEMA
from services.judge.store.texts import TextStore
from services.judge.store.turns import Turns
from services.judge.store.verdicts import Batch, BatchItem, VerdictStore
from tests.integration.judge.conftest import STEPS, Calls, judgement, pieces, step
from tests.integration.judge.test_service import ABSTAINED, EXCLUDED, SCORED, fails
from tests.support.judge_server import JudgeServer


async def test_votes_that_were_answered_are_not_paid_for_again(calls: Calls, server: JudgeServer) -> None:
    """One of two votes fails, so there is no verdict; the repeat asks for that one alone."""
    fields: dict[str, Any] = {"parameters": judge_pb2.JudgementParameters(votes=2, quorum=2)}
    server.behave("good", "400")
    verdict = await calls.judge(**fields)
    assert (verdict.state, verdict.reason) == (EXCLUDED, "JUDGE_REJECTED")
    server.behave("400")
    verdict = await calls.judge(**fields)
    assert (verdict.state, len(server.requests)) == (EXCLUDED, 1)
    server.behave("good")
    verdict = await calls.judge(**fields)
    assert (verdict.state, verdict.value, len(server.requests)) == (SCORED, 1.0, 1)
    (usage,) = (await calls.GetUsage(pb.GetUsageRequest())).usage
    assert (usage.usage.calls, usage.usage.failed_calls, usage.usage.prompt_tokens) == (4, 2, 2000)


async def test_a_vote_that_might_have_decided_a_tie_is_asked_for_again(calls: Calls, server: JudgeServer) -> None:
    fields: dict[str, Any] = {"parameters": judge_pb2.JudgementParameters(votes=3)}
    server.behave("good", "bad", "400")
    verdict = await calls.judge(**fields)
    assert (verdict.state, verdict.reason) == (EXCLUDED, "JUDGE_REJECTED")
    server.behave("good")
    verdict = await calls.judge(**fields)
    assert (verdict.state, verdict.value, len(server.requests)) == (SCORED, 1.0, 1)


async def test_an_answer_that_could_not_be_read_is_asked_for_again(calls: Calls, server: JudgeServer) -> None:
    for behaviour, calls_made in (("half", 3), ("good", 1)):
        server.behave(behaviour)
        await calls.judge()
        assert len(server.requests) == calls_made


async def test_a_request_is_judged_once_under_its_id(calls: Calls, server: JudgeServer) -> None:
    first = await calls.judge(request_id="r1", fresh=True)
    repeats = await asyncio.gather(*(calls.judge(request_id="r1", fresh=True) for _ in range(4)))
    assert all(repeat == first for repeat in repeats)
    assert (len(server.requests), first.usage.calls, first.cached) == (1, 1, False)
    assert (await calls.judge(request_id="r2", fresh=True)).verdict_id != first.verdict_id
    assert len(server.requests) == 2
    other = calls.judge(request_id="r1", fresh=True, instruction="Do that.")
    assert await fails(other, grpc.StatusCode.ALREADY_EXISTS, "r1") == "REQUEST_ID_REUSED"
    assert await fails(calls.judge(request_id="?"), grpc.StatusCode.INVALID_ARGUMENT, "request_id")
    # Another tenant's ids are its own.
    assert (await calls.of("other").judge(request_id="r1", instruction="Do that.")).state == SCORED


async def test_the_first_verdict_of_a_request_stays(calls: Calls, server: JudgeServer) -> None:
    server.behave("400")
    first = await calls.judge(request_id="r1")
    server.behave("good")
    assert await calls.judge(request_id="r1") == first
    assert (first.state, len(server.requests)) == (EXCLUDED, 0)
    found = await calls.judge(request_id="r2")
    assert found.state == SCORED
    cached = await calls.judge(request_id="r3")
    assert (cached.cached, await calls.judge(request_id="r3")) == (True, cached)
    assert len(server.requests) == 1


async def under_way(calls: Calls, server: JudgeServer) -> asyncio.Task[judge_pb2.Verdict]:
    """Request r1, while its judge is asked; the database has forgotten it, as a crash has it do."""
    server.behave("wait")
    judging = asyncio.create_task(calls.judge(request_id="r1", fresh=True))
    await asyncio.wait_for(server.arrived.wait(), 110)
    await forget(calls)
    return judging


async def forget(calls: Calls) -> None:
    """The one request that has begun, as a crash of the database does: nobody waits for the disk there."""
    async with await psycopg.AsyncConnection.connect(calls.process.database, autocommit=True) as connection:
        cursor = await connection.execute("DELETE FROM judge.requests WHERE tenant = %s", (calls.tenant,))
        assert cursor.rowcount == 1


async def test_a_request_that_a_crash_forgot_has_its_verdict(calls: Calls, server: JudgeServer) -> None:
    judging = await under_way(calls, server)
    server.go_on.set()
    verdict = await judging
    assert await calls.judge(request_id="r1", fresh=True) == verdict
    assert (verdict.state, len(server.requests)) == (SCORED, 1)
    other = calls.judge(request_id="r1", fresh=True, instruction="Do that.")
    assert await fails(other, grpc.StatusCode.ALREADY_EXISTS, "r1") == "REQUEST_ID_REUSED"


async def test_a_request_that_found_a_verdict_finds_it_though_a_crash_forgot_it(
    calls: Calls, server: JudgeServer
) -> None:
    judged = await calls.judge()
    found = await calls.judge(request_id="r1")
    await forget(calls)
    assert await calls.judge(request_id="r1") == found
    assert (found.verdict_id, found.cached, len(server.requests)) == (judged.verdict_id, True, 1)


async def test_an_id_that_became_something_else_keeps_to_that(calls: Calls, server: JudgeServer) -> None:
    judging = await under_way(calls, server)
    fields: dict[str, Any] = {"request_id": "r1", "instruction": "Do that."}
    stopped = await calls.judge(**fields, budget=judge_pb2.Budget(tokens=10))
    assert stopped.reason == "BUDGET_EXHAUSTED"
    server.go_on.set()
    verdict = await judging
    later = await calls.judge(**fields, budget=judge_pb2.Budget(tokens=100_000))
    assert (later.state, len(server.requests)) == (SCORED, 2)
    assert later.verdict_id != verdict.verdict_id
    assert await calls.judge(**fields) == later


async def test_a_request_that_the_budget_stopped_goes_on_with_a_larger_one(calls: Calls, server: JudgeServer) -> None:
    stopped = await calls.judge(request_id="r1", budget=judge_pb2.Budget(tokens=10))
    assert (stopped.reason, len(server.requests)) == ("BUDGET_EXHAUSTED", 0)
    assert (await calls.judge(request_id="r1", budget=judge_pb2.Budget(tokens=100_000))).state == SCORED


async def test_a_stream_that_was_cut_judges_nothing(calls: Calls, server: JudgeServer) -> None:
    parts = [pb.JudgeRequest(judgement=judgement(), request_id="r1", more=True)]
    parts += [pb.JudgeRequest(**piece, more=True) for piece in pieces((STEPS,), {})]
    for sent in range(1, len(parts) + 1):

        async def requests(count: int = sent) -> AsyncIterator[pb.JudgeRequest]:
            for part in parts[:count]:
                yield part

        assert await fails(calls.Judge(requests()), grpc.StatusCode.UNAVAILABLE) == "UPLOAD_CUT"
    assert not server.requests
    assert (await calls.judge(request_id="r1", instruction="Do that.")).state == SCORED


async def test_an_outage_leaves_no_item_of_a_batch_out_for_good(calls: Calls, server: JudgeServer) -> None:
    items: dict[str, dict[str, Any]] = {f"i{number}": {"instruction": f"Do {number}."} for number in range(3)}
    server.behave("401")
    verdicts, progress = await calls.batch("b", items)
    assert {verdict.reason for verdict in verdicts.values()} == {"JUDGE_UNAUTHENTICATED"}
    assert (progress[-1].excluded, progress[-1].scored) == (3, 0)
    server.behave("good")
    verdicts, progress = await calls.batch("b", items)
    assert {verdict.value for verdict in verdicts.values()} == {1.0}
    assert (progress[0].excluded, progress[-1].excluded, progress[-1].scored) == (3, 0, 3)
    server.behave("401")
    again, _progress = await calls.batch("b", items)
    assert {verdict.value for verdict in again.values()} == {1.0}
    assert not server.requests


async def test_an_item_that_was_something_else_is_refused_also_beside_its_question(
    calls: Calls, server: JudgeServer
) -> None:
    """Its new words are those of another item, which is being judged at that moment."""
    await calls.batch("b", {"i": {"instruction": "Do that."}})
    server.behave("wait")
    batch = asyncio.create_task(calls.batch("b", {"j": {}, "i": {}}))
    await asyncio.wait_for(server.arrived.wait(), 110)
    server.go_on.set()
    assert await fails(batch, grpc.StatusCode.ALREADY_EXISTS, "'i'") == "ITEM_EXISTS"


async def test_nothing_to_see_is_no_number_and_costs_nothing(calls: Calls, server: JudgeServer) -> None:
    for kind, attempts in {
        "OUTCOME": ([STEPS[0]],),
        "GUI_SUCCESS": (STEPS,),
        "VALUE_CURVE": ([STEPS[0]],),
        "PAIRWISE": (STEPS, [STEPS[0]]),
        "CLAW_EVAL": ([STEPS[0], step(1, "log", trajectory_pb2.ROLE_TOOL)],),
    }.items():
        verdict = await calls.judge(*attempts, kind=kind)
        assert (verdict.state, verdict.reason) == (EXCLUDED, "EVIDENCE_MISSING"), kind
        assert verdict.message
        assert not verdict.HasField("value")
    batch = {"empty": {"steps": [STEPS[0]]}, "whole": {"judges": ["script"]}}
    verdicts, progress = await calls.batch("b", batch)
    assert {item_id: verdict.state for item_id, verdict in verdicts.items()} == {"empty": EXCLUDED, "whole": SCORED}
    # It is no outage: it stays.
    _verdicts, progress = await calls.batch("b", batch)
    assert (progress[0].excluded, len(server.requests)) == (1, 0)


async def test_odd_words_of_a_judge_do_no_harm(calls: Calls, server: JudgeServer) -> None:
    server.behave("odd text")
    verdict = await calls.judge()
    assert (verdict.state, verdict.message) == (ABSTAINED, "I ? cannot \ufffd tell.")
    stored = (await calls.GetVerdict(pb.GetVerdictRequest(verdict_id=verdict.verdict_id))).verdict
    assert stored.message == verdict.message


@asynccontextmanager
async def batches_of(database: str, folder: Path, judge: JudgeSettings) -> AsyncIterator[Batches]:
    """The use cases of a service with this judge, in this process."""
    engine = connect(database)
    turns, lines = Turns(engine, 1), Lines(engine, 2)
    locks, store, claims = QuestionLocks(engine, lines), VerdictStore(turns), ClaimStore(lines)
    calls, endings = CallStore(turns, lines), EndingStore(lines)

    def clock() -> datetime:
        return datetime.now(UTC)

    shelf, answers = RubricShelf(RubricStore(turns), clock), Answers(ObjectStore(folder.as_uri()), TextStore(turns))
    stores = (store, claims, calls, endings)
    endpoint = make_endpoint(judge)
    judging = Judging({judge.name: endpoint}, *stores, shelf, locks, answers, clock, lines)
    try:
        yield Batches(judging, store, clock)
    finally:
        await endpoint.close()
        for lanes in (claims, calls, endings, locks, lines):
            await lanes.close()
        await engine.dispose()


async def run(batches: Batches, tenant: str, instruction: str) -> list[BatchItem]:
    steps = (Step(0, Role.USER, "Do it."), Step(1, Role.ASSISTANT, "Done."))

    async def given() -> AsyncIterator[Given]:
        yield Given("one", Request(Kind.OUTCOME, Task(instruction), (steps,), {}), lambda: None)

    found = [result async for result in batches.run(tenant, "b", Amount(), given())]
    return [item for result in found if not isinstance(result, Batch) for item in result]


async def test_a_batch_goes_on_after_an_upgrade(database: str, tmp_path: Path) -> None:
    """Another setting of the judge, or another prompt, makes another question; in the caller's words it is the same."""
    settings = JudgeSettings(name="j", kind="scripted")
    async with batches_of(database, tmp_path, settings) as batches:
        (before,) = await run(batches, "upgraded", "Do it.")
    async with batches_of(database, tmp_path, settings.model_copy(update={"model": "newer"})) as batches:
        (after,) = await run(batches, "upgraded", "Do it.")
        assert after.verdict == before.verdict
        with pytest.raises(Exception, match="was something else"):
            await run(batches, "upgraded", "Do that.")


async def test_items_of_before_have_no_words_and_fit(database: str) -> None:
    """Migration 0002 on a database with a batch, and back."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE DATABASE upgraded")
    base, query = (database.partition("?")[part] for part in (0, 2))
    url = f"{base.rpartition('/')[0]}/upgraded?{query}"
    migrate(url, schema=SCHEMA, migrations=MIGRATIONS, revision="0001")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("INSERT INTO judge.batch_items VALUES ('t', 'b', 'i', 'key', 'vd-1', false)")
        migrate(url, schema=SCHEMA, migrations=MIGRATIONS)
        rows = connection.execute("SELECT asked, again, verdict_id FROM judge.batch_items").fetchall()
        assert rows == [("", False, "vd-1")]
        migrate(url, schema=SCHEMA, migrations=MIGRATIONS, revision="-2")
        rows = connection.execute("SELECT question_key, verdict_id FROM judge.batch_items").fetchall()
        assert rows == [("", "vd-1")]


async def test_locks_are_bounded_and_none_is_left_behind(database: str) -> None:
    engine = connect(database)
    locks = QuestionLocks(engine, Lines(engine, 1), most=2)
    begun, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def hold(name: str) -> None:
        async with locks.held(name):
            begun.release()
            await go_on.wait()

    async def held() -> int:
        async with await psycopg.AsyncConnection.connect(database) as connection:
            cursor = await connection.execute(
                "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) "
                "WHERE locktype = 'advisory' AND query LIKE '%%advisory%%' AND pg_locks.pid = %s",
                (pid,),
            )
            row = await cursor.fetchone()
        return row[0] if row else 0

    try:
        async with locks.held("first"):
            assert locks._line.connection is not None
            pid = locks._line.connection.info.backend_pid
        holding = [asyncio.create_task(hold(f"lock {number}")) for number in range(5)]
        for _ in range(2):
            await asyncio.wait_for(begun.acquire(), 110)
        assert await held() == 2
        # Of those that hold one and those that wait some leave.
        for task in holding[1:4]:
            task.cancel()
        await asyncio.gather(*holding[1:4], return_exceptions=True)
        go_on.set()
        await asyncio.wait_for(asyncio.gather(holding[0], holding[4]), 110)
        async with asyncio.timeout(110):
            while await held():
                pass
    finally:
        await locks.close()
        await engine.dispose()


async def test_more_transactions_than_connections_wait_for_their_turn(database: str) -> None:
    """A pool of two, whose waiting ends in an error after five seconds; forty calls that all hold a connection."""
    engine = connect(database, pool_size=2)
    turns, running = Turns(engine, 2), 0

    async def one(read: bool) -> int:
        nonlocal running
        async with turns.reading() if read else turns.transaction() as connection:
            running += 1
            assert running <= 2
            found = await connection.scalar(sa.text("SELECT 1 FROM pg_sleep(0.01)"))
            running -= 1
        return int(found)

    try:
        assert sum(await asyncio.gather(*(one(number % 2 == 0) for number in range(40)))) == 40
    finally:
        await engine.dispose()


async def test_calls_that_end_together_are_each_counted_once(database: str) -> None:
    """Many at once, some of them twice; those of a day and of a batch meet in the same rows."""
    engine = connect(database)
    turns = Turns(engine, 4)
    store, lines = VerdictStore(turns), Lines(engine, 1)
    claims, calls = ClaimStore(lines), CallStore(turns, lines)
    today = datetime.now(UTC).date()
    usage = Usage(calls=1, prompt_tokens=10, completion_tokens=1, cost_usd=0.5)
    await store.begin_batch("counted", "b", datetime.now(UTC))

    async def answer(vote: int) -> None:
        kept = Kept(Place("j", vote, False, 0), "t", "0" * 64, Finish.STOP, "", "m", usage, 0.1)
        await calls.called(Owner("counted", "run", "j", "m", "outcome", "b"), usage, today, kept)

    async def failure() -> None:
        await calls.called(Owner("counted", "run", "j", "m", "outcome"), Usage(1, 1), today)

    try:
        await asyncio.gather(*(answer(vote % 300) for vote in range(500)), *(failure() for _ in range(20)))
        known = await claims.known("counted", "run", "", NOWHERE)
        assert {kept.place.vote for kept in known.answers} == set(range(300))
        ((_judge, _model, _rubric, found),) = await calls.usage("counted", date.min, date.max, 10)
        assert (found.calls, found.failed_calls, found.prompt_tokens, found.cost_usd) == (320, 20, 3000, 150.0)
        batch = await store.batch("counted", "b")
        assert batch is not None
        assert (batch.usage.calls, batch.usage.cost_usd) == (300, 150.0)
    finally:
        for lanes in (claims, calls, lines):
            await lanes.close()
        await engine.dispose()
