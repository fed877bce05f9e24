"""Replicas that share a database, and a service that stops in the middle."""

import asyncio
import secrets
from datetime import datetime

import grpc
import psycopg
import pytest

from services.common.db import connect
from services.common.errors import UnavailableError
from services.judge.store import locks as store_locks
from services.judge.store.claims import NOWHERE, Known, Sought
from services.judge.store.lanes import Lines
from services.judge.store.locks import LockLostError, QuestionLocks, key_of
from tests.integration.judge.conftest import STEPS, Calls, ServiceProcess, running
from tests.integration.judge.test_service import SCORED
from tests.support.judge_server import JudgeServer

# With the lock comes a look at what is known under it, by the next statement; where nothing may be taken, without.
TRIED = """
application_name = 'orchard-judge-locks'
AND (query LIKE 'SELECT pg_try_advisory_lock%%' OR query LIKE '%%SELECT newest.*, earlier.*%%')
"""


async def locking(database: str) -> int:
    """How many replicas have tried to take a question: the connection that they do it on does nothing else."""
    async with await psycopg.AsyncConnection.connect(database) as connection:
        cursor = await connection.execute(f"SELECT count(*) FROM pg_stat_activity WHERE {TRIED}", ())
        row = await cursor.fetchone()
    return row[0] if row is not None else 0


async def test_two_replicas_judge_a_question_once(process: ServiceProcess, server: JudgeServer) -> None:
    server.behave("wait")
    with running(process.database, process.objects, server.port) as twin:
        async with (
            grpc.aio.insecure_channel(process.address) as one,
            grpc.aio.insecure_channel(twin.address) as other,
        ):
            first = asyncio.create_task(Calls(process, one).judge())
            await asyncio.wait_for(server.arrived.wait(), 90)
            second = asyncio.create_task(Calls(twin, other, process.tenant).judge())
            while await locking(process.database) < 2:
                assert not second.done()
            server.go_on.set()
            verdicts = await asyncio.gather(first, second)
        assert [verdict.cached for verdict in verdicts] == [False, True]
        assert verdicts[0].verdict_id == verdicts[1].verdict_id
        assert len(server.requests) == 1


async def holder(database: str, *, but: int = 0) -> tuple[int, int]:
    """The process of the server that holds a question, and its key; not the one that did before."""
    async with (
        asyncio.timeout(90),
        await psycopg.AsyncConnection.connect(database, autocommit=True) as connection,
    ):
        while True:
            cursor = await connection.execute(
                "SELECT pid, (classid::bigint << 32) | objid::bigint FROM pg_locks "
                "WHERE locktype = 'advisory' AND granted AND pid <> %s",
                (but,),
            )
            if row := await cursor.fetchone():
                return row[0], row[1]


async def tries(database: str, since: datetime) -> set[datetime]:
    """When a question was last tried to be taken by whoever has tried since then."""
    async with await psycopg.AsyncConnection.connect(database) as connection:
        cursor = await connection.execute(
            f"SELECT query_start FROM pg_stat_activity WHERE {TRIED} AND query_start > %s",
            (since,),
        )
        return {row[0] for row in await cursor.fetchall()}


async def now(database: str) -> datetime:
    """By the clock of the database."""
    async with await psycopg.AsyncConnection.connect(database) as connection:
        row = await (await connection.execute("SELECT clock_timestamp()")).fetchone()
    assert row is not None
    found: datetime = row[0]
    return found


async def in_line(database: str, pid: int) -> None:
    """Until a process of the server waits for a lock."""
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        row = None
        while row is None:
            query = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND pid = %s"
            row = await (await connection.execute(query, (pid,))).fetchone()


async def terminate(database: str, pid: int) -> None:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        # It waits until the process has ended.
        await connection.execute("SELECT pg_terminate_backend(%s, 60000)", (pid,))


