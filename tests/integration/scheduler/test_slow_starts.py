"""Why a start takes long, from the watcher's word to whoever waits, with a real Valkey."""

import asyncio

import pytest

from services.common.states import Reason, State
from services.scheduler.store import LeaseStore
from tests.integration.scheduler.pieces import Pieces, assemble
from tests.integration.scheduler.records import seen, started, wanted

BACKSTOP = 110


@pytest.fixture
async def pieces(store: LeaseStore) -> Pieces:
    return assemble(store)


async def test_whoever_waits_is_told_what_holds_the_start_up(pieces: Pieces) -> None:
    record = wanted("a")
    await started(pieces.store, record)
    told = []
    events = [
        seen(record, State.STARTING, 5, reason=Reason.UNSCHEDULABLE, message="0/3 nodes are available"),
        seen(record, State.STARTING, 6, reason=Reason.IMAGE_PULL, message="no such image"),
        seen(record, State.FAILED, 7, reason=Reason.IMAGE_PULL, message="no such image in 15 min"),
    ]
    async with pieces.reconciling(), asyncio.timeout(BACKSTOP):
        async for now in pieces.scheduler.wait("t", "a", until_terminal=False, stopping=asyncio.Event()):
            told.append((now.state, now.reason, now.message))
            if events:
                # One at a time: a change that is overtaken need not be told.
                pieces.cache.tell(events.pop(0))
    assert told == [
        (State.STARTING, Reason.UNSPECIFIED, ""),
        (State.STARTING, Reason.UNSCHEDULABLE, "0/3 nodes are available"),
        (State.STARTING, Reason.IMAGE_PULL, "no such image"),
        (State.FAILED, Reason.IMAGE_PULL, "no such image in 15 min"),
    ]


async def test_a_start_with_nothing_to_say_costs_no_write(pieces: Pieces) -> None:
    record = wanted("a")
    await started(pieces.store, record)
    pieces.cache.tell(seen(record, State.STARTING, 5))
    pieces.cache.tell(seen(wanted("b"), State.READY, 6, uid="u2"))
    (first,) = await pieces.reconciler._backlog.next(BACKSTOP)
    assert first.uid == "u2"
