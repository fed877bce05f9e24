"""The node's use cases: create, delete, update, watch; journalled, idempotent and the same for every runtime."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from services.common.errors import (
    AlreadyExistsError,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.hub import Hub
from services.common.logs import get_logger
from services.common.tasks import TaskGroup
from services.local.node.journal import Journal
from services.local.node.model import Creation, Phase, Record
from services.local.runtime.images import Progress
from services.local.runtime.model import Abilities, Ended, Image, PullError, Reason, Request
from services.local.runtime.removal import RemovalError
from services.local.runtime.steps import StartError

_log = get_logger(__name__)

BOOKMARK_SECONDS: Final = 5.0
# Sandboxes that come and go while a watcher does not read; past that it starts over with a fresh snapshot.
_MOST_PENDING: Final = 100_000


class Runtime(Protocol):
    """Makes sandboxes and removes them. One implementation for each way to isolate."""

    def abilities(self) -> Abilities:
        """What this machine can do."""

    def endpoint(self, uid: str) -> str:
        """Address (gRPC) of a sandbox's agent."""

    def reserve(self, request: Request) -> str:
        """The uid that the sandbox of this request is to have; `create` or `delete` must follow."""

    async def create(self, request: Request, image: Image | None) -> dict[str, float]:
        """Make a sandbox; returns when its agent listens, with the milliseconds that each step took.

        Raises:
            StartError: it could not be made; nothing of it runs. A PullError says that its image could not be had.
        """

    async def adopt(self, known: Sequence[tuple[Request, Image | None]]) -> list[Ended]:
        """Take sandboxes over from a daemon before this one; says which of them have ended.

        What is there of sandboxes that are not known is removed.
        """

    async def delete(self, uid: str) -> None:
        """End a sandbox and remove everything of it; idempotent.

        Raises:
            RemovalError: it does not go away.
        """

    def watch(self) -> AsyncIterator[Ended]:
        """Sandboxes that end though nobody deleted them."""


class Images(Protocol):
    """Root file systems that sandboxes can start from."""

    def find(self, name: str) -> Image | None:
        """By name."""

    def by_digest(self, digest: str) -> Image | None:
        """By digest, also one that was replaced and is still in use."""

    def page(self, after: str, count: int) -> list[Image]:
        """Up to `count` images whose names come after `after`."""

    def imported(
        self, name: str, source: Path, used: Callable[[], set[str]], *, replace: bool
    ) -> AsyncGenerator[Progress, None]:
        """Import an image; yields progress, at last with the image."""

    async def remove(self, name: str, used: set[str]) -> None:
        """Remove an image that no sandbox uses."""

    async def unused(self, digest: str, still_used: Iterable[str]) -> None:
        """A sandbox that used it is gone."""


# Given the uids that are recorded, sandboxes that live though they are not: uid, and what they were made of.
Outliving = Callable[[set[str]], Awaitable[Sequence[tuple[str, Creation]]]]


class Told(NamedTuple):
    """What a watcher is told at once, in the order of change: with it, everything up to `revision` has been told."""

    records: Sequence[Record]
    revision: int
    snapshot: bool = False
    """These are all that there are."""


