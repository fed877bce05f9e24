"""Who did what: an entry for each change and each refused call, written in batches beside the calls' path.

A call only appends to a queue in memory. The queue is bounded: while the database is away for longer than it lasts,
entries are dropped, counted and reported, and no call ever waits or fails for them. A gateway that is killed loses what
it has not written: at most the entries of the last flush interval, while the database answers.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote
from uuid import UUID

from services.common.errors import UnavailableError
from services.common.interceptor import Call
from services.common.logs import get_logger
from services.gateway.store import utc_now

_log = get_logger(__name__)

_CAPACITY: Final = 20_000
_BATCH: Final = 2_000
_STRANGERS: Final = 0.1  # the share of the queue that callers without a valid key may fill
_LONGEST_TEXT: Final = 256
_LAST_SECONDS: Final = 5.0
_FORGET_SECONDS: Final = 3600.0
_FORGOTTEN_AT_ONCE: Final = 10_000
_DENIED: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED")

_SANDBOXES: Final = "/orchard.sandbox.v1.SandboxService/"
_ADMIN: Final = "/orchard.admin.v1."
CHANGES: Final = frozenset(
    {
        *(_SANDBOXES + name for name in ("CreateSandbox", "UpdateSandbox", "DeleteSandbox")),
        *(_ADMIN + name for name in ("KeyService/CreateKey", "KeyService/RevokeKey", "TenantService/SetTenant")),
        *(_ADMIN + name for name in ("ImageService/ImportImage", "ImageService/RemoveImage")),
        "/orchard.exec.v1.EndpointService/OpenEndpoint",
        "/orchard.trajectory.v1.TrajectoryService/DeleteTrajectories",
    }
)
"""Methods whose every call has an entry."""
_COMMANDS: Final = tuple(f"/orchard.exec.v1.{name}/" for name in ("ExecService", "FileService", "PortService"))


class Entry(NamedTuple):
    """See orchard.admin.v1.AuditEntry."""

    entry_id: UUID
    time: datetime
    tenant: str
    key_id: str
    method: str
    target: str
    request_id: str
    status: str
    client_address: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which entries; empty fields select everything."""

    tenant: str = ""
    key_id: str = ""
    method: str = ""
    target: str = ""
    status: str = ""
    start: datetime | None = None
    end: datetime | None = None


class AuditStore(Protocol):
    """Where entries are kept. Every method raises UnavailableError while it is away."""

    async def add(self, entries: Sequence[Entry]) -> None:
        """Write entries; those that are there already stay as they are."""

    async def page(self, wanted: Wanted, before: tuple[datetime, UUID] | None, count: int) -> list[Entry]:
        """Entries behind the position `before`, newest first."""

    async def forget(self, before: datetime, count: int) -> int:
        """Delete up to so many of the oldest entries from before a time; returns how many there were."""


class AuditLog:
    """Takes entries of calls that ended and writes them.

    Args:
        store: where to.
        commands: whether commands and uses of files have entries too.
        flush_seconds: how long entries are gathered for a batch.
        capacity: how many entries may wait.
    """

    def __init__(self, store: AuditStore, *, commands: bool, flush_seconds: float, capacity: int = _CAPACITY) -> None:
        self._store = store
        self._commands = commands
        self._flush_seconds = flush_seconds
        self._capacity = capacity
        self._strangers = int(capacity * _STRANGERS)
        self._queue: deque[Entry] = deque()
        self._some = asyncio.Event()
        self._written = 0
        self._dropped = 0
        self._reported = 0

    def ended(self, call: Call, status: str, peer: Callable[[], str]) -> None:
        """See interceptor.CallObserver: note a call if it is one to note. Never waits and never fails."""
        if not self._noted(call, status):
            return
        who = call.principal
        if len(self._queue) >= (self._capacity if who is not None else self._strangers):
            self._dropped += 1
            return
        texts = (
            who.tenant if who is not None else "",
            call.key_id,
            call.method.lstrip("/"),
            call.target,
            call.request_id,
            status,
            address_of(peer()),
        )
        self._queue.append(Entry(uuid.uuid4(), utc_now(), *map(_storable, texts)))
        self._some.set()

    def _noted(self, call: Call, status: str) -> bool:
        if call.method in CHANGES:
            return True
        if status not in _DENIED and not self._commands:
            return False
        command = call.method.startswith(_COMMANDS)
        # Past the gateway's own door, an agent speaks of the permissions of files.
        return (command and self._commands) or (status in _DENIED and not (command and call.authenticated))

    def counts(self) -> Mapping[str, int]:
        """Entries since the start, by what became of them."""
        return {"written": self._written, "dropped": self._dropped}

    def waiting(self) -> Mapping[str, int]:
        """Entries that are not written yet."""
        return {"waiting": len(self._queue)}

    async def run(self) -> None:
        """Write for ever."""
        while True:
            await self._some.wait()
            await asyncio.sleep(self._flush_seconds)
            with suppress(UnavailableError):
                await self.flush()

    async def flush(self) -> None:
        """Write everything that waits.

        Raises:
            UnavailableError: the store is away; what it did not take waits on.
        """
        if self._dropped > self._reported:
            _log.warning("audit entries were dropped", count=self._dropped - self._reported, waiting=len(self._queue))
            self._reported = self._dropped
        while self._queue:
            batch = list(islice(self._queue, _BATCH))
            await self._store.add(batch)
            for _ in batch:
                self._queue.popleft()
            self._written += len(batch)
        self._some.clear()

    async def close(self) -> None:
        """Write what is left, for a few seconds; what cannot be written is reported."""
        with suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                await self.flush()
        if self._queue:
            _log.warning("audit entries are lost with this process", count=len(self._queue))

    async def run_forgetting(self, days: int) -> None:
        """Delete what is older than so many days, for ever."""
        while True:
            with suppress(UnavailableError):
                while await self._store.forget(utc_now() - timedelta(days=days), _FORGOTTEN_AT_ONCE):
                    pass
            await asyncio.sleep(_FORGET_SECONDS)


def address_of(peer: str) -> str:
    """The host of a gRPC peer: "ipv4:10.0.0.7:4711" or "ipv6:%5B::1%5D:4711"."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    return unquote(rest).rpartition(":")[0].strip("[]")


def _storable(text: str) -> str:
    """PostgreSQL has no NUL in a text."""
    return text[:_LONGEST_TEXT].replace("\0", "\N{REPLACEMENT CHARACTER}")
