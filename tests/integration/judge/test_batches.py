"""A batch holds as many items as it judges, however long it is, however slowly its verdicts are read, and in whatever
messages its items come.
"""

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from orchard.judge.v1 import judge_service_pb2 as pb
from orchard.trajectory.v1 import trajectory_pb2

from services.common.errors import UnavailableError
from services.common.peer_status import peer_status
from services.judge.backends.limits import Amount
from services.judge.backends.settings import JudgeSettings
from services.judge.batches import Given
from services.judge.model import Kind, Role, Step, Task
from services.judge.requests import Request
from services.judge.store.verdicts import Batch
from tests.integration.judge.conftest import STEPS, Calls, judgement, pieces, step
from tests.integration.judge.test_repeats import batches_of
from tests.integration.judge.test_service import fails
from tests.support.judge_server import JudgeServer
from tests.support.wire import fields_of

AT_ONCE = 64
"""Items of a batch that are judged or whose verdict waits for the reader."""


async def test_a_batch_takes_in_no_more_than_it_judges(database: str, tmp_path: Path, server: JudgeServer) -> None:
    settings = JudgeSettings(name="j", kind="openai", model="m", base_url=f"{server.url}/v1", concurrency=AT_ONCE)
    steps = (Step(0, Role.USER, "Do it."), Step(1, Role.ASSISTANT, "Done."))
    count, taken, dropped = 5 * AT_ONCE, 0, 0

    def drop() -> None:
        nonlocal dropped
        dropped += 1

    async def given() -> AsyncIterator[Given]:
        nonlocal taken
        for number in range(count):
            taken += 1
            yield Given(f"i{number}", Request(Kind.OUTCOME, Task(f"Do {number}."), (steps,), {}), drop)

    server.behave("wait")
    read = 0
    async with (
        batches_of(database, tmp_path, settings) as batches,
        aclosing(batches.run("bounded", "b", Amount(), given())) as results,
    ):
        await asyncio.wait_for(anext(results), 110)  # how far the batch was
        reading = asyncio.ensure_future(anext(results))
        while len(server.requests) < AT_ONCE:
            server.arrived.clear()
            await asyncio.wait_for(server.arrived.wait(), 110)
        # All of them wait for the model: of the others one at most was taken in, and waits for its turn.
        assert taken <= AT_ONCE + 1
        server.go_on.set()
        found = await asyncio.wait_for(reading, 110)
        while not isinstance(found, Batch):
            read += len(found)
            assert taken - read <= AT_ONCE
            found = await asyncio.wait_for(anext(results), 110)
    assert (read, taken, dropped, len(server.requests)) == (count, count, count, count)


@pytest.mark.parametrize("name", ["item two", "batch b"])
async def test_what_is_given_up_ends_the_batch_with_an_error(
    database: str, tmp_path: Path, server: JudgeServer, name: str
) -> None:
    """Whatever of ours gave it up: a batch that ends well has every verdict."""
    settings = JudgeSettings(name="j", kind="openai", model="m", base_url=f"{server.url}/v1")
    steps = (Step(0, Role.USER, "Do it."), Step(1, Role.ASSISTANT, "Done."))

    async def given() -> AsyncIterator[Given]:
        for item in ("one", "two"):
            yield Given(item, Request(Kind.OUTCOME, Task(f"Do {item}."), (steps,), {}), lambda: None)

    async def ended() -> list[Any]:
        return [result async for result in batches.run(f"interrupted-{name[:4]}", "b", Amount(), given())]

    server.behave("wait")
    async with batches_of(database, tmp_path, settings) as batches:
        running = asyncio.create_task(ended())
        while len(server.requests) < 2:
            server.arrived.clear()
            await asyncio.wait_for(server.arrived.wait(), 110)
        (given_up,) = (task for task in asyncio.all_tasks() if task.get_name() == name)
        given_up.cancel()
        server.go_on.set()
        with pytest.raises(UnavailableError, match="given up"):
            await asyncio.wait_for(running, 110)


def whole(item_id: str, *, attempts: int = 1, **fields: Any) -> pb.WholeItem:
    steps = [pb.AttemptSteps(attempt=number, steps=STEPS) for number in range(attempts)]
    return pb.WholeItem(item_id=item_id, judgement=judgement(**fields), steps=steps)