class Node:
    """Owns the sandboxes of this machine."""

    def __init__(
        self,
        runtime: Runtime,
        images: Images,
        journal: Journal,
        tasks: TaskGroup,
        *,
        concurrent_starts: int,
        give_up: Callable[[str], None] | None = None,
        outliving: Outliving | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`give_up`, where a runtime has it, cuts a create short that is under way."""
        self._runtime = runtime
        self._images = images
        self._journal = journal
        self._tasks = tasks
        self._give_up = give_up
        self._outliving = outliving
        self._clock = clock
        self._hub: Hub[str, Record] = Hub(most_pending=_MOST_PENDING)
        self._records: dict[str, Record] = {}
        self._by_key: dict[tuple[str, str], str] = {}
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._deletes: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(concurrent_starts)
        self._revision = 0

    @property
    def running(self) -> int:
        """Sandboxes that run now."""
        return sum(record.phase is Phase.RUNNING for record in self._records.values())

    def abilities(self) -> Abilities:
        """What this machine can do."""
        return self._runtime.abilities()

    async def start(self) -> None:
        """Take over what the daemon before this one left, then watch."""
        records = await asyncio.to_thread(self._journal.read_all)
        # Microseconds since the epoch, which grow faster than changes come; and never below what was told before, also
        # where the clock was set back.
        at_least = max([int(self._clock() * 1e6), *(record.revision for record in records)])
        self._revision = await asyncio.to_thread(self._journal.first_revision, at_least)
        if self._outliving is not None:
            for uid, creation in await self._outliving({record.uid for record in records}):
                records.append(self._record(creation, replace(creation.request, uid=uid)))
                self._journal.add(records[-1])
        for record in records:
            self._records[record.uid] = record
            self._by_key[record.key] = record.uid
        await self._take_over([record for record in records if record.phase is not Phase.GONE])
        self._tasks.start("sandboxes that end", self._watch_ends())

    async def _take_over(self, records: list[Record]) -> None:
        known = [(record.request, self._image_of(record.request)) for record in records]
        ended = {end.uid: end for end in await self._runtime.adopt(known)}
        for record in records:
            end = ended.get(record.uid)
            if record.phase is Phase.STOPPING:
                self._begin_delete(record.uid)
            elif record.phase is Phase.STARTING and end is None:
                self._change(record.uid, phase=Phase.RUNNING)
            elif record.phase is Phase.STARTING:
                # Nobody has used it yet: what is half made gives way to a new attempt.
                self._begin_start(record.request, again=True)
            elif end is not None and record.phase is not Phase.FAILED:
                self._change(record.uid, phase=Phase.FAILED, reason=end.reason, message=end.message)
        if records:
            _log.info("sandboxes taken over", found=len(records), running=self.running)

    def _image_of(self, request: Request) -> Image | None:
        return self._images.by_digest(request.image) if request.image else None

    async def create(self, creation: Creation) -> Record:
        """Journal a sandbox and begin to make it.

        Raises:
            AlreadyExistsError: the id is taken by another request.
            NotFoundError: IMAGE_NOT_FOUND.
            ResourceExhaustedError: no space.
        """
        key = (creation.tenant, creation.request.sandbox_id)
        if key in self._by_key:
            return self._repeated(self._records[self._by_key[key]], creation)
        request = replace(creation.request, image=self.check_image(creation.request.image))
        request = replace(request, uid=self._runtime.reserve(request))
        record = self._record(creation, request)
        try:
            self._journal.add(record)
        except OSError as error:
            await self._runtime.delete(request.uid)
            raise ResourceExhaustedError(
                f"the sandbox cannot be written down: {error.strerror}; free space in the data directory",
                reason="NO_SPACE",
            ) from None
        self._records[record.uid] = record
        self._by_key[key] = record.uid
        self._hub.publish(record.uid, record)
        self._begin_start(request)
        return record

    def _record(self, creation: Creation, request: Request) -> Record:
        self._revision += 1
        return Record(
            tenant=creation.tenant,
            request_id=creation.request_id,
            spec_hash=creation.spec_hash,
            spec=creation.spec,
            request=request,
            phase=Phase.STARTING,
            reason=None,
            message="",
            endpoint=self._runtime.endpoint(request.uid),
            create_time=creation.create_time or self._clock(),
            expire_time=creation.expire_time,
            revision=self._revision,
        )

    def _repeated(self, found: Record, creation: Creation) -> Record:
        if found.request_id == creation.request_id and found.spec_hash == creation.spec_hash:
            return found
        raise AlreadyExistsError(
            f"sandbox {found.request.sandbox_id!r} exists on this node, made by another request",
            reason="SANDBOX_EXISTS",
            sandbox_id=found.request.sandbox_id,
        )

    def check_image(self, name: str) -> str:
        """Digest of an image; NotFoundError (IMAGE_NOT_FOUND) unless sandboxes can start from it."""
        if not name:
            return ""
        image = self._images.find(name)
        if image is None:
            raise NotFoundError(
                f"image {name!r} was never imported on this machine; run `orchard image import {name} PATH`",
                reason="IMAGE_NOT_FOUND",
                image=name,
            )
        return image.digest

    def _begin_start(self, request: Request, *, again: bool = False) -> None:
        work = self._start(request, again=again)
        self._starts[request.uid] = self._tasks.start(f"start {request.uid}", work, forever=False)

    async def _start(self, request: Request, *, again: bool) -> None:
        image = self._image_of(request)
        try:
            async with self._slots:
                if again:
                    await self._runtime.delete(request.uid)
                milliseconds = await self._runtime.create(request, image)
        except StartError as error:
            _log.warning("sandbox not made", uid=request.uid, error=str(error))
            reason = Reason.IMAGE_PULL if isinstance(error, PullError) else Reason.AGENT_START
            self._not_made(request.uid, reason, str(error))
        except Exception as error:  # noqa: BLE001 (whatever is wrong with one sandbox, the others go on)
            _log.error("sandbox not made", uid=request.uid, exc_info=error)
            message = f"the node could not make it; its log has more under uid {request.uid}"
            self._not_made(request.uid, Reason.AGENT_START, message)
        else:
            _log.debug("sandbox runs", uid=request.uid, **milliseconds)
            if self._records[request.uid].phase is Phase.STARTING:
                self._change(request.uid, phase=Phase.RUNNING)
        finally:
            self._starts.pop(request.uid, None)

    def _not_made(self, uid: str, reason: Reason, message: str) -> None:
        if self._records[uid].phase is Phase.STARTING:
            self._change(uid, phase=Phase.FAILED, reason=reason, message=message)

    async def delete(self, uid: str) -> None:
        """Remove an incarnation; returns when it is gone. One that is not there is no error.

        Raises:
            InternalError: it does not go away; the message says what holds it.
        """
        if uid not in self._records:
            return
        task = self._deletes.get(uid) or self._begin_delete(uid)
        # A caller that gives up does not stop the removal.
        await asyncio.shield(task)

    def _begin_delete(self, uid: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._remove(uid), name=f"delete {uid}")
        self._deletes[uid] = task
        task.add_done_callback(lambda _: self._deletes.pop(uid, None))
        return task

    async def _remove(self, uid: str) -> None:
        self._change(uid, phase=Phase.STOPPING)
        start = self._starts.get(uid)
        if start is not None:
            if self._give_up is not None:
                self._give_up(uid)
            await asyncio.wait([start])
        try:
            await self._runtime.delete(uid)
        except (RemovalError, OSError) as error:
            _log.error("sandbox does not go away", uid=uid, error=str(error))
            self._change(uid, message=str(error))
            raise InternalError(str(error), reason="REMOVAL_STUCK", uid=uid) from None
        record = self._change(uid, phase=Phase.GONE, publish_only=True)
        self._journal.remove(uid)
        del self._records[uid]
        del self._by_key[record.key]
        if record.request.image:
            await self._images.unused(record.request.image, (r.request.image for r in self._records.values()))

    def update(self, uid: str, expire_time: float) -> Record:
        """Move a deadline.

        Raises:
            NotFoundError: there is no such incarnation.
        """
        if uid not in self._records:
            raise NotFoundError(f"no sandbox with uid {uid!r} on this node", reason="SANDBOX_NOT_FOUND", uid=uid)
        return self._change(uid, expire_time=expire_time)

    async def watch(self) -> AsyncGenerator[Told, None]:
        """First all sandboxes, then changes as they come; nothing new is told now and then as a sign of life.

        Raises:
            UnavailableError: the watcher was too slow, or the daemon stops.
        """
        with self._hub.subscribe() as subscription:
            # Taken in one turn of the event loop, nothing falls between the two.
            yield Told(list(self._records.values()), self._revision, snapshot=True)
            while True:
                changes = await subscription.next(BOOKMARK_SECONDS)
                yield Told(changes, self._revision)

    async def end_watches(self, stopping: asyncio.Event) -> None:
        """End every watch with UNAVAILABLE once the server stops."""
        await stopping.wait()
        self._hub.end(UnavailableError("the node daemon stops; watch again", reason="SERVER_STOPPING"))

    def list_images(self, after: str, count: int) -> list[Image]:
        """Up to `count` images whose names come after `after`."""
        return self._images.page(after, count)

    def import_image(self, name: str, source: Path, *, replace: bool) -> AsyncGenerator[Progress, None]:
        """Import an image; see ImageStore.imported."""
        return self._images.imported(name, source, self._images_in_use, replace=replace)

    async def remove_image(self, name: str) -> None:
        """Remove an image; see ImageStore.remove."""
        await self._images.remove(name, self._images_in_use())

    def _images_in_use(self) -> set[str]:
        return {record.request.image for record in self._records.values() if record.request.image}

    async def _watch_ends(self) -> None:
        async for ended in self._runtime.watch():
            record = self._records.get(ended.uid)
            if record is not None and record.phase in (Phase.STARTING, Phase.RUNNING):
                _log.warning("sandbox ended", uid=ended.uid, reason=ended.reason.value, message=ended.message)
                self._change(ended.uid, phase=Phase.FAILED, reason=ended.reason, message=ended.message)

    def _change(
        self,
        uid: str,
        *,
        phase: Phase | None = None,
        reason: Reason | None = None,
        message: str | None = None,
        expire_time: float | None = None,
        publish_only: bool = False,
    ) -> Record:
        old = self._records[uid]
        self._revision += 1
        record = replace(
            old,
            phase=old.phase if phase is None else phase,
            reason=old.reason if reason is None else reason,
            message=old.message if message is None else message,
            expire_time=old.expire_time if expire_time is None else expire_time,
            revision=self._revision,
        )
        if not publish_only:
            self._records[uid] = record
            try:
                self._journal.change(record)
            except OSError as error:
                # A full disk must not keep sandboxes from ending: that is what frees it. A daemon that is restarted
                # meanwhile reads the record as it was and finds out again what became of the sandbox.
                _log.error("a change could not be journalled", uid=uid, phase=record.phase.value, error=str(error))
        self._hub.publish(record.uid, record)
        return record
