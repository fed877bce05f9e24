"""FileService over gRPC: field rules, and messages to domain and back."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final, Protocol, TypeVar

import grpc.aio
from orchard.exec.v1 import file_pb2, file_service_pb2
from orchard.exec.v1.file_service_pb2_grpc import FileServiceServicer

from services.common.errors import InvalidArgumentError, UnavailableError
from services.common.validation import MEBIBYTE, Fields
from services.exec_agent.addressee import fields_for
from services.exec_agent.files.errors import shown
from services.exec_agent.files.listing import FileStatus
from services.exec_agent.files.patch import Action, FileResult, HunkResult, Options
from services.exec_agent.files.service import FileService

_DEFAULT_PAGE: Final = 1000
_MAXIMUM_PAGE: Final = 5000
_MAXIMUM_MODE: Final = 0o7777
_MAXIMUM_OWNER_BYTES: Final = 256
_MAXIMUM_TOKEN_BYTES: Final = 1 << 18  # holds a path, which in a deep tree is longer than a path may be

_TYPES: Final = {
    stat.S_IFREG: file_pb2.FILE_TYPE_REGULAR,
    stat.S_IFDIR: file_pb2.FILE_TYPE_DIRECTORY,
    stat.S_IFLNK: file_pb2.FILE_TYPE_SYMLINK,
}
_ACTIONS: Final = {
    Action.MODIFY: file_pb2.PATCH_ACTION_MODIFY,
    Action.CREATE: file_pb2.PATCH_ACTION_CREATE,
    Action.DELETE: file_pb2.PATCH_ACTION_DELETE,
    Action.RENAME: file_pb2.PATCH_ACTION_RENAME,
    Action.COPY: file_pb2.PATCH_ACTION_COPY,
}

_Context = grpc.aio.ServicerContext[Any, Any]


class _Piece(Protocol):
    """A message of a client stream: a start, data or the end."""

    sandbox_id: str
    data: bytes
    end: bool

    def WhichOneof(self, oneof_group: Any, /) -> Any: ...  # noqa: N802 (protobuf's name)


_PieceT = TypeVar("_PieceT", bound=_Piece)


class FileServicer(FileServiceServicer):
    """Checks requests, calls FileService, fills answers."""

    def __init__(self, service: FileService, sandbox_id: str) -> None:
        self._service = service
        self._sandbox_id = sandbox_id

    async def WriteFile(  # noqa: N802
        self,
        request_iterator: AsyncIterator[file_service_pb2.WriteFileRequest],
        context: _Context,  # noqa: ARG002
    ) -> file_service_pb2.WriteFileResponse:
        """See the contract."""
        first = await _first(request_iterator)
        start = first.start
        fields = fields_for(self._sandbox_id, first.sandbox_id)
        fields.path("start.path", start.path)
        _mode(fields, "start.mode", start.mode)
        fields.text("start.owner", start.owner, maximum=_MAXIMUM_OWNER_BYTES)
        fields.token_id("start.upload_id", start.upload_id, optional=True)
        fields.check(start.offset >= 0, "start.offset", "must not be negative")
        fields.check(
            not start.offset or bool(start.upload_id), "start.offset", "needs the upload_id that it goes on with"
        )
        fields.done()
        size = await self._service.write_file(
            start.path,
            _data(request_iterator),
            mode=start.mode,
            owner=start.owner,
            make_parents=start.make_parents,
            exclusive=start.exclusive,
            upload_id=start.upload_id,
            offset=start.offset,
        )
        return file_service_pb2.WriteFileResponse(size=size)

    async def GetUpload(  # noqa: N802
        self,
        request: file_service_pb2.GetUploadRequest,
        context: _Context,  # noqa: ARG002
    ) -> file_service_pb2.GetUploadResponse:
        """See the contract."""
        fields = fields_for(self._sandbox_id, request.sandbox_id)
        fields.token_id("upload_id", request.upload_id)
        fields.done()
        return file_service_pb2.GetUploadResponse(received=await self._service.received(request.upload_id))

    async def ReadFile(  # noqa: N802
        self,
        request: file_service_pb2.ReadFileRequest,
        context: _Context,  # noqa: ARG002
    ) -> AsyncIterator[file_service_pb2.ReadFileResponse]:
        """See the contract."""
        fields = fields_for(self._sandbox_id, request.sandbox_id)
        fields.path("path", request.path)
        fields.check(request.offset >= 0, "offset", "must not be negative")
        fields.check(request.length >= 0, "length", "must not be negative; 0 reads to the end")
        fields.done()
        async with aclosing(self._service.read_file(request.path, request.offset, request.length)) as chunks:
            async for head, data in chunks:
                if head is None:
                    yield file_service_pb2.ReadFileResponse(data=data)
                else:
                    yield file_service_pb2.ReadFileResponse(data=data, file_size=head.size, mode=head.mode)

    async def Stat(self, request: file_service_pb2.StatRequest, context: _Context) -> file_service_pb2.StatResponse:  # noqa: ARG002, N802
        """See the contract."""
        fields = fields_for(self._sandbox_id, request.sandbox_id)
        fields.path("path", request.path)
        fields.done()
        found = await self._service.stat(request.path, follow=request.follow)
        return file_service_pb2.StatResponse(file=_file_info(found))

    async def ListDirectory(  # noqa: N802
        self,
        request: file_service_pb2.ListDirectoryRequest,
        context: _Context,  # noqa: ARG002
    ) -> file_service_pb2.ListDirectoryResponse:
        """See the contract."""
        fields = fields_for(self._sandbox_id, request.sandbox_id)
        fields.path("path", request.path)
        size = fields.page_size("page_size", request.page_size, default=_DEFAULT_PAGE, maximum=_MAXIMUM_PAGE)
        fields.text("page_token", request.page_token, maximum=_MAXIMUM_TOKEN_BYTES)
        fields.done()
        page = await self._service.list_directory(
            request.path, recursive=request.recursive, size=size, token=request.page_token
        )
        return file_service_pb2.ListDirectoryResponse(
            files=map(_file_info, page.files), next_page_token=page.next_page_token
        )

    async def MakeDirectory(  # noqa: N802
        self,
        request: file_service_pb2.MakeDirectoryRequest,
        context: _Context,  # noqa: ARG002
    ) -> file_service_pb2.MakeDirectoryResponse:
        """See the contract."""
        fields = fields_for(self._sandbox_id, request.sandbox_id)
        fields.path("path", request.path)
        _mode(fields, "mode", request.mode)
        fields.done()
        await self._service.make_directory(request.path, mode=request.mode, parents=request.parents)
        return file_service_pb2.MakeDirectoryResponse()

    async def Move(self, request: file_service_pb2.MoveRequest, context: _Context) -> file_service_pb2.MoveResponse:  # noqa: ARG002, N802
        """See the contract."""
        fields = fields_for(self._sandbox_id, request.sandbox_id)
        fields.path("source_path", request.source_path)
        fields.path("target_path", request.target_path)
        fields.done()
        await self._service.move(request.source_path, request.target_path, overwrite=request.overwrite)
        return file_service_pb2.MoveResponse()

    async def Remove(  # noqa: N802
        self,
        request: file_service_pb2.RemoveRequest,
        context: _Context,  # noqa: ARG002
    ) -> file_service_pb2.RemoveResponse:
        """See the contract."""
        fields = fields_for(self._sandbox_id, request.sandbox_id)
        fields.path("path", request.path)
        fields.done()
        await self._service.remove(request.path, recursive=request.recursive, missing_ok=request.missing_ok)
        return file_service_pb2.RemoveResponse()

    async def UploadArchive(  # noqa: N802
        self,
        request_iterator: AsyncIterator[file_service_pb2.UploadArchiveRequest],
        context: _Context,  # noqa: ARG002
    ) -> file_service_pb2.UploadArchiveResponse:
        """See the contract."""
        first = await _first(request_iterator)
        fields = fields_for(self._sandbox_id, first.sandbox_id)
        fields.path("start.path", first.start.path)
        fields.done()
        unpacked = await self._service.upload_archive(
            first.start.path, _data(request_iterator), keep_owners=first.start.keep_owners
        )
        return file_service_pb2.UploadArchiveResponse(entries=unpacked.entries, size=unpacked.size)

    async def DownloadArchive(  # noqa: N802
        self,
        request: file_service_pb2.DownloadArchiveRequest,
        context: _Context,  # noqa: ARG002
    ) -> AsyncIterator[file_service_pb2.DownloadArchiveResponse]:
        """See the contract."""
        fields = fields_for(self._sandbox_id, request.sandbox_id)
        fields.path("path", request.path)
        fields.done()
        async with aclosing(self._service.download_archive(request.path)) as chunks:
            async for data in chunks:
                yield file_service_pb2.DownloadArchiveResponse(data=data)

    async def ApplyPatch(  # noqa: N802
        self,
        request_iterator: AsyncIterator[file_service_pb2.ApplyPatchRequest],
        context: _Context,  # noqa: ARG002
    ) -> file_service_pb2.ApplyPatchResponse:
        """See the contract."""
        first = await _first(request_iterator)
        start = first.start
        fields = fields_for(self._sandbox_id, first.sandbox_id)
        fields.path("start.path", start.path)
        fields.between("start.strip", start.strip, 0, 32)
        fields.between("start.fuzz", start.fuzz, 0, 3)
        fields.done()
        plan = await self._service.apply_patch(
            start.path,
            _data(request_iterator),
            strip=start.strip if start.HasField("strip") else None,
            dry_run=start.dry_run,
            options=Options(reverse=start.reverse, fuzz=start.fuzz, partial=start.partial),
        )
        return file_service_pb2.ApplyPatchResponse(applied=plan.fits, files=map(_patch_result, plan.results))


async def _first(messages: AsyncIterator[_PieceT]) -> _PieceT:
    """The first message of a client stream, which must be a start."""
    async for message in messages:
        if message.WhichOneof("payload") != "start":
            break
        return message
    raise InvalidArgumentError.of("start", "the first message must be a start that says where")


async def _data(messages: AsyncIterator[_PieceT]) -> AsyncIterator[bytes]:
    """The data of the messages that follow, up to the end message.

    Raises:
        UnavailableError: there was none. A client that died or was cut off looks just like one that has sent all.
    """
    ended = False
    async for message in messages:
        if ended:
            raise InvalidArgumentError.of("end", "must be the last message")
        payload = message.WhichOneof("payload")
        if payload == "data":
            data = message.data
            if len(data) > MEBIBYTE:
                raise InvalidArgumentError.of("data", "must be at most 1 MiB a message; send it in smaller ones")
            yield data
        elif payload == "end":
            if not message.end:
                raise InvalidArgumentError.of("end", "must be true; an upload that is given up is left without it")
            ended = True
        else:
            raise InvalidArgumentError.of("data", "every message after the first must bring data or the end")
    if not ended:
        raise UnavailableError("the upload ended before its end message; send it again", reason="UPLOAD_CUT")


def _mode(fields: Fields, field: str, mode: int) -> None:
    fields.check(mode <= _MAXIMUM_MODE, field, "must be permission bits, 0 to 07777 (4095)")


def _file_info(file: FileStatus) -> file_pb2.FileInfo:
    path = shown(file.path)
    status = file.status
    info = file_pb2.FileInfo(
        path=path,
        raw_path=file.path if path.encode() != file.path else b"",
        type=_TYPES.get(stat.S_IFMT(status.st_mode), file_pb2.FILE_TYPE_OTHER),
        size=status.st_size,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        link_target=shown(file.link_target),
    )
    info.modify_time.FromNanoseconds(status.st_mtime_ns)
    return info


def _patch_result(result: FileResult) -> file_pb2.PatchFileResult:
    return file_pb2.PatchFileResult(
        path=shown(result.path),
        old_path=shown(result.old_path),
        action=_ACTIONS[result.action],
        hunks=map(_hunk_result, result.hunks),
        error=result.error,
    )


def _hunk_result(result: HunkResult) -> file_pb2.PatchHunkResult:
    return file_pb2.PatchHunkResult(
        number=result.number,
        applied=not result.error,
        expected_line=result.expected_line,
        applied_line=result.applied_line,
        fuzz=result.fuzz,
        error=result.error,
    )
