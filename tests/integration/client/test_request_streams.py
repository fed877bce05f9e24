"""Streams of requests to services behind the gateway, however they come: whole at once, slowly, empty, cut."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
import pytest
from orchard.trajectory.v1 import trajectory_pb2
from orchard.trajectory.v1 import trajectory_service_pb2 as pb
from orchard.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from services.common.peer_status import peer_status
from tests.support.platform import PlatformProcess

PAUSES = [0.0, 0.002, 0.05]
"""Seconds between messages."""


class Bodies:
    """PutBlob and GetBlob, message by message."""

    def __init__(self, platform: PlatformProcess, channel: grpc.aio.Channel) -> None:
        self.stub = TrajectoryServiceStub(channel)
        self.metadata = (("authorization", f"Bearer {platform.api_key}"),)

    def put(self, requests: AsyncIterator[pb.PutBlobRequest]) -> grpc.aio.StreamUnaryCall:
        return self.stub.PutBlob(requests, metadata=self.metadata, timeout=60)

    async def stored(self, sha256: str) -> bytes | None:
        call = self.stub.GetBlob(pb.GetBlobRequest(sha256=sha256), metadata=self.metadata, timeout=60)
        try:
            return b"".join([response.data async for response in call])
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND
            return None


@pytest.fixture
async def bodies(platform: PlatformProcess) -> AsyncIterator[Bodies]:
    async with grpc.aio.insecure_channel(platform.endpoint) as channel:
        yield Bodies(platform, channel)


def of(data: bytes) -> trajectory_pb2.BlobReference:
    return trajectory_pb2.BlobReference(
        sha256=hashlib.sha256(data).hexdigest(), size=len(data), media_type="text/plain"
    )


async def sent(messages: Sequence[pb.PutBlobRequest], pause: float) -> AsyncIterator[pb.PutBlobRequest]:
    for message in messages:
        yield message
        if pause:
            await asyncio.sleep(pause)


@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
async def test_a_stream_arrives_as_it_was_sent(bodies: Bodies, count: int, pause: float) -> None:
    pieces = [f"{count} {pause} {number}".encode() for number in range(count)]
    data = b"".join(pieces)
    messages = [pb.PutBlobRequest(blob=of(data)), *(pb.PutBlobRequest(data=piece) for piece in pieces)]
    messages[-1].end = True
    call = bodies.put(sent(messages, pause))
    with peer_status(call):
        assert (await call).blob.sha256 == of(data).sha256
    assert await bodies.stored(of(data).sha256) == data


@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("count", [0, 1, 2])
async def test_a_stream_without_its_end_stores_nothing(bodies: Bodies, count: int, pause: float) -> None:
    data = f"cut {count} {pause}".encode()
    messages = [pb.PutBlobRequest(blob=of(data)), pb.PutBlobRequest(data=data)][:count]
    call = bodies.put(sent(messages, pause))
    with pytest.raises(grpc.aio.AioRpcError) as refused, peer_status(call):
        await call
    assert refused.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE}
    assert await bodies.stored(of(data).sha256) is None


@pytest.mark.parametrize("pause", PAUSES)
async def test_a_refusal_comes_while_the_client_has_more_to_say(bodies: Bodies, pause: float) -> None:
    async def endless() -> AsyncIterator[pb.PutBlobRequest]:
        yield pb.PutBlobRequest(data=b"no reference")
        while True:
            await asyncio.sleep(pause or 0.001)
            yield pb.PutBlobRequest(data=b"more")

    call = bodies.put(endless())
    with pytest.raises(grpc.aio.AioRpcError) as refused, peer_status(call):
        await call
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_refusal_comes_to_a_client_that_says_nothing_more(bodies: Bodies) -> None:
    call = bodies.put(sent([pb.PutBlobRequest(data=b"no reference")], 3600))
    with pytest.raises(grpc.aio.AioRpcError) as refused, peer_status(call):
        await asyncio.wait_for(call, 30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("moment", [0.0, 0.005, 0.1])
async def test_a_client_that_gives_up_ends_the_call(bodies: Bodies, moment: float) -> None:
    data = f"given up {moment}".encode()
    call = bodies.put(sent([pb.PutBlobRequest(blob=of(data)), pb.PutBlobRequest(data=data)], 3600))
    await asyncio.sleep(moment)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await bodies.stored(of(data).sha256) is None
