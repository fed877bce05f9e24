"""Directories and entries of a sandbox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchard._client import errors
from orchard._client.convert import file_info
from orchard._client.pool import Connection
from orchard._client.transport import Transport
from orchard._client.types import FileInfo
from orchard.exec.v1 import file_service_pb2


class AsyncFiles:
    """The file methods of a sandbox. Paths in it are absolute, or relative to its working directory."""

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    async def _file_call(self, method: Callable[[Connection], Any], request: Any) -> Any:
        with self._transport.operation(
            type(request).__name__.removesuffix("Request"), sandbox_id=self._sandbox_id
        ) as op:
            return await self._transport.unary(
                method, request, sandbox_id=self._sandbox_id, context=self._transport.context(op)
            )

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
        """
        request = file_service_pb2.MakeDirectoryRequest(
            sandbox_id=self._sandbox_id, path=path, mode=mode, parents=parents
        )
        try:
            await self._file_call(lambda c: c.file.MakeDirectory, request)
        except errors.FileExists as error:
            if error.attempts == 1 or not (await self.stat(path)).is_dir:
                raise

    async def move(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Rename a file or directory, across devices too.

        Raises:
            FileNotFound, FileExists, FilePermissionDenied: as their names say.
        """
        request = file_service_pb2.MoveRequest(
            sandbox_id=self._sandbox_id, source_path=source, target_path=target, overwrite=overwrite
        )
        try:
            await self._file_call(lambda c: c.file.Move, request)
        except errors.FileNotFound as error:
            # The answer of an earlier attempt that had moved it was lost.
            if error.attempts == 1 or not await self.exists(target):
                raise

    async def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Delete a file, or with `recursive` a directory with all below it. Links are removed, never followed.

        Raises:
            FileNotFound, IsADirectory, DirectoryNotEmpty, FilePermissionDenied: as their names say.
        """
        request = file_service_pb2.RemoveRequest(
            sandbox_id=self._sandbox_id, path=path, recursive=recursive, missing_ok=missing_ok
        )
        try:
            await self._file_call(lambda c: c.file.Remove, request)
        except errors.FileNotFound as error:
            if error.attempts == 1:
                raise
