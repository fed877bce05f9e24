"""What a client and its sandboxes share: transport, background work, heartbeats, and which sandboxes to delete at the
end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from orchard._client import errors
from orchard._client.background import Background
from orchard._client.cleanup import REGISTRY
from orchard._client.leases import Heartbeats
from orchard._client.profile import Profile
from orchard._client.runtime import leak
from orchard._client.tracing import Tracing
from orchard._client.trajectories.commands import Observers
from orchard._client.transport import Retry, Transport
from orchard.sandbox.v1 import sandbox_service_pb2

if TYPE_CHECKING:
    from orchard._client.trajectories.recording import AsyncRecording

_log: Final = logging.getLogger("orchard")
_DELETES_AT_ONCE: Final = 64
_DRAIN_SECONDS: Final = 15.0


class Session:
    """One client's state."""

    def __init__(self, profile: Profile, *, retry_seconds: float) -> None:
        self.profile = profile
        self.transport = Transport(profile, retry_seconds=retry_seconds, tracing=Tracing.from_environment())
        self.background = Background()
        self.heartbeats = Heartbeats(self.transport)
        self.tracked: dict[str, str] = {}
        """Id and uid (empty if not known yet) of sandboxes to delete when the client is closed."""
        self.observers = Observers()
        """Who looks at the commands of which sandbox."""
        self.recordings: set[AsyncRecording] = set()
        """Those that are not sealed yet."""
        self._pid = os.getpid()
        REGISTRY.add(self)

    def track(self, sandbox_id: str, uid: str = "") -> None:
        """Delete this sandbox when the client is closed, or when the program ends."""
        self.tracked[sandbox_id] = uid
        REGISTRY.hold(self)

    def untrack(self, sandbox_id: str) -> None:
        """Leave this sandbox alone."""
        self.tracked.pop(sandbox_id, None)
        self.heartbeats.remove(sandbox_id)
        self.transport.secret_creates.pop(sandbox_id, None)
        if not self.tracked:
            REGISTRY.release(self)

    def after_fork(self) -> None:
        """In a forked child: the parent's sandboxes and background work stay the parent's."""
        self.tracked = {}
        leak(self.recordings)
        self.observers, self.recordings = Observers(), set()
        self.background.after_fork()
        self.heartbeats.after_fork()

    async def delete(self, sandbox_id: str, uid: str = "", *, retry: Retry | None = None) -> None:
        """Delete a sandbox; one that has ended, or is not there, is no error. It stays tracked until that has
        succeeded.
        """
        # NotFound: it ended long ago. FailedPrecondition: another incarnation has taken the id.
        with contextlib.suppress(errors.NotFound, errors.FailedPrecondition):
            await self.transport.unary(
                lambda c: c.sandbox.DeleteSandbox,
                sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=sandbox_id, uid=uid),
                retry=retry,
            )
        self.untrack(sandbox_id)

    async def delete_tracked(self) -> None:
        """Delete every tracked sandbox.

        Raises:
            OrchardError: some could not be deleted; they stay tracked.
        """
        gate = asyncio.Semaphore(_DELETES_AT_ONCE)

        async def delete(sandbox_id: str, uid: str) -> None:
            async with gate:
                await self.delete(sandbox_id, uid)

        tracked = list(self.tracked.items())
        results = await asyncio.gather(*(delete(*item) for item in tracked), return_exceptions=True)
        failed = [(item[0], r) for item, r in zip(tracked, results, strict=True) if isinstance(r, BaseException)]
        if failed:
            raise errors.OrchardError(
                f"{len(failed)} sandboxes could not be deleted ({_names(name for name, _ in failed)}): {failed[0][1]}",
                reason="DELETE_FAILED",
            ) from failed[0][1]

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
