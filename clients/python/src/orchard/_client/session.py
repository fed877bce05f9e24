"""What a client and its sandboxes share: transport, background work, heartbeats, and which sandboxes to delete at the
end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any, Final, NamedTuple, Protocol

from orchard._client import errors
from orchard._client.background import Background
from orchard._client.cleanup import REGISTRY
from orchard._client.leases import Heartbeats
from orchard._client.observing import Observers
from orchard._client.profile import Profile
from orchard._client.runtime import leak
from orchard._client.tracing import Tracing
from orchard._client.transport import Retry, Transport
from orchard.sandbox.v1 import sandbox_service_pb2

_log: Final = logging.getLogger("orchard")
_DELETES_AT_ONCE: Final = 64
_DRAIN_SECONDS: Final = 15.0
_DETACHED_KEPT: Final = 10_000


class Made(NamedTuple):
    """A sandbox by the create that made it: its id may have belonged to another one before, and may again."""

    sandbox_id: str
    request_id: str
    """Empty: whichever has the id."""


class Recording(Protocol):
    """What is sealed when the client is closed, if nobody has done so before."""

    def close(self, status: str, message: str, *, seconds: float) -> Coroutine[Any, Any, None]:
        """Seal it, in so much time."""


class Session:
    """One client's state."""

    def __init__(self, profile: Profile, *, retry_seconds: float) -> None:
        self.profile = profile
        self.transport = Transport(profile, retry_seconds=retry_seconds, tracing=Tracing.from_environment())
        self.background = Background()
        self.heartbeats = Heartbeats(self.transport)
        self.tracked: dict[Made, str] = {}
        """Sandboxes to delete when the client is closed, with their uids (empty if not known yet)."""
        self._detached: deque[Made] = deque()
        self.observers = Observers()
        """Who looks at the commands of which sandbox."""
        self.recordings: set[Recording] = set()
        """Those that are not sealed yet."""
        REGISTRY.add(self)

    def track(self, made: Made, uid: str = "") -> None:
        """Delete this sandbox when the client is closed, or when the program ends."""
        self.tracked[made] = uid
        REGISTRY.hold(self)

    def tracks(self, made: Made) -> bool:
        """Whether it will be deleted."""
        return bool(self._tracked_as(made))

    def detach(self, made: Made) -> None:
        """Let this sandbox live on when the client is closed; until then it is kept as before."""
        for one in self._tracked_as(made):
            del self.tracked[one]
        if not self.tracked:
            REGISTRY.release(self)
        if made.sandbox_id in self.transport.secret_creates:
            self._detached.append(made)
        if len(self._detached) > _DETACHED_KEPT:
            # Nobody may ever say that it has ended.
            self._drop_secret(self._detached.popleft())

    def ended(self, made: Made) -> None:
        """This sandbox is no more. What is kept for another one of its id stays."""
        for one in self._tracked_as(made):
            del self.tracked[one]
        self.heartbeats.remove(*made)
        self._drop_secret(made)
        if not self.tracked:
            REGISTRY.release(self)

    def _tracked_as(self, made: Made) -> list[Made]:
        if made.request_id:
            return [made] if made in self.tracked else []
        return [one for one in self.tracked if one.sandbox_id == made.sandbox_id]

    def _drop_secret(self, made: Made) -> None:
        create = self.transport.secret_creates.get(made.sandbox_id)
        if create is not None and made.request_id in ("", create.request_id):
            del self.transport.secret_creates[made.sandbox_id]

    def after_fork(self) -> None:
        """In a forked child: the parent's sandboxes and background work stay the parent's."""
        self.tracked = {}
        leak(self.recordings)
        self.observers, self.recordings = Observers(), set()
        self.background.after_fork()
        self.heartbeats.after_fork()

    async def delete(self, made: Made, uid: str = "", *, retry: Retry | None = None) -> None:
        """Delete a sandbox; one that has ended, or is not there, is no error. It stays tracked until that has
        succeeded.
        """
        # NotFound: it ended long ago. FailedPrecondition: another incarnation has taken the id.
        with contextlib.suppress(errors.NotFound, errors.FailedPrecondition):
            if not uid and made.request_id:
                # It was in the queue when it was last seen: whoever has the id now need not be it.
                found = await self.transport.unary(
                    lambda c: c.sandbox.GetSandbox,
                    sandbox_service_pb2.GetSandboxRequest(sandbox_id=made.sandbox_id),
                    retry=retry,
                )
                if found.sandbox.request_id not in ("", made.request_id):
                    self.ended(made)
                    return
                uid = found.sandbox.uid
            await self.transport.unary(
                lambda c: c.sandbox.DeleteSandbox,
                sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=made.sandbox_id, uid=uid),
                retry=retry,
            )
        self.ended(made)

    async def delete_tracked(self) -> None:
        """Delete every tracked sandbox.

        Raises:
            OrchardError: some could not be deleted; they stay tracked.
        """
        gate = asyncio.Semaphore(_DELETES_AT_ONCE)

        async def delete(made: Made, uid: str) -> None:
            async with gate:
                await self.delete(made, uid)

        tracked = list(self.tracked.items())
        results = await asyncio.gather(*(delete(*item) for item in tracked), return_exceptions=True)
        failed = [
            (item[0].sandbox_id, r) for item, r in zip(tracked, results, strict=True) if isinstance(r, BaseException)
        ]
        if failed:
            raise errors.OrchardError(
                f"{len(failed)} sandboxes could not be deleted ({_names(name for name, _ in failed)}): {failed[0][1]}",
                reason="DELETE_FAILED",
            ) from failed[0][1]

    async def delete_tracked_elsewhere(self, seconds: float) -> None:
        """Delete every tracked sandbox by a session of its own: this one belongs to another event loop, perhaps a dead
        one.

        Raises:
            OrchardError: some could not be deleted; they stay tracked.
        """
        other = Session(self.profile, retry_seconds=seconds)
        other.tracked = dict(self.tracked)
        try:
            await other.close()
        finally:
            self.tracked = other.tracked

    async def _abort_recordings(self) -> None:
        """Recordings that nobody ended are of rollouts that did not come to their end. All have the same time."""
        closing = [
            recording.close("aborted", "the client was closed", seconds=_DRAIN_SECONDS) for recording in self.recordings
        ]
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if error is not None:
                _log.warning("%s", error)

    async def close(self) -> None:
        """Seal recordings, delete what is tracked, finish background work, close every connection."""
        try:
            try:
                await self._abort_recordings()
                await self.background.drain(_DRAIN_SECONDS)
            finally:
                # Also where the wait for the rest was cut short: nobody else would delete them.
                await self.delete_tracked()
        finally:
            self.heartbeats.forget()
            await self.transport.close()


def _names(ids: Iterable[str]) -> str:
    listed = list(ids)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")
