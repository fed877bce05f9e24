"""File contents of a sandbox: read, write, copy in and out."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, closing
from pathlib import Path
from typing import IO, Final, TypeVar

from orchard._client import archive, errors
from orchard._client.files import AsyncFiles, unknown
from orchard._client.special import check_repeatable, is_special, naming, write_into
from orchard._client.status import CallFailed
from orchard._client.threads import in_thread
from orchard._client.types import FileType
from orchard.exec.v1 import file_service_pb2

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all; 0 if unknown). Counts anew when an archive is repeated."""

_BLOCK: Final = archive.BLOCK
_SMALL: Final = 1 << 20


class AsyncTransfers(AsyncFiles):
    """The methods of a sandbox that move contents."""

    async def write_file(
        self,
        path: str,
        data: bytes | str,
        *,
        mode: int = 0,
        owner: str = "",
        make_parents: bool = True,
        exclusive: bool = False,
    ) -> int:
        """Write a file, whole or not at all; returns its size.

        Args:
            path: the file.
            data: its content; text is written as UTF-8, byte for byte.
            mode: permission bits. 0: an existing file's own, else 0644.
            owner: "user" or "user:group". Empty: an existing file's own, else the sandbox's user.
            make_parents: make missing directories above it.
            exclusive: fail if it exists.

        Raises:
            FileExists, IsADirectory, NotADirectory, FilePermissionDenied, NoSpace, FileNotFound: as their names say.
            OutcomeUnknown: with `exclusive`, after a restart of the agent: written by this call or by somebody else.
        """
        content = memoryview(data.encode() if isinstance(data, str) else data).cast("B")
        start = file_service_pb2.WriteFileStart(
            path=path, mode=mode, owner=owner, make_parents=make_parents, exclusive=exclusive
        )

        async def pieces(start: int) -> AsyncGenerator[bytes, None]:
            for offset in range(start, len(content), _BLOCK):
                yield bytes(content[offset : offset + _BLOCK])

        return await self._write(start, pieces)

    async def _write(
        self, start: file_service_pb2.WriteFileStart, pieces: Callable[[int], AsyncGenerator[bytes, None]]
    ) -> int:
        """Write what `pieces` gives from an offset on; where a connection breaks, another goes on."""
        retry = self._transport.retry()
        start.upload_id = secrets.token_hex(12)
        attempts = 0

        async def requests() -> AsyncIterator[file_service_pb2.WriteFileRequest]:
            nonlocal attempts
            attempts += 1
            if attempts > 1:
                received = await self._received(start.upload_id)
                if received > start.offset:
                    retry.succeeded()
                start.offset = received
            yield file_service_pb2.WriteFileRequest(sandbox_id=self._sandbox_id, start=start)
            async with aclosing(pieces(start.offset)) as parts:
                async for data in parts:
                    yield file_service_pb2.WriteFileRequest(data=data)
            yield file_service_pb2.WriteFileRequest(end=True)

        try:
            with self._transport.operation("WriteFile", sandbox_id=self._sandbox_id) as operation:
                context = self._transport.context(operation)
                while True:
                    try:
                        return (
                            await self._transport.upload(
                                lambda c: c.file.WriteFile,
                                requests,
                                sandbox_id=self._sandbox_id,
                                context=context,
                                retry=retry,
                            )
                        ).size
                    except errors.InvalidArgument as error:
                        # An agent that was restarted has nothing any more of what it had: begin again.
                        if error.reason != "UPLOAD_INCOMPLETE" or not await retry.failed(0.0):
                            raise
        except errors.FileExists as error:
            # An earlier answer may have been lost after it had written the file, and then the agent restarted.
            # Even if it is the same, a lock file is the same whoever wrote it.
            if not retry.may_have_acted or not start.exclusive:
                raise
            raise unknown(f"{start.path!r} is there now, but perhaps not written by this call", error) from error

    async def _received(self, upload_id: str) -> int:
        """From where an upload is gone on with; agents before this know no such thing, and begin again."""
        request = file_service_pb2.GetUploadRequest(sandbox_id=self._sandbox_id, upload_id=upload_id)
        try:
            return (
                await self._transport.unary(lambda c: c.file.GetUpload, request, sandbox_id=self._sandbox_id)
            ).received
        except errors.Unimplemented:
            return 0

    async def read_file(self, path: str, *, offset: int = 0, length: int = 0) -> bytes:
        """Bytes of a file: `length` of them (0: all) from `offset` on.

        Raises:
            FileNotFound, IsADirectory, FilePermissionDenied: as their names say.
        """
        buffer = bytearray()
        async with aclosing(self.iter_file(path, offset=offset, length=length)) as pieces:
            async for data in pieces:
                buffer += data
        return bytes(buffer)

    async def read_text(self, path: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """A file as text; line ends stay as they are.

        Raises:
            UnicodeDecodeError: it is no such text.
            FileNotFound, IsADirectory, FilePermissionDenied: as their names say.
        """
        return (await self.read_file(path)).decode(encoding, errors)

    async def iter_file(
        self, path: str, *, offset: int = 0, length: int = 0, progress: Progress | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Bytes of a file, piece by piece; goes on where it was when a connection breaks.

        Raises:
            FileNotFound, IsADirectory, FilePermissionDenied: as their names say.
        """
        retry, context = self._transport.retry(), self._transport.context()
        done, size = 0, -1
        while True:
            if length and done >= length:
                return
            request = file_service_pb2.ReadFileRequest(
                sandbox_id=self._sandbox_id, path=path, offset=offset + done, length=length - done if length else 0
            )
            try:
                async with self._transport.stream(lambda c: c.file.ReadFile, request, context) as stream:
                    first = True
                    async for response in stream:
                        retry.succeeded()
                        if first:
                            first = False
                            if size not in (-1, response.file_size):
                                raise errors.OrchardError(
                                    f"{path} changed while it was read; read it again", reason="FILE_CHANGED"
                                )
                            size = response.file_size
                        if response.data:
                            done += len(response.data)
                            yield response.data
                            if progress is not None:
                                progress(done, size)
            except CallFailed as error:
                await self._transport.pause_or_raise(error, retry, self._sandbox_id)
            else:
                return

    async def upload(
        self,
        source: str | os.PathLike[str],
        target: str,
        *,
        exclude: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> None:
        """Copy a local file or folder into the sandbox. Memory stays flat whatever the size.

        Args:
            source: a file, or a folder whose contents go below `target` and merge with what is there. Symbolic links
                in it stay links; sockets, pipes and devices are left out.
            target: the file to write (below it if it ends with "/" or is a directory), or the directory to fill.
            exclude: shell patterns of names, or of paths relative to the folder, to leave out.
            progress: see Progress.

        Raises:
            OSError: a local file cannot be read, or is a pipe, a socket or a device.
            FilePermissionDenied, NotADirectory, NoSpace: as their names say.
        """
        path = Path(source)
        if await in_thread(path.is_dir):
            await self._upload_folder(path, target, exclude, progress)
            return
        if target.endswith("/"):
            target += path.name
        try:
            await self._upload_file(path, target, progress)
        except errors.IsADirectory:
            await self._upload_file(path, f"{target}/{path.name}", progress)

    async def _upload_file(self, path: Path, target: str, progress: Progress | None) -> None:
        info = await in_thread(path.stat)
        check_repeatable(path, info)
        start = file_service_pb2.WriteFileStart(path=target, mode=info.st_mode & 0o7777, make_parents=True)

        async def pieces(offset: int) -> AsyncGenerator[bytes, None]:
            done = offset
            with await in_thread(path.open, "rb") as file:
                await in_thread(file.seek, offset)
                while data := await _read(file, info.st_size):
                    yield data
                    done += len(data)
                    if progress is not None:
                        progress(done, info.st_size)

        await self._write(start, pieces)

    async def _upload_folder(self, path: Path, target: str, exclude: Sequence[str], progress: Progress | None) -> None:
        total = await in_thread(archive.tree_size, path, exclude) if progress is not None else 0

        async def requests() -> AsyncIterator[file_service_pb2.UploadArchiveRequest]:
            yield file_service_pb2.UploadArchiveRequest(
                sandbox_id=self._sandbox_id, start=file_service_pb2.UploadArchiveStart(path=target)
            )
            done = 0
            with closing(archive.pack(path, exclude)) as blocks:
                while (block := await in_thread(_next, blocks)) is not None:
                    yield file_service_pb2.UploadArchiveRequest(data=block[0])
                    done += block[1]
                    if progress is not None:
                        progress(done, total)
            yield file_service_pb2.UploadArchiveRequest(end=True)

        with self._transport.operation("UploadArchive", sandbox_id=self._sandbox_id) as operation:
            await self._transport.upload(
                lambda c: c.file.UploadArchive,
                requests,
                sandbox_id=self._sandbox_id,
                context=self._transport.context(operation),
                retry=self._transport.retry(),
            )

    async def download(
        self,
        source: str,
        target: str | os.PathLike[str],
        *,
        progress: Progress | None = None,
        unsafe_links: archive.UnsafeLinks = "error",
    ) -> None:
        """Copy a file or directory out of the sandbox.

        A file appears whole by a rename or not at all; a device, a pipe or /dev/stdout is written into as it comes. A
        directory is fetched whole before it is unpacked, so it needs its size twice for a moment; what it contains is
        checked first (see unsafe_links) and merges with what is there.

        Args:
            source: what to copy.
            target: the file to write (below it if it ends with "/" or is a folder), or the folder to fill.
            progress: see Progress.
            unsafe_links: what to do with symbolic links that point outside of the folder.

        Raises:
            FileNotFound, FilePermissionDenied: as their names say.
            UnsafeArchive: an entry would leave the target; nothing was written.
            OSError: a local file cannot be written.
        """
        path = Path(target)
        info = await self.stat(source, follow=True)
        if info.type is FileType.DIRECTORY:
            await self._download_folder(source, path, progress, unsafe_links)
            return
        if os.fspath(target).endswith("/") or await in_thread(path.is_dir):
            path /= source.rstrip("/").rpartition("/")[2]
        if await in_thread(is_special, path):
            async with aclosing(self.iter_file(source, progress=progress)) as pieces:
                await write_into(path, pieces)
            return
        await in_thread(path.parent.mkdir, parents=True, exist_ok=True)
        with naming(path, whole=True):
            await self._download_file(source, path, info.mode, progress)

    async def _download_file(self, source: str, path: Path, mode: int, progress: Progress | None) -> None:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
        temporary = Path(name)
        try:
            with open(descriptor, "wb") as file:  # noqa: PTH123, ASYNC230
                async with aclosing(self.iter_file(source, progress=progress)) as pieces:
                    async for data in pieces:
                        await _write(file, data)
            await in_thread(_place, temporary, path, (mode & 0o755) or 0o644)
        except BaseException:
            temporary.unlink(missing_ok=True)  # noqa: ASYNC240 (must happen, also when cancelled)
            raise

    async def _download_folder(
        self, source: str, path: Path, progress: Progress | None, unsafe_links: archive.UnsafeLinks
    ) -> None:
        await in_thread(path.mkdir, parents=True, exist_ok=True)
        retry, context = self._transport.retry(), self._transport.context()
        request = file_service_pb2.DownloadArchiveRequest(sandbox_id=self._sandbox_id, path=source)
        # Beside the target, since the system's own folder for temporary files is often memory.
        with naming(path), tempfile.TemporaryFile(dir=path) as spool:
            while True:
                spool.seek(0)
                spool.truncate()
                try:
                    async with self._transport.stream(lambda c: c.file.DownloadArchive, request, context) as stream:
                        async for response in stream:
                            await _write(spool, response.data)
                            if progress is not None:
                                progress(spool.tell(), 0)
                except CallFailed as error:
                    await self._transport.pause_or_raise(error, retry, self._sandbox_id)
                else:
                    break
            spool.seek(0)
            await in_thread(archive.unpack, spool, path, unsafe_links)


def _place(temporary: Path, path: Path, mode: int) -> None:
    temporary.chmod(mode)
    temporary.replace(path)


def _next(blocks: Iterator[T]) -> T | None:
    return next(blocks, None)


async def _read(file: IO[bytes], size: int) -> bytes:
    """The next block. A hop to a thread costs more than reading a small file, and less than a slow disk under a large
    one.
    """
    if size <= _SMALL:
        return file.read(_BLOCK)
    return await in_thread(file.read, _BLOCK)


async def _write(file: IO[bytes], data: bytes) -> None:
    if len(data) < _BLOCK // 8:
        file.write(data)
    else:
        await in_thread(file.write, data)
