"""The consumer's side of the watcher's stream: a cache that never goes back behind a revision.

Gateways route by it, the scheduler writes records from it. Losing the stream keeps the cache as it is; a new stream's
snapshot is a diff, so sandboxes that vanished in between become DELETED and wake their waiters.

The new stream may be another replica's, and that may lag: then it has not heard yet of sandboxes that are known here.
It says how far it has come, so until it has come as far as the newest change known here, nothing is dropped and the
cache is not live.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import grpc
import grpc.aio
from orchard.watch.v1 import watch_service_pb2, watch_service_pb2_grpc

from services.common import observed
from services.common.backoff import Backoff
from services.common.channel import connect
from services.common.health import Health
from services.common.hub import Hubs
from services.common.logs import get_logger
from services.common.observed import Observed
from services.common.states import State
from services.common.tls import ClientTls

_log = get_logger(__name__)

DEPENDENCY: Final = "watcher"
_BEHIND: Final = "it lags behind what was known"
_BOOKMARK_SECONDS: Final = 5.0
_SILENCE_SECONDS: Final = 3 * _BOOKMARK_SECONDS
# A replica that lags for longer may be cut off itself, and another one not.
_BEHIND_SECONDS: Final = 10.0
# Longer than any watcher talks without hearing of its runtime. If all lag for so long, the runtime has gone back.
_GONE_BACK_SECONDS: Final = 300.0
_ENDED_KEPT: Final = 10_000

Key = tuple[str, str]
"""Tenant and sandbox id."""


def clock_ms() -> int:
    """Milliseconds of a clock that no correction of the time moves, to measure how long something lasts."""
    return int(time.monotonic() * 1000)


class _BehindError(Exception):
    """A stream lags."""


@dataclass(slots=True)
class _Stream:
    """How far one stream has come."""

    began: float
    seen: set[str] = field(default_factory=set)
    """Uids that it has named, until it has caught up."""
    told: bool = False
    """Whether its snapshot is over."""
    complete: int = 0
    """The revision up to which it has told everything."""
    caught_up: bool = False


class WatchCache:
    """Sandboxes as the watcher last told."""

    def __init__(
        self,
        address: str,
        health: Health,
        *,
        include_spec: bool,
        tls: ClientTls | None = None,
        on_change: Callable[[Observed], None] = lambda _observed: None,
        on_synced: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = address
        self._health = health
        self._include_spec = include_spec
        self._tls = tls
        self._on_change = on_change
        self._on_synced = on_synced
        self._by_uid: dict[str, Observed] = {}
        self._uid_of: dict[Key, str] = {}
        self._ended: OrderedDict[str, Observed] = OrderedDict()
        self._ended_uid_of: dict[Key, str] = {}
        self._waiters: Hubs[Key, Observed] = Hubs()
        self._newest = 0
        self._behind_since: float | None = None
        self.synced = False
        """Whether the runtime's sandboxes were known once; they may be out of date since."""
        self.live = False
        """Whether they are known now: from when a stream has told all that was known before until it is lost."""
        self.heard_ms = 0
        """When the watcher last said anything, in milliseconds of the clock that `clock_ms` reads."""

    @property
    def current(self) -> bool:
        """Whether what is not known here is not there: live, and the watcher has spoken when it should."""
        return self.live and clock_ms() - self.heard_ms < 1500 * _BOOKMARK_SECONDS

    def get(self, tenant: str, sandbox_id: str) -> Observed | None:
        """The living sandbox of this id, else the last one that ended and is still remembered."""
        uid = self._uid_of.get((tenant, sandbox_id))
        if uid is not None:
            return self._by_uid[uid]
        ended_uid = self._ended_uid_of.get((tenant, sandbox_id))
        return self._ended.get(ended_uid) if ended_uid is not None else None

    def living(self) -> Iterable[Observed]:
        """Every sandbox that the runtime has, FAILED ones included."""
        return list(self._by_uid.values())

    async def wait(
        self, tenant: str, sandbox_id: str, enough: Callable[[Observed], bool], timeout_seconds: float
    ) -> Observed | None:
        """Wait until the sandbox is known and `enough`; returns what is known at the end of the wait."""
        key = (tenant, sandbox_id)
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        with self._waiters.subscribe(key) as changes:
            while True:
                found = self.get(*key)
                remaining = deadline - asyncio.get_running_loop().time()
                if (found is not None and enough(found)) or remaining <= 0:
                    return found
                await changes.next(remaining)

    async def run(self) -> None:
        """Follow the watcher for ever."""
        backoff = Backoff(0.05, 1.0)
        while True:
            try:
                await self._follow(backoff)
            except grpc.aio.AioRpcError as error:
                self._behind_since = None
                await self._health.unwell(DEPENDENCY, error.code().name, detail=error.details() or "")
            except TimeoutError:
                self._behind_since = None
                await self._health.unwell(DEPENDENCY, f"silent for {_SILENCE_SECONDS:g} s")
            await asyncio.sleep(backoff.next())

    async def _follow(self, backoff: Backoff) -> None:
        stream = _Stream(asyncio.get_running_loop().time())
        async with connect(self._address, self._tls) as channel:
            request = watch_service_pb2.WatchSandboxesRequest(include_spec=self._include_spec)
            call = watch_service_pb2_grpc.WatchServiceStub(channel).WatchSandboxes(request)
            try:
                while True:
                    async with asyncio.timeout(_SILENCE_SECONDS):
                        response = await call.read()
                    if not isinstance(response, watch_service_pb2.WatchSandboxesResponse):
                        return  # the end of the stream
                    self.heard_ms = clock_ms()
                    if self._take(stream, response):
                        self._behind_since = None
                        self.synced = self.live = True
                        backoff.reset()
                        await self._health.well(DEPENDENCY)
                        self._on_synced()
                    elif stream.told and not stream.caught_up:
                        await self._behind(stream)
            except _BehindError as error:
                await self._health.unwell(DEPENDENCY, str(error))
            finally:
                self.live = False
                call.cancel()

    def _take(self, stream: _Stream, response: watch_service_pb2.WatchSandboxesResponse) -> bool:
        """Take the next message of a stream; whether with it the stream has caught up with what was known."""
        if response.HasField("sandbox"):
            if not stream.caught_up:
                stream.seen.add(response.sandbox.uid)
            self._newest = max(self._newest, response.sandbox.revision)
            self._apply(observed.from_proto(response.sandbox))
        elif response.HasField("synced"):
            stream.told = True
        stream.complete = max(stream.complete, response.complete_revision)
        if stream.caught_up or not stream.told or stream.complete < self._newest:
            return False
        stream.caught_up = True
        self._drop_unseen(stream.seen)
        stream.seen.clear()
        return True

    async def _behind(self, stream: _Stream) -> None:
        """Note that a stream lags.

        Raises:
            _BehindError: it has lagged for so long that another one may be better.
            RuntimeError: every stream has, so that nothing but a new beginning helps.
        """
        now = asyncio.get_running_loop().time()
        if self._behind_since is None:
            self._behind_since = now
            _log.warning("this watcher lags", complete_revision=stream.complete, known_revision=self._newest)
        await self._health.unwell(DEPENDENCY, _BEHIND)
        if now - self._behind_since > _GONE_BACK_SECONDS:
            raise RuntimeError(
                f"every watcher is behind revision {self._newest} for {_GONE_BACK_SECONDS:g} s: the runtime has gone "
                "back, as after a restored backup, and what is known of it here is worth nothing"
            )
        if now - stream.began > _BEHIND_SECONDS:
            raise _BehindError(_BEHIND)

    def _apply(self, new: Observed) -> None:
        known = self._by_uid.get(new.uid) or self._ended.get(new.uid)
        if known is not None and new.revision <= known.revision:
            return
        key = (new.tenant, new.sandbox_id)
        if new.state is State.DELETED:
            self._by_uid.pop(new.uid, None)
            if self._uid_of.get(key) == new.uid:
                del self._uid_of[key]
            self._remember(key, new)
        else:
            self._by_uid[new.uid] = new
            holder = self._by_uid.get(self._uid_of.get(key, ""))
            # A watcher that lags may still tell of one that had the id before: its successor is known by a newer word.
            if holder is None or holder.revision <= new.revision:
                self._uid_of[key] = new.uid
        self._on_change(new)
        self._waiters.publish(key, new)

    def _remember(self, key: Key, ended: Observed) -> None:
        self._ended[ended.uid] = ended
        self._ended_uid_of[key] = ended.uid
        while len(self._ended) > _ENDED_KEPT:
            _uid, oldest = self._ended.popitem(last=False)
            old_key = (oldest.tenant, oldest.sandbox_id)
            if self._ended_uid_of.get(old_key) == oldest.uid:
                del self._ended_uid_of[old_key]

    def _drop_unseen(self, seen: set[str]) -> None:
        for uid, known in list(self._by_uid.items()):
            if uid not in seen:
                self._apply(replace(known, state=State.DELETED, revision=known.revision + 1, endpoint=""))
