"""Scripts that are asked for while others run, against a real Valkey."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis
from redis.exceptions import ResponseError

from services.common.errors import UnavailableError
from services.scheduler.scripts import Scripts
from services.scheduler.store import LeaseStore
from tests.integration.scheduler.records import create, wanted


@pytest.fixture
async def scripts(valkey: redis.Redis) -> AsyncIterator[Scripts]:
    scripts = Scripts(valkey, limit_seconds=60)
    yield scripts
    await scripts.close()


async def evaluated(valkey: redis.Redis) -> int:
    """How many scripts the server has run."""
    stats = await valkey.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


async def reads(valkey: redis.Redis) -> int:
    """How often the server has read something from a client."""
    return (await valkey.info("stats"))["total_reads_processed"]


async def ended_of(scripts: Scripts, sandbox_id: str) -> int:
    """The answer of a script that finds nothing to end says so of each name by itself."""
    return await scripts.run("finish", "t", sandbox_id, "none", 6, 0, "")


async def test_each_asker_gets_the_answer_to_its_own(scripts: Scripts) -> None:
    ids = [f"s{number}" for number in range(200)]
    missing = await asyncio.gather(*(scripts.run("renew", "last_heartbeat_ms", "t", one, "") for one in ids))
    assert missing == [[f"t/{one}".encode()] for one in ids]


async def test_those_asked_for_meanwhile_share_a_round_trip(scripts: Scripts, valkey: redis.Redis) -> None:
    await ended_of(scripts, "a")  # the connection is made, and the script known
    before, ran = await reads(valkey), await evaluated(valkey)
    await asyncio.gather(*(ended_of(scripts, f"s{number}") for number in range(64)))
    assert await evaluated(valkey) - ran == 64
    # The questions of this test are among them.
    assert await reads(valkey) - before < 10


async def test_a_server_that_forgot_its_scripts_is_told_them_again(scripts: Scripts, valkey: redis.Redis) -> None:
    await ended_of(scripts, "a")
    await valkey.script_flush()
    found = await asyncio.gather(
        ended_of(scripts, "a"), scripts.run("renew", "last_heartbeat_ms", "t", "b", ""), ended_of(scripts, "c")
    )
    assert found == [0, [b"t/b"], 0]


async def test_the_fault_of_one_is_nobody_elses(scripts: Scripts) -> None:
    good, bad, also_good = await asyncio.gather(
        ended_of(scripts, "a"), scripts.run("renew", "field", "t"), ended_of(scripts, "c"), return_exceptions=True
    )
    assert (good, also_good) == (0, 0)
    assert isinstance(bad, ResponseError)


async def test_one_that_gives_up_takes_no_other_with_it(scripts: Scripts) -> None:
    asked = [asyncio.create_task(ended_of(scripts, f"s{number}")) for number in range(3)]
    await asyncio.sleep(0)
    asked[1].cancel()
    first, given_up, last = await asyncio.gather(*asked, return_exceptions=True)
    assert (first, last) == (0, 0)
    assert isinstance(given_up, asyncio.CancelledError)


async def test_a_large_request_does_not_wait_for_ever_behind_others(store: LeaseStore) -> None:
    """Several round trips where one would be too large."""
    records = [wanted(f"s{number}", spec=bytes(1 << 20)) for number in range(12)]
    outcomes = await asyncio.gather(*(create(store, record) for record in records))
    assert [outcome for outcome, *_ in outcomes] == ["created"] * 12


async def test_a_server_that_is_away_is_told_to_everyone_that_waits() -> None:
    store = LeaseStore("unix:///nonexistent/valkey.sock")
    found = await asyncio.gather(*(store.sweep(1) for _ in range(5)), return_exceptions=True)
    assert [type(one) for one in found] == [UnavailableError] * 5
    await store.close()


async def test_what_waits_when_it_is_closed_ends(scripts: Scripts) -> None:
    asked = [asyncio.create_task(ended_of(scripts, f"s{number}")) for number in range(3)]
    await asyncio.sleep(0)
    await scripts.close()
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in found)
