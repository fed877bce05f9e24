"""Short forms of the calls, and what their errors carry."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from orchard.exec.v1 import file_service_pb2 as pb
from orchard.exec.v1.file_service_pb2_grpc import FileServiceStub

from services.common.errors import DOMAIN, STATUS_DETAILS_KEY
from services.common.peer_status import peer_status
from tests.integration.exec_agent_files.serving import SANDBOX_ID as S


async def answer(call: Any) -> Any:
    with peer_status(call):
        return await call


async def write(stub: FileServiceStub, path: str, data: bytes | AsyncIterable[bytes] = b"", **start: Any) -> int:
    async def messages():
        yield pb.WriteFileRequest(sandbox_id=S, start=pb.WriteFileStart(path=path, **start))
        if isinstance(data, bytes):
            for position in range(0, len(data), 1 << 20):
                yield pb.WriteFileRequest(data=data[position : position + (1 << 20)])
        else:
            async for piece in data:
                yield pb.WriteFileRequest(data=piece)
        yield pb.WriteFileRequest(end=True)

    return (await answer(stub.WriteFile(messages()))).size


async def read(stub: FileServiceStub, path: str, offset: int = 0, length: int = 0) -> bytes:
    request = pb.ReadFileRequest(sandbox_id=S, path=path, offset=offset, length=length)
    return b"".join([message.data async for message in stub.ReadFile(request)])


async def upload(stub: FileServiceStub, path: str, data: bytes, **start: Any) -> pb.UploadArchiveResponse:
    async def messages():
        yield pb.UploadArchiveRequest(sandbox_id=S, start=pb.UploadArchiveStart(path=path, **start))
        for position in range(0, len(data), 65536):
            yield pb.UploadArchiveRequest(data=data[position : position + 65536])
        yield pb.UploadArchiveRequest(end=True)

    return await answer(stub.UploadArchive(messages()))


async def download(stub: FileServiceStub, path: str) -> bytes:
    request = pb.DownloadArchiveRequest(sandbox_id=S, path=path)
    return b"".join([message.data async for message in stub.DownloadArchive(request)])


async def patch(stub: FileServiceStub, path: str, data: bytes, **start: Any) -> pb.ApplyPatchResponse:
    async def messages():
        yield pb.ApplyPatchRequest(sandbox_id=S, start=pb.ApplyPatchStart(path=path, **start))
        for position in range(0, len(data), 1000):
            yield pb.ApplyPatchRequest(data=data[position : position + 1000])
        yield pb.ApplyPatchRequest(end=True)

    return await answer(stub.ApplyPatch(messages()))


class Failure:
    """What a failed call told."""

    code: grpc.StatusCode
    reason: str
    metadata: dict[str, str]
    fields: list[str]
    message: str
    retry_seconds: float = 0.0


@contextlib.contextmanager
def fails() -> Iterator[Failure]:
    failure = Failure()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield failure
    failure.code = caught.value.code()
    failure.message = caught.value.details() or ""
    trailing = dict(caught.value.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailing[STATUS_DETAILS_KEY])
    failure.fields = []
    for detail in status.details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            assert info.domain == DOMAIN
            failure.reason, failure.metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            failure.retry_seconds = retry.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(bad):
            failure.fields = [violation.field for violation in bad.field_violations]
