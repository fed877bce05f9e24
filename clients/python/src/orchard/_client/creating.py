"""One create: asked for once, whatever is cut, and undone if nobody wants it any more."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from orchard._client import errors
from orchard._client.calls import CallContext
from orchard._client.convert import sandbox_info
from orchard._client.sandbox import AsyncSandbox
from orchard._client.session import Made, Session
from orchard._client.types import SandboxInfo
from orchard._client.units import duration_seconds
from orchard.sandbox.v1 import sandbox_service_pb2

# Nothing was made, or it is not ours.
_REFUSED: Final = (
    errors.InvalidArgument,
    errors.AlreadyExists,
    errors.Unauthenticated,
    errors.PermissionDenied,
    errors.NotFound,
    errors.QuotaExceeded,
    errors.Unimplemented,
)


class Creation:
    """A sandbox that is being asked for."""

    def __init__(
        self, session: Session, request: sandbox_service_pb2.CreateSandboxRequest, *, keep_alive: bool
    ) -> None:
        self._session = session
        self._request = request
        self._keep_alive = keep_alive
        self._made = Made(request.sandbox_id, request.request_id)

    async def run(self, seconds: float | None, *, wait: bool, detach: bool) -> AsyncSandbox:
        """Ask for it and, with `wait`, wait so long until it is ready; see AsyncSandboxClient.create."""
        session, sandbox_id = self._session, self._request.sandbox_id
        with session.transport.operation("create", sandbox_id=sandbox_id) as operation:
            context = session.transport.context(operation)
            # The call itself is never cut: whatever becomes of it is known, and undone if nobody wants it any more.
            accepted = session.background.start(f"create {sandbox_id}", self._submit(context))
            try:
                sandbox = AsyncSandbox(
                    session,
                    await asyncio.shield(accepted),
                    request_id=self._request.request_id,
                    repeat=lambda: self._repeat(context),
                )
                if self._keep_alive:
                    self._keep()
                if wait:
                    await sandbox.wait_ready(seconds)
            except BaseException as error:
                if not isinstance(error, _REFUSED) and session.tracks(self._made):
                    await session.background.shielded(f"undo {sandbox_id}", self._undo(accepted))
                raise
        if detach:
            sandbox.detach()
        return sandbox

    async def _submit(self, context: CallContext) -> SandboxInfo:
        session, request, made = self._session, self._request, self._made
        # The id may be taken by an earlier sandbox of this client, which stays tracked as it is.
        session.track(made)
        retry = session.transport.retry()
        try:
            response = await session.transport.unary(
                lambda c: c.sandbox.CreateSandbox, request, context=context, retry=retry
            )
        except errors.OrchardError as error:
            # Of one that never left this machine nothing can be there either.
            never_sent = isinstance(error, errors.Unavailable) and not retry.may_have_acted
            if never_sent or isinstance(error, _REFUSED):
                session.ended(made)
            raise
        info = sandbox_info(response.sandbox)
        # An id is given again only when the sandbox that had it has ended.
        for earlier in [one for one in session.tracked if one.sandbox_id == made.sandbox_id and one != made]:
            session.ended(earlier)
        session.track(made, info.uid)
        if request.secret_env:
            session.transport.secret_creates[info.sandbox_id] = request
        return info

    def _keep(self) -> None:
        request = self._request
        self._session.heartbeats.add(
            request.sandbox_id, request.request_id, duration_seconds(request.spec.heartbeat_timeout)
        )

    async def _repeat(self, context: CallContext) -> None:
        """Ask for a sandbox anew that was lost before it was made; it is deleted at the end if it would have been."""
        wanted = self._session.tracks(self._made)
        try:
            # Refused, it is tracked no longer: whoever has the id now, it is not ours to delete.
            await self._submit(context)
        finally:
            if not wanted:
                self._session.detach(self._made)
        if self._keep_alive:
            # While it was lost it was not alive, and heartbeats for it may have ended.
            self._keep()

    async def _undo(self, accepted: asyncio.Task[SandboxInfo]) -> None:
        """Delete what a create has made. If the platform cannot be reached it stays tracked, and its end is tried
        again at close.
        """
        with contextlib.suppress(errors.OrchardError):
            await asyncio.wait([accepted])
            # Accepted or not, perhaps nobody knows: it has no uid then, and is deleted only if it is of this request.
            await self._session.delete(self._made, self._session.tracked.get(self._made, ""))