async def test_a_replica_that_loses_its_connection_keeps_its_questions(
    process: ServiceProcess, server: JudgeServer
) -> None:
    server.behave("wait")
    with running(process.database, process.objects, server.port) as twin:
        async with (
            grpc.aio.insecure_channel(process.address) as one,
            grpc.aio.insecure_channel(twin.address) as other,
        ):
            first = asyncio.create_task(Calls(process, one).judge())
            await asyncio.wait_for(server.arrived.wait(), 90)
            lost, _key = await holder(process.database)
            await terminate(process.database, lost)
            await holder(process.database, but=lost)
            second = asyncio.create_task(Calls(twin, other, process.tenant).judge())
            while await locking(process.database) < 2:
                assert not second.done()
            server.go_on.set()
            verdicts = await asyncio.gather(first, second)
        assert [verdict.cached for verdict in verdicts] == [False, True]
        assert verdicts[0].verdict_id == verdicts[1].verdict_id
        assert len(server.requests) == 1


async def test_a_question_that_somebody_else_took_waits_for_them(process: ServiceProcess, server: JudgeServer) -> None:
    """A pair is asked about twice. Between the calls the lock is lost to one who has stood in line for it."""
    server.behave("wait", "bad")
    async with (
        grpc.aio.insecure_channel(process.address) as channel,
        await psycopg.AsyncConnection.connect(process.database, autocommit=True) as other,
        asyncio.timeout(90),
    ):
        judging = asyncio.create_task(Calls(process, channel).judge(STEPS, STEPS, kind="PAIRWISE"))
        await server.arrived.wait()
        lost, key = await holder(process.database)
        taking = asyncio.create_task(other.execute("SELECT pg_advisory_lock(%s)", (key,)))
        await in_line(process.database, other.info.backend_pid)
        await terminate(process.database, lost)
        await taking
        server.go_on.set()
        # It tries again and again, and asks for nothing meanwhile.
        since, seen = await now(process.database), set[datetime]()
        while len(seen) < 4:
            assert not judging.done()
            seen |= await tries(process.database, since)
        assert len(server.requests) == 1
        await other.execute("SELECT pg_advisory_unlock(%s)", (key,))
        verdict = await judging
        assert (verdict.state, verdict.usage.calls, len(server.requests)) == (SCORED, 2, 2)


async def test_what_is_held_is_held_again_or_told(database: str) -> None:
    engine = connect(database)
    locks = QuestionLocks(engine, Lines(engine, 1))
    try:
        async with (
            locks.held("kept") as kept,
            locks.held("lost") as lost,
            await psycopg.AsyncConnection.connect(database, autocommit=True) as other,
            asyncio.timeout(110),
        ):
            await kept.sure()
            assert locks._line.connection is not None
            pid = locks._line.connection.info.backend_pid
            taking = asyncio.create_task(other.execute("SELECT pg_advisory_lock(%s)", (key_of("lost"),)))
            await in_line(database, other.info.backend_pid)
            await terminate(database, pid)
            await taking
            with pytest.raises(LockLostError):
                await lost.sure()
            await kept.sure()
            for name, is_free in (("kept", False), ("lost", True)):
                cursor = await other.execute("SELECT pg_try_advisory_lock(%s)", (key_of(name),))
                assert await cursor.fetchone() == (is_free,)
    finally:
        await locks.close()
        await engine.dispose()


async def test_whoever_held_a_question_comes_first_after_an_outage(database: str) -> None:
    """It takes the connections of both replicas, and the one that held nothing is the first to be back."""
    engine = connect(database)
    one, other = (QuestionLocks(engine, Lines(engine, 1), grace_seconds=3600) for _ in range(2))

    async def take() -> None:
        async with other.held("question"):
            raise AssertionError("it was held")

    try:
        async with other.held("something else"):
            pass
        async with asyncio.timeout(110), one.held("question") as held:
            await one._line._turn.acquire()
            try:
                connections = [locks._line.connection for locks in (one, other)]
                for connection in connections:
                    assert connection is not None
                    await terminate(database, connection.info.backend_pid)
                with pytest.raises(UnavailableError):
                    await take()
                taking = asyncio.create_task(take())
                since = await now(database)
                while not await tries(database, since):
                    assert not taking.done()
            finally:
                one._line._turn.release()
            await held.sure()
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
    finally:
        await one.close()
        await other.close()
        await engine.dispose()


