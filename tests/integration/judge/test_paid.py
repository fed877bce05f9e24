"""What is paid for is kept, whoever leaves and whatever else fails; waiting for a turn is no outage."""

import asyncio
import threading

import pytest
from orchard.rewards.scores import Scored

from services.common.errors import ResourceExhaustedError, UnavailableError
from services.judge.building import LARGE, Prompts, worked_out
from services.judge.model import Kind, Question, Role, Step, Task
from tests.integration.judge.test_asking import Notes, ask, question, settings
from tests.support.judge_server import JudgeServer


async def spin() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def arrivals(server: JudgeServer, count: int) -> None:
    """Until so many calls have arrived."""
    while len(server.requests) < count:
        server.arrived.clear()
        await asyncio.wait_for(server.arrived.wait(), 110)


async def test_votes_are_kept_where_a_sibling_fails(server: JudgeServer) -> None:
    """The journal cannot take the first vote; the others are asked, answered and kept before that is told."""
    notes = Notes(0)
    with pytest.raises(UnavailableError):
        await ask(settings(server, concurrency=1), question(), votes=3, notes=notes)
    assert sorted(kept.place.vote for kept, _text in notes.given) == [1, 2]
    before = len(server.requests)
    notes.broken = ()
    votes = await ask(settings(server), question(), votes=3, notes=notes)
    assert [vote.reading.score for vote in votes] == [Scored(1)] * 3
    assert before == 3
    assert len(server.requests) == 4


async def test_no_call_is_made_whose_answer_could_not_be_kept(server: JudgeServer) -> None:
    """It waits for its turn, and looks when that has come; the one before it comes to its end."""
    notes = Notes()
    server.behave("wait")
    asking = asyncio.create_task(ask(settings(server, concurrency=1), question(), votes=2, notes=notes))
    await arrivals(server, 1)
    notes.full = True
    server.go_on.set()
    with pytest.raises(UnavailableError, match="full"):
        await asking
    assert len(notes.given) == len(server.requests) == 1


async def test_an_answer_is_kept_whose_caller_leaves_while_it_is_stored(server: JudgeServer) -> None:
    notes = Notes()
    notes.go_on.clear()
    asking = asyncio.create_task(ask(settings(server), question(), notes=notes))
    await asyncio.wait_for(notes.asked_to_keep.wait(), 110)
    asking.cancel()
    await spin()
    notes.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(notes.given) == 1


async def test_a_call_under_way_comes_to_its_end_and_no_other_is_begun(server: JudgeServer) -> None:
    notes = Notes()
    server.behave("wait")
    asking = asyncio.create_task(ask(settings(server, concurrency=1), question(), votes=3, notes=notes))
    await arrivals(server, 1)
    asking.cancel()
    await spin()
    server.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(notes.given) == len(server.requests) == 1


async def test_a_service_that_stops_gives_up_calls_whose_callers_left(server: JudgeServer) -> None:
    """They are counted: whether they are paid for nobody knows."""
    notes, stopping = Notes(), asyncio.Event()
    server.behave("hang")
    asking = asyncio.create_task(ask(settings(server), question(), notes=notes, stopping=stopping))
    await arrivals(server, 1)
    asking.cancel()
    await spin()
    assert not asking.done()
    stopping.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (notes.given, notes.failures) == ([], 1)


async def test_waiting_for_ones_own_turn_is_no_outage(server: JudgeServer) -> None:
    """One call an hour: the second waits as long as its caller does, and then others have its place."""
    asking = asyncio.create_task(ask(settings(server, requests_per_minute=1 / 60), question(), votes=2))
    await arrivals(server, 1)
    server.arrived.clear()
    await spin()
    assert not asking.done()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(server.requests) == 1


async def test_a_line_that_is_too_long_is_told(server: JudgeServer) -> None:
    server.behave("wait")
    asking = asyncio.create_task(ask(settings(server, concurrency=1, queue=1), question(), votes=3))
    await arrivals(server, 1)
    await spin()
    server.go_on.set()
    with pytest.raises(ResourceExhaustedError) as raised:
        await asking
    assert raised.value.reason == "JUDGE_QUEUE_FULL"
    assert len(server.requests) == 2


async def test_all_votes_have_the_same_prompt_and_each_its_own_key(server: JudgeServer) -> None:
    await ask(settings(server), question(), votes=4)
    assert len(server.requests) == 4
    assert all(body == server.requests[0] for body in server.requests)
    assert len({headers["idempotency-key"] for headers in server.headers}) == 4


async def test_a_large_question_is_gone_over_in_a_thread() -> None:
    def asked(characters: int) -> Question:
        steps = (Step(0, Role.USER, "Do it."), Step(1, Role.ASSISTANT, "x" * characters))
        return Question(Kind.OUTCOME, Task("Do it."), (steps,))

    here = threading.get_ident()
    assert await worked_out(asked(10), threading.get_ident) == here
    assert await worked_out(asked(LARGE + 1), threading.get_ident) != here
    prompts = Prompts(asked(LARGE + 1))
    both = await asyncio.gather(*(prompts.of() for _ in range(8)))
    assert len({id(prompt) for _question, prompt in both}) == 1