async def ended(calls: Calls, *parts: dict[str, Any], several: bool = True) -> list[pb.JudgeBatchResponse]:
    async def requests() -> AsyncIterator[pb.JudgeBatchRequest]:
        yield pb.JudgeBatchRequest(start=pb.BatchStart(batch_id="b", several=several))
        for part in parts:
            yield pb.JudgeBatchRequest(**part)

    call = calls.JudgeBatch(requests())
    with peer_status(call):
        return [response async for response in call]


async def test_whole_items_are_judged_as_those_in_pieces(calls: Calls, server: JudgeServer) -> None:
    whole_ones = [whole("a", instruction="a"), whole("b", kind="PAIRWISE", attempts=2)]
    in_pieces = [{"item": pb.ItemStart(item_id="c", judgement=judgement(instruction="c"))}]
    in_pieces += [*pieces((STEPS,), {}), {"end": pb.ItemEnd()}]
    last = {"items": pb.WholeItems(items=[whole("d", instruction="d")])}
    found = await ended(calls, {"items": pb.WholeItems(items=whole_ones)}, *in_pieces, last)
    assert not any(response.HasField("verdict") for response in found)
    told = [item for response in found for item in response.verdicts.verdicts]
    assert sorted(item.item_id for item in told) == ["a", "b", "c", "d"]
    ended_with = found[-1].progress
    # A judge that always prefers the first one, as here, decides nothing between two.
    assert (ended_with.scored, ended_with.excluded + ended_with.abstained) == (3, 1)
    asked = len(server.requests)
    # In the other form they are the same items, and their verdicts come as before where nobody asked for several.
    again = [{"item": pb.ItemStart(item_id="a", judgement=judgement(instruction="a"))}]
    again += [*pieces((STEPS,), {}), {"end": pb.ItemEnd()}]
    found = await ended(calls, *again, several=False)
    assert [response.verdict.item_id for response in found[:4]] == ["a", "b", "c", "d"]
    assert {one.verdict.item_id: one.verdict.verdict.verdict_id for one in found[:4]} == {
        item.item_id: item.verdict.verdict_id for item in told
    }
    assert len(server.requests) == asked


