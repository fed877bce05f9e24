"""Directories and entries of a sandbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from orchard._client import errors
from orchard._client.convert import file_info
from orchard._client.pool import Connection
from orchard._client.transport import Retry, Transport
from orchard._client.types import FileInfo
from orchard.exec.v1 import file_service_pb2

_KEPT_BY_MOVING: Final = ("type", "size", "mode", "uid", "gid", "modify_time", "link_target")
# The call itself says better what is wrong with its path.
_NOT_THERE: Final = (errors.NotFound, errors.NotADirectory, errors.PermissionDenied, errors.InvalidArgument)


class AsyncFiles:
    """The file methods of a sandbox. Paths in it are absolute, or relative to its working directory."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    async def _file_call(self, method: Callable[[Connection], Any], request: Any, retry: Retry | None = None) -> Any:
        with self._transport.operation(
            type(request).__name__.removesuffix("Request"), sandbox_id=self._sandbox_id
        ) as op:
            return await self._transport.unary(
                method, request, sandbox_id=self._sandbox_id, context=self._transport.context(op), retry=retry
            )

    async def _found(self, path: str) -> FileInfo | None:
        """What is at a path, if anything is and may be looked at."""
        try:
            return await self.stat(path)
        except _NOT_THERE:
            return None

    async def stat(self, path: str, *, follow: bool = False) -> FileInfo:
        """Describe a path; with `follow`, what a link points to.

        Raises:
            FileNotFound: it is not there.
        """
        request = file_service_pb2.StatRequest(sandbox_id=self._sandbox_id, path=path, follow=follow)
        return file_info((await self._file_call(lambda c: c.file.Stat, request)).file)

    async def exists(self, path: str) -> bool:
        """Whether something is at a path; a dangling link is something."""
        try:
            await self.stat(path)
        except (errors.FileNotFound, errors.NotADirectory):
            return False
        return True

    async def list_directory(self, path: str = ".", *, recursive: bool = False) -> list[FileInfo]:
        """Entries of a directory, by name; with `recursive` everything below it, directories before their contents.

        Raises:
            FileNotFound, NotADirectory, FilePermissionDenied: as their names say.
        """
        entries: list[FileInfo] = []
        token = ""
        while True:
            request = file_service_pb2.ListDirectoryRequest(
                sandbox_id=self._sandbox_id, path=path, recursive=recursive, page_token=token
            )
            response = await self._file_call(lambda c: c.file.ListDirectory, request)
            entries.extend(file_info(file) for file in response.files)
            token = response.next_page_token
            if not token:
                return entries

    async def make_directory(self, path: str, *, mode: int = 0, parents: bool = True) -> None:
        """Make a directory; with `parents` also those above it, and one that is there is no error.

        Raises:
            FileExists, NotADirectory, FilePermissionDenied, FileNotFound: as their names say.
            OutcomeUnknown: without `parents`, it may have been made by this call or by somebody else.
        """
        request = file_service_pb2.MakeDirectoryRequest(
            sandbox_id=self._sandbox_id, path=path, mode=mode, parents=parents
        )
        retry = self._transport.retry()
        try:
            await self._file_call(lambda c: c.file.MakeDirectory, request, retry)
        except errors.FileExists as error:
            if not retry.may_have_acted or not (await self.stat(path)).is_dir:
                raise
            raise unknown(f"{path!r} is there now, but perhaps not made by this call", error) from error

    async def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a file or directory, across devices too.

        Raises:
            FileNotFound, FileExists, FilePermissionDenied: as their names say.
            OutcomeUnknown: the connection broke, and at neither path is what was to be moved.
        """
        request = file_service_pb2.MoveRequest(
            sandbox_id=self._sandbox_id, source_path=source, target_path=target, overwrite=overwrite
        )
        # Looked at before: afterwards nobody could say whether what is at the target is it.
        before, retry = await self._found(source), self._transport.retry()
        try:
            await self._file_call(lambda c: c.file.Move, request, retry)
        except errors.FileNotFound as error:
            if before is None or not retry.may_have_acted or await self._found(source) is not None:
                raise
            # The answer of an earlier attempt that had moved it may have been lost.
            after = await self._found(target)
            if after is None or not _is_same(before, after):
                raise unknown(f"{source!r} is gone, and is not at {target!r}", error) from error

    async def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Delete a file, or with `recursive` a directory with all below it. Links are removed, never followed.

        Raises:
            FileNotFound, IsADirectory, DirectoryNotEmpty, FilePermissionDenied: as their names say.
        """
        request = file_service_pb2.RemoveRequest(
            sandbox_id=self._sandbox_id, path=path, recursive=recursive, missing_ok=missing_ok
        )
        was_there = missing_ok or await self._found(path) is not None
        retry = self._transport.retry()
        try:
            await self._file_call(lambda c: c.file.Remove, request, retry)
        except errors.FileNotFound:
            # It was there and is gone: the answer of an earlier attempt may have been lost.
            if not was_there or not retry.may_have_acted:
                raise


def unknown(what: str, error: errors.OrchardError) -> errors.OutcomeUnknown:
    """The error of a call whose repeat failed because of what its first attempt, or somebody else, has done."""
    return errors.OutcomeUnknown(
        f"the connection broke, and what became of the call cannot be told: {what}",
        metadata=error.metadata,
        request_id=error.request_id,
        attempts=error.attempts,
    )


def _is_same(before: FileInfo, after: FileInfo) -> bool:
    """Whether a moved file is the one of before, as far as a description can tell: moving changes none of these."""
    return all(getattr(before, name) == getattr(after, name) for name in _KEPT_BY_MOVING)
