"""kill -9 in the middle of a batch: what was answered and kept is never asked, and paid, again; counted at the model.

Three rounds by default; `make chaos` makes it fifty, at points that its seed gives.
"""

import asyncio
import os
import random
import re
from collections import Counter
from typing import Any

import grpc
import psycopg
import pytest
from orchard.judge.v1 import judge_pb2

from tests.integration.judge.conftest import Calls, ServiceProcess
from tests.support.judge_server import JudgeServer

ROUNDS = int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "3"))
SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "1"))
ITEMS = 24


def item_and_ticket(body: dict[str, Any]) -> tuple[str, str]:
    """Which item a request to the model is of, and its prompt's random word."""
    system, user = (message["content"] for message in body["messages"])
    item, ticket = re.search(r"\| Do (\S+)\.", user), re.search(r'"ticket": the string "(\w+)"', system)
    assert item is not None
    assert ticket is not None
    return item[1], ticket[1]


async def kept(process: ServiceProcess, batch_id: str, tickets: dict[str, str], votes: int) -> Counter[str]:
    """How many answers of each item were durable: all where there is a verdict, otherwise those of the journal."""
    async with await psycopg.AsyncConnection.connect(process.database) as connection:
        cursor = await connection.execute(
            "SELECT item_id FROM judge.batch_items WHERE tenant = %s AND batch_id = %s", (process.tenant, batch_id)
        )
        found = Counter({row[0]: votes for row in await cursor.fetchall()})
        cursor = await connection.execute("SELECT ticket FROM judge.answers WHERE tenant = %s", (process.tenant,))
        found.update(tickets[row[0]] for row in await cursor.fetchall() if row[0] in tickets)
    return found


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("votes", [1, 2])
async def test_no_answer_is_paid_for_twice(process: ServiceProcess, server: JudgeServer, votes: int) -> None:
    """One vote: its answer and the verdict become durable together. Several: each answer by itself."""
    rng, lost = random.Random(SEED), 0
    parameters = judge_pb2.JudgementParameters(votes=votes)
    for number in range(ROUNDS):
        batch_id = f"b{number}"
        items = {
            f"i{number}-{item}": {"instruction": f"Do i{number}-{item}.", "parameters": parameters}
            for item in range(ITEMS)
        }
        most = rng.randint(1, ITEMS * votes - 1)
        server.behave(*["good"] * most, "hang")
        async with grpc.aio.insecure_channel(process.address) as channel:
            batch = asyncio.create_task(Calls(process, channel).batch(batch_id, items))
            while len(server.requests) < most:
                server.arrived.clear()
                await asyncio.wait_for(server.arrived.wait(), 90)
            await asyncio.sleep(rng.choice([0, rng.uniform(0, 0.2)]))  # somewhere in the middle, as the seed says
            process.kill()
            with pytest.raises(grpc.aio.AioRpcError):
                await batch
        before = [item_and_ticket(body) for body in server.requests]
        safe = await kept(process, batch_id, {ticket: item for item, ticket in before}, votes)
        server.behave("good")
        await asyncio.to_thread(process.start)
        async with grpc.aio.insecure_channel(process.address) as channel:
            verdicts, progress = await Calls(process, channel).batch(batch_id, items)
        assert {item: verdict.value for item, verdict in verdicts.items()} == dict.fromkeys(items, 1.0)
        asked = Counter(item_and_ticket(body)[0] for body in server.requests)
        again = {item: (asked[item], safe[item]) for item in items if asked[item] + safe[item] > votes}
        assert not again, f"asked again although it was kept, in round {number} of seed {SEED}: {again}"
        # Every answer that was kept is counted, once.
        assert (progress[-1].scored, progress[-1].usage.calls) == (ITEMS, ITEMS * votes)
        lost += len(before) + len(server.requests) - ITEMS * votes
    # What was lost was under way at a kill: at most as many calls as there may be at once.
    assert lost <= 16 * ROUNDS