FULL_TABLE = """
CREATE OR REPLACE FUNCTION full_table(keys bigint[]) RETURNS SETOF boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY SELECT pg_try_advisory_lock(key) FROM unnest(keys) AS key;
    IF cardinality(keys) > 1 THEN RAISE 'full' USING ERRCODE = '53200'; END IF;
END $$
"""


@pytest.mark.parametrize("sought", [None, Sought("t", "run", "key", NOWHERE)], ids=["alone", "with-a-look"])
async def test_locks_that_were_too_many_together_are_let_go_by_one_letting_go(
    database: str, monkeypatch: pytest.MonkeyPatch, sought: Sought | None
) -> None:
    """The server's table of locks is full after some of a group, which are tried one by one then."""
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        await connection.execute(FULL_TABLE)
    monkeypatch.setattr(store_locks, "_TRY", "SELECT full_table(%s::bigint[])")
    engine = connect(database)
    one, other = (QuestionLocks(engine, Lines(engine, 1)) for _ in range(2))

    async def take(replica: QuestionLocks, name: str) -> None:
        async with replica.held(name, sought) as held:
            assert held.known == (None if sought is None else Known(None, None, []))

    try:
        async with asyncio.timeout(20):
            for replica in (one, other):
                await asyncio.gather(*(take(replica, f"question {number}") for number in range(3)))
    finally:
        await one.close()
        await other.close()
        await engine.dispose()


async def test_a_service_that_stops_tells_its_batches(process: ServiceProcess, server: JudgeServer) -> None:
    server.behave("good", "hang")
    items = {f"i{number}": {"instruction": f"Do {number}."} for number in range(3)}
    async with grpc.aio.insecure_channel(process.address) as channel:
        batch = asyncio.create_task(Calls(process, channel).batch("b", items))
        while len(server.requests) < 3:
            server.arrived.clear()
            await asyncio.wait_for(server.arrived.wait(), 90)
        # In a thread: the server that judges is in this loop.
        assert await asyncio.to_thread(process.stop) == 0
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await batch
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    server.behave("good")
    await asyncio.to_thread(process.start)
    async with grpc.aio.insecure_channel(process.address) as channel:
        verdicts, _progress = await Calls(process, channel).batch("b", items)
    assert {item_id: verdict.value for item_id, verdict in verdicts.items()} == dict.fromkeys(items, 1.0)
    assert len(server.requests) in (2, 3)


async def test_what_cannot_be_read_is_told_to_whom_it_concerns_and_no_lock_stays(database: str) -> None:
    """In a rolling upgrade a later version may have kept an answer that this one does not know."""
    tenant = f"t-{secrets.token_hex(4)}"
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        await connection.execute(
            "INSERT INTO judge.answers (tenant, run, judge, vote, swapped, attempt, ticket, sha256, finish, words, "
            "model, calls, failed_calls, prompt_tokens, completion_tokens, cached_tokens, cost_usd, latency_seconds) "
            "VALUES (%s, 'later', 'j', 0, false, 0, 't', 's', 'of a later version', '', 'm', 1, 0, 0, 0, 0, 0, 0)",
            (tenant,),
        )
    engine = connect(database)
    one, other = (QuestionLocks(engine, Lines(engine, 1)) for _ in range(2))

    async def take(replica: QuestionLocks, name: str, run: str) -> bool:
        async with replica.held(f"{tenant}/{name}", Sought(tenant, run, "", NOWHERE)) as held:
            return held.known is not None

    try:
        async with asyncio.timeout(60):
            runs = ("now", "later", "now")
            results = await asyncio.gather(
                *(take(one, str(number), run) for number, run in enumerate(runs)), return_exceptions=True
            )
            assert [type(result) for result in results] == [bool, ValueError, bool]
            for number in range(3):
                assert await take(other, str(number), "now")
    finally:
        await one.close()
        await other.close()
        await engine.dispose()
