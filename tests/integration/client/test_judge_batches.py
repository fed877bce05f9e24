"""A batch of judgements over connections that break, against a gRPC server that breaks them when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import orchard
import pytest
from orchard import Judgement
from orchard.judge.v1 import judge_pb2, judge_service_pb2_grpc
from orchard.judge.v1 import judge_service_pb2 as pb

from services.common.errors import UnavailableError
from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.server import Server

BACKSTOP = 110.0
Attempt = Callable[[AsyncIterator[pb.JudgeBatchRequest]], AsyncIterator[pb.JudgeBatchResponse]]


class Judges(judge_service_pb2_grpc.JudgeServiceServicer):
    """Serves each attempt at a batch as the next of `attempts` says, the last one for ever. `begun`: how many came."""

    def __init__(self, *attempts: Attempt) -> None:
        self._attempts = attempts
        self.begun = 0

    async def JudgeBatch(self, request_iterator, context):
        attempt = self._attempts[min(self.begun, len(self._attempts) - 1)]
        self.begun += 1
        async for response in attempt(request_iterator):
            yield response


@asynccontextmanager
async def client_of(
    judges: judge_service_pb2_grpc.JudgeServiceServicer, *, retry_seconds: float
) -> AsyncIterator[orchard.AsyncSandboxClient]:
    server = Server(
        interceptor=CallInterceptor(authenticator=None), health=Health(), service_names=[], reflection=False
    )
    judge_service_pb2_grpc.add_JudgeServiceServicer_to_server(judges, server.grpc_server)
    port = await server.start("127.0.0.1:0")
    try:
        async with orchard.AsyncSandboxClient(f"127.0.0.1:{port}", api_key="k", retry_timeout=retry_seconds) as client:
            yield client
    finally:
        await server.stop()


def asked() -> Judgement:
    return Judgement("outcome", "Do it.", [{"role": "assistant", "content": "Done."}])


def verdict(item_id: str) -> pb.JudgeBatchResponse:
    scored = judge_pb2.Verdict(verdict_id=f"vd-{item_id}", state=judge_pb2.VERDICT_STATE_SCORED, value=1.0)
    return pb.JudgeBatchResponse(verdicts=pb.ItemVerdicts(verdicts=[pb.ItemVerdict(item_id=item_id, verdict=scored)]))


PROGRESS = pb.JudgeBatchResponse(progress=pb.BatchProgress(batch_id="b"))


@pytest.mark.parametrize("known", [[PROGRESS], [verdict("a"), PROGRESS]], ids=["nothing", "a verdict"])
async def test_a_batch_that_cannot_go_on_is_given_up(known: Sequence[pb.JudgeBatchResponse]) -> None:
    """Every attempt tells what is known already, and fails. That it was told is no success of the next one."""

    async def attempt(requests: Any) -> AsyncIterator[pb.JudgeBatchResponse]:
        await anext(requests)
        for response in known:
            yield response
        raise UnavailableError("the answers are not kept now", reason="ANSWERS_NOT_KEPT")

    judges = Judges(attempt)
    found = []
    async with client_of(judges, retry_seconds=3) as client, asyncio.timeout(BACKSTOP):
        with pytest.raises(orchard.Unavailable, match="not kept"):
            async for item in client.judge.batch("b", {"a": asked(), "b": asked()}):
                found.append(item.item_id)
    assert found == [item.item_id for response in known for item in response.verdicts.verdicts]
    assert judges.begun > 1


async def test_only_items_without_a_verdict_are_sent_again() -> None:
    """One that comes twice is not kept for that once it has its verdict."""
    told, sent_again = asyncio.Event(), []

    async def items() -> AsyncIterator[tuple[str, Judgement]]:
        yield "a", asked()
        yield "b", asked()
        await told.wait()
        yield "a", asked()
        yield "c", asked()

    async def first(requests: Any) -> AsyncIterator[pb.JudgeBatchResponse]:
        seen: list[str] = []
        async for request in requests:
            seen += [item.item_id for item in request.items.items]
            if seen == ["a", "b"]:
                yield verdict("a")
            elif seen == ["a", "b", "a", "c"]:
                raise UnavailableError("it stops", reason="SERVER_STOPPING")

    async def second(requests: Any) -> AsyncIterator[pb.JudgeBatchResponse]:
        async for request in requests:
            sent_again.extend(item.item_id for item in request.items.items)
        yield verdict("a")
        for item_id in sent_again:
            yield verdict(item_id)

    found = []
    async with client_of(Judges(first, second), retry_seconds=60) as client, asyncio.timeout(BACKSTOP):
        async for item in client.judge.batch("b", items()):
            found.append(item.item_id)
            told.set()
    assert sent_again == ["b", "c"]
    assert found == ["a", "b", "c"]


async def test_whoever_is_cancelled_while_a_batch_is_closed_is_cancelled() -> None:
    """The iterator of its items takes its time to end."""
    ending, went_on = asyncio.Event(), False

    async def items() -> AsyncIterator[tuple[str, Judgement]]:
        try:
            yield "a", asked()
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.Event().wait()

    async def attempt(requests: Any) -> AsyncIterator[pb.JudgeBatchResponse]:
        await anext(requests)
        yield verdict("a")
        async for _ in requests:
            pass

    async def use(client: orchard.AsyncSandboxClient) -> None:
        nonlocal went_on
        async with aclosing(client.judge.batch("b", items())) as batch:
            await anext(batch)
        went_on = True

    async with client_of(Judges(attempt), retry_seconds=60) as client, asyncio.timeout(BACKSTOP):
        using = asyncio.create_task(use(client))
        await ending.wait()
        using.cancel()
        await asyncio.wait({using})
    assert (using.cancelled(), went_on) == (True, False)