async def test_images_of_a_whole_item_are_shown(calls: Calls, server: JudgeServer) -> None:
    data = b"picture of the end"
    sha256 = hashlib.sha256(data).hexdigest()
    blob = {"blob": {"sha256": sha256, "media_type": "image/png", "size": len(data)}}
    steps = pb.AttemptSteps(steps=[step(0, "Do it.", trajectory_pb2.ROLE_USER), step(1, content=[blob])])
    images = [pb.ImageChunk(sha256=sha256, media_type="image/png", data=part) for part in (data[:7], data[7:])]
    item = pb.WholeItem(item_id="a", judgement=judgement(kind="GUI_SUCCESS"), steps=[steps], images=images)
    found = await ended(calls, {"items": pb.WholeItems(items=[item])})
    (told,) = (item for response in found for item in response.verdicts.verdicts)
    assert list(told.verdict.provenance.image_hashes) == [sha256]
    assert base64.b64encode(data).decode() in json.dumps(server.requests[-1])


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ([{"items": pb.WholeItems()}], "items"),
        ([{"items": pb.WholeItems(items=[whole("")])}], "items.item_id"),
        ([{"items": pb.WholeItems(items=[pb.WholeItem(item_id="a", judgement=judgement())])}], "steps"),
        ([{"items": pb.WholeItems(items=[whole("a", attempts=2)])}], "steps.attempt"),
        ([{"items": pb.WholeItems(items=[whole("a", instruction="")])}], "judgement.instruction"),
        (
            [
                {"item": pb.ItemStart(item_id="a", judgement=judgement())},
                {"items": pb.WholeItems(items=[whole("b")])},
            ],
            "part",
        ),
    ],
)
async def test_items_that_are_not_whole_are_refused(
    calls: Calls, server: JudgeServer, parts: list[dict[str, Any]], field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ended(calls, *parts)
    assert (raised.value.code(), fields_of(raised.value)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
    assert server.requests == []


@pytest.mark.parametrize("fields", [{"instruction": ""}, {"judges": ["nobody"]}, {"quorum": 2}])
@pytest.mark.parametrize("form", ["whole", "in pieces"])
async def test_what_is_wrong_with_an_item_names_it(calls: Calls, form: str, fields: dict[str, Any]) -> None:
    given = {"parameters": fields} if "quorum" in fields else fields
    if form == "whole":
        parts = [{"items": pb.WholeItems(items=[whole("a"), whole("bad-one", **given)])}]
    else:
        parts = [{"item": pb.ItemStart(item_id="bad-one", judgement=judgement(**given))}]
        parts += [*pieces((STEPS,), {}), {"end": pb.ItemEnd()}]
    await fails(ended(calls, *parts), grpc.StatusCode.INVALID_ARGUMENT, "item 'bad-one': ")


async def test_an_id_for_two_things_at_once_is_refused(calls: Calls, server: JudgeServer) -> None:
    """While the first is judged: neither of both loses its verdict without a word."""
    first, second = whole("a", instruction="Do that."), whole("a", instruction="Do this.")
    server.behave("wait")
    judging = asyncio.create_task(ended(calls, {"items": pb.WholeItems(items=[first])}))
    await asyncio.wait_for(server.arrived.wait(), 110)
    for items in ([second], [first, second]):
        refused = ended(calls, {"items": pb.WholeItems(items=items)})
        assert await fails(refused, grpc.StatusCode.ALREADY_EXISTS, "'a'") == "ITEM_EXISTS"
    server.go_on.set()
    assert (await judging)[-1].progress.scored == 1
    # It is what it was first, and the same twice is one item.
    found = await ended(calls, {"items": pb.WholeItems(items=[first, first])})
    assert (found[-1].progress.scored, len(server.requests)) == (1, 1)
    fresh = [whole("b", instruction="Do that.", fresh=True), whole("b", instruction="Do this.", fresh=True)]
    refused = ended(calls, {"items": pb.WholeItems(items=fresh)})
    assert await fails(refused, grpc.StatusCode.ALREADY_EXISTS, "'b'") == "ITEM_EXISTS"


async def test_messages_of_a_newer_client_are_refused(calls: Calls, server: JudgeServer) -> None:
    """They have parts that this service does not know: less would be judged than was sent."""
    newer = b"\x9a\x06\x00"  # field 99, empty

    async def batch(*parts: pb.JudgeBatchRequest) -> None:
        async def requests() -> AsyncIterator[pb.JudgeBatchRequest]:
            yield pb.JudgeBatchRequest(start=pb.BatchStart(batch_id="b"))
            for part in parts:
                yield part

        call = calls.JudgeBatch(requests())
        with peer_status(call):
            _ = [response async for response in call]

    async def one(*parts: pb.JudgeRequest) -> AsyncIterator[pb.JudgeRequest]:
        for part in parts:
            yield part

    begun = pb.JudgeBatchRequest(item=pb.ItemStart(item_id="a", judgement=judgement()))
    steps = pb.AttemptSteps(steps=STEPS)
    unknown = pb.JudgeBatchRequest.FromString(newer)
    within = [begun, pb.JudgeBatchRequest(steps=steps), unknown, pb.JudgeBatchRequest(end=pb.ItemEnd())]
    after = [pb.JudgeRequest(judgement=judgement()), pb.JudgeRequest(steps=steps), pb.JudgeRequest.FromString(newer)]
    for call in (batch(unknown), batch(*within), calls.Judge(one(*after))):
        await fails(call, grpc.StatusCode.INVALID_ARGUMENT)
    assert server.requests == []


async def test_first_steps_are_of_the_first_message(calls: Calls, server: JudgeServer) -> None:
    """Elsewhere they would be left out, and less judged than was sent."""

    async def requests() -> AsyncIterator[pb.JudgeRequest]:
        yield pb.JudgeRequest(judgement=judgement(), more=True)
        yield pb.JudgeRequest(
            steps=pb.AttemptSteps(steps=STEPS), first_steps=[pb.AttemptSteps(steps=[step(2, "And more.")])]
        )

    assert await fails(calls.Judge(requests()), grpc.StatusCode.INVALID_ARGUMENT, "first_steps")
    assert server.requests == []


async def test_first_steps_come_before_those_of_other_messages(calls: Calls, server: JudgeServer) -> None:
    first = pb.JudgeRequest(judgement=judgement(), first_steps=[pb.AttemptSteps(steps=STEPS)], more=True)
    rest = pb.JudgeRequest(steps=pb.AttemptSteps(steps=[step(2, "And more.")]))

    async def requests(*messages: pb.JudgeRequest) -> AsyncIterator[pb.JudgeRequest]:
        for message in messages:
            yield message

    together = (await calls.Judge(requests(first, rest))).verdict
    in_pieces = await calls.judge([*STEPS, step(2, "And more.")])
    assert (in_pieces.verdict_id, in_pieces.cached) == (together.verdict_id, True)
    assert len(server.requests) == 1
