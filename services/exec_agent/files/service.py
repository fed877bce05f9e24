"""The use cases of FileService: paths in, results out; all of the work in worker threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable
from contextlib import suppress
from functools import cache, partial
from typing import Final, TypeVar

from services.common.errors import FailedPreconditionError, InvalidArgumentError
from services.exec_agent.files import moving, placing
from services.exec_agent.files.archive.headers import Entry as ArchiveEntry
from services.exec_agent.files.archive.pack import pack
from services.exec_agent.files.archive.unpack import Unpacked, Unpacker
from services.exec_agent.files.intents import Intents
from services.exec_agent.files.listing import FileStatus, Page, describe, list_page
from services.exec_agent.files.ownership import DefaultOwner, Owner
from services.exec_agent.files.patch import Options, Plan
from services.exec_agent.files.patching import apply_patch
from services.exec_agent.files.paths import absolute
from services.exec_agent.files.reading import FileHead, read_file
from services.exec_agent.files.removing import remove
from services.exec_agent.files.turns import Turns
from services.exec_agent.files.uploads import Uploads, UploadStream
from services.exec_agent.files.workers import Workers
from services.exec_agent.files.writing import FileWriter, WriteOptions, make_one_directory
from services.exec_agent.users import resolve_user

MAXIMUM_PATCH_BYTES: Final = 64 << 20
_SWEEP_SECONDS: Final = 60.0

_T = TypeVar("_T")


class FileService:
    """The files of the sandbox that this process is in.

    Args:
        working_directory: where relative paths start.
        default_owner: gives the uid and gid of new files, the sandbox's user's. Asked at most once a call.
        state_fd: the agent's own directory.
    """

    def __init__(self, *, working_directory: str, default_owner: DefaultOwner, state_fd: int) -> None:
        self._working_directory = working_directory
        self._default_owner = default_owner
        self._workers = Workers()
        self._uploads = Uploads()
        self._turns = Turns()
        self._intents = Intents(state_fd)

    async def settle(self) -> None:
        """Take back or finish the changes in whose middle an agent before this one was killed; before any call."""
        if self._intents.is_left:
            await self._workers.run(self._intents.settle, {placing.PATCH: placing.settle, moving.MOVE: moving.settle})

    def close(self) -> None:
        """Take no more work."""
        self._workers.close()

    def _owner(self) -> DefaultOwner:
        """The default owner, looked up at most once in a call."""
        return cache(self._default_owner)

    def _path(self, path: str) -> bytes:
        return absolute(path, self._working_directory)

    async def _run_in_turn(self, what: Hashable, work: Callable[[], _T]) -> _T:
        """Run a change of which its client may ask for a repeat before this one has ended."""

        def in_turn() -> _T:
            with self._turns.take(what):
                return work()

        return await self._workers.run(in_turn)

    async def write_file(
        self,
        path: str,
        pieces: AsyncIterator[bytes],
        *,
        mode: int,
        owner: str,
        make_parents: bool,
        exclusive: bool,
        upload_id: str = "",
        offset: int = 0,
    ) -> int:
        """Write a file that appears whole or not at all; returns its size.

        With an upload id what came of it is kept when the stream breaks, and `offset` says where this stream begins.
        """
        resolved = await self._workers.run(_owner, owner) if owner else None
        place, options = self._path(path), WriteOptions(mode, resolved, make_parents, exclusive)
        make = partial(FileWriter, place, options, self._owner())
        if not upload_id:
            return await self._workers.pour(pieces, make())
        return await self._workers.pour(pieces, UploadStream(self._uploads, upload_id, offset, (place, options), make))

    async def received(self, upload_id: str) -> int:
        """How much of an upload is there."""
        return await self._workers.run(self._uploads.received, upload_id)

    async def forget_uploads(self) -> None:
        """Drop uploads that nobody goes on with, as time passes."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            if self._uploads.waiting:
                await self._workers.run(self._uploads.expire)

    def read_file(self, path: str, offset: int, length: int) -> AsyncGenerator[tuple[FileHead | None, bytes], None]:
        """A file's bytes in chunks; the head comes with the first."""
        return self._workers.read_ahead(read_file(self._path(path), offset, length), lambda item: len(item[1]))

    async def stat(self, path: str, *, follow: bool) -> FileStatus:
        """Describe a path; `path` of the answer is the one asked for."""
        found = await self._workers.run(describe, self._path(path), follow=follow)
        return FileStatus(path.encode(), found.status, found.link_target)

    async def list_directory(self, path: str, *, recursive: bool, size: int, token: str) -> Page:
        """A page of a directory."""
        return await self._workers.run(list_page, self._path(path), recursive=recursive, size=size, token=token)

    async def make_directory(self, path: str, *, mode: int, parents: bool) -> None:
        """Make a directory."""
        await self._workers.run(
            make_one_directory, self._path(path), mode, parents=parents, default_owner=self._owner()
        )

    async def move(self, source: str, target: str, *, overwrite: bool) -> None:
        """Rename, across devices too."""
        places = self._path(source), self._path(target)
        await self._run_in_turn(places, partial(moving.move, *places, overwrite=overwrite, intents=self._intents))

    async def remove(self, path: str, *, recursive: bool, missing_ok: bool) -> None:
        """Remove an entry."""
        await self._workers.run(remove, self._path(path), recursive=recursive, missing_ok=missing_ok)

    async def upload_archive(self, path: str, pieces: AsyncIterator[bytes], *, keep_owners: bool) -> Unpacked:
        """Unpack a tar stream below a directory."""
        owner = _archive_owner if keep_owners else None
        return await self._workers.pour(pieces, Unpacker(self._path(path), self._owner(), owner))

    def download_archive(self, path: str) -> AsyncGenerator[bytes, None]:
        """Pack a directory or file."""
        return self._workers.read_ahead(pack(self._path(path)), len)

    async def apply_patch(
        self, path: str, pieces: AsyncIterator[bytes], *, strip: int | None, dry_run: bool, options: Options
    ) -> Plan:
        """Apply a patch below a directory; the plan's `fits` and `results` are the report."""
        collected: list[bytes] = []
        size = 0
        async for piece in pieces:
            collected.append(piece)
            size += len(piece)
            if size > MAXIMUM_PATCH_BYTES:
                raise InvalidArgumentError.of(
                    "data", f"the patch must be at most {MAXIMUM_PATCH_BYTES >> 20} MiB in all"
                )
        place = self._path(path)

        def work() -> Plan:
            return apply_patch(
                place,
                b"".join(collected),
                strip=strip,
                dry_run=dry_run,
                options=options,
                default_owner=self._owner(),
                intents=self._intents,
            )

        return await self._run_in_turn(place, work)


def _owner(text: str) -> Owner:
    user = resolve_user(text)
    return Owner(user.uid, user.gid)


def _archive_owner(entry: ArchiveEntry) -> Owner:
    """By name where the sandbox knows it, else by number, as tar does."""
    uid, gid = entry.uid, entry.gid
    with suppress(FailedPreconditionError):
        uid = resolve_user(entry.user.decode("utf-8", "replace")).uid
    with suppress(FailedPreconditionError):
        gid = resolve_user(f"{uid}:{entry.group.decode('utf-8', 'replace')}").gid
    return Owner(uid, gid)
