"""Replicas that share a database, and a service that stops in the middle."""

import asyncio

import grpc
import psycopg
import pytest

from tests.integration.judge.conftest import Calls, ServiceProcess, running
from tests.support.judge_server import JudgeServer


async def locking(database: str) -> int:
    """How many replicas have tried to take a question: the connection that they do it on does nothing else."""
    async with await psycopg.AsyncConnection.connect(database) as connection:
        cursor = await connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_try_advisory_lock%'"
        )
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
