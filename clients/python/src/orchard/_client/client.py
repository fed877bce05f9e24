"""AsyncSandboxClient: makes, finds and keeps sandboxes."""

from __future__ import annotations

import datetime as dt
import logging
import secrets
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Self, Unpack

from orchard._client import errors
from orchard._client.admin import AsyncImages, AsyncKeys, get_usage, get_version
from orchard._client.arguments import explained
from orchard._client.audit import AuditEntry, list_audit
from orchard._client.convert import sandbox_info
from orchard._client.creating import Creation
from orchard._client.judge.client import AsyncJudge
from orchard._client.options import (
    KEEP_ALIVE_SECONDS,
    CreateOptions,
    check_sandbox_id,
    sandbox_spec,
    secret_env,
    with_options,
)
from orchard._client.paging import paged
from orchard._client.pending import Pending
from orchard._client.profile import load_profile
from orchard._client.sandbox import AsyncSandbox
from orchard._client.session import Made, Session
from orchard._client.tenants import AsyncTenants
from orchard._client.trajectories.client import AsyncTrajectories
from orchard._client.trajectories.options import TrajectoryOptions, trajectory_message
from orchard._client.trajectories.recording import AsyncRecording
from orchard._client.trajectories.types import Task
from orchard._client.types import SandboxInfo, SandboxState, Usage, Version
from orchard._client.units import Seconds, seconds_of
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2

_log: Final = logging.getLogger("orchard")
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"


def new_sandbox_id() -> str:
    """An id that nobody else has; chosen here, so that a create that was cut off can be undone."""
    return "sb-" + "".join(secrets.choice(_ALPHABET) for _ in range(16))


@explained
class AsyncSandboxClient:
    """A connection to the platform, for one event loop.

        async with AsyncSandboxClient() as client, client.create() as sandbox:
            result = await sandbox.exec("echo hello")

    Sandboxes that it made are deleted when it is closed, and when the program ends. Thousands of sandboxes can be
    used at once through one client. Background heartbeats run on the event loop: a loop that is blocked sends none.

    Args:
        endpoint: "host:port", "https://host:port" or "unix:/path". Default: ORCHARD_ENDPOINT, else the profile of
            `orchard up`.
        api_key: Default: ORCHARD_API_KEY, else the profile's.
        retry_timeout: how long an operation is repeated without any success before it fails with Unavailable. Seconds.

    Raises:
        ConfigurationError: no endpoint or key is to be found.
    """

    def __init__(
        self, endpoint: str | None = None, *, api_key: str | None = None, retry_timeout: Seconds = 60.0
    ) -> None:
        profile = load_profile(endpoint, api_key)
        self._session = Session(profile, retry_seconds=seconds_of("retry_timeout", retry_timeout))
        self.keys = AsyncKeys(self._session.transport)
        """API keys; needs the scope keys."""
        self.tenants = AsyncTenants(self._session.transport)
        """Tenants and their quotas; needs the scope tenants."""
        self.images = AsyncImages(self._session.transport)
        """Images of a one-machine platform; needs the scope images."""
        self.trajectories = AsyncTrajectories(self._session.transport)
        """What agents did, with its judgements and groups."""
        self.judge = AsyncJudge(self._session.transport, self.trajectories)
        """Verdicts of language models on what agents did."""

    @property
    def endpoint(self) -> str:
        """Where the platform is."""
        return self._session.profile.endpoint

    @with_options(CreateOptions)
    def create(
        self,
        image: str | None = None,
        *,
        wait: bool = True,
        timeout: Seconds | None = 1800.0,
        detach: bool = False,
        **options: Unpack[CreateOptions],
    ) -> Pending[AsyncSandbox]:
        """Make a sandbox. Cancelled or failing half-way, it leaves none behind.

        Args:
            image: what to start from. Required on a cluster; the host's root file system by default on one machine.
            wait: return when it is ready for commands, instead of when it was accepted.
            timeout: how long to wait, the queue included. Seconds.
            detach: let it live on when this client is closed; with keep_alive, until its heartbeats are missed.
            options: see CreateOptions: env, secret_env, labels, cpu, memory, network, ttl, idle_timeout, keep_alive,
                user, ...

        Raises:
            SandboxStartFailed: it did not become ready; `reason` says why.
            InvalidArgument: an option breaks a rule.
            ImageNotFound: the image was never imported.
            AlreadyExists: the id is taken.
            QuotaExceeded: the queue is full.
            DeadlineExceeded: it is not ready in time.
        """
        request = sandbox_service_pb2.CreateSandboxRequest(
            sandbox_id=options.get("sandbox_id") or new_sandbox_id(),
            request_id=uuid.uuid4().hex,
            spec=sandbox_spec(image, options),
            secret_env=secret_env(options),
        )
        seconds = None if timeout is None else seconds_of("timeout", timeout)
        creation = Creation(self._session, request, keep_alive=bool(options.get("keep_alive")))
        return Pending(creation.run(seconds, wait=wait, detach=detach))

    async def get(self, sandbox_id: str) -> AsyncSandbox:
        """A sandbox by its id; closing this client leaves it alone.

        Raises:
            SandboxNotFound: there is none, or it ended more than a day ago.
        """
        sandbox = self.attach(sandbox_id)
        await sandbox.refresh()
        return sandbox

    def attach(self, sandbox_id: str) -> AsyncSandbox:
        """A sandbox by its id, without asking the platform; closing this client leaves it alone.

        Raises:
            InvalidArgument: no sandbox can have that id.
        """
        check_sandbox_id(sandbox_id)
        return AsyncSandbox(self._session, sandbox_info(sandbox_pb2.Sandbox(sandbox_id=sandbox_id)))

    def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        states: Sequence[SandboxState | str] = (),
        all: bool = False,  # noqa: A002 (as on the command line)
    ) -> AsyncGenerator[SandboxInfo, None]:
        """Sandboxes, newest first, page by page.

        Args:
            labels: only those that have every one of these.
            states: only these states. Default: every state that is not final.
            all: every state.
        """
        wanted = [state for state in SandboxState if state is not SandboxState.UNKNOWN] if all else states
        numbers = [_state_number(state) for state in wanted]
        request = sandbox_service_pb2.ListSandboxesRequest(page_size=1000, states=numbers, labels=labels)
        transport = self._session.transport
        return paged(transport, lambda c: c.sandbox.ListSandboxes, request, lambda page: page.sandboxes, sandbox_info)

    async def delete(self, sandbox_id: str) -> None:
        """End a sandbox and everything in it.

        Raises:
            SandboxNotFound: there is none of this id.
        """
        response = await self._session.transport.unary(
            lambda c: c.sandbox.DeleteSandbox, sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=sandbox_id)
        )
        self._session.ended(Made(sandbox_id, response.sandbox.request_id))

    async def heartbeat(self, sandbox_ids: Sequence[str]) -> Sequence[str]:
        """Renew sandboxes once, any number; returns the ids that are not alive."""
        return await self._session.heartbeats.beat(sandbox_ids)

    def keep_alive(self, sandbox: AsyncSandbox, *, heartbeat_timeout: Seconds = KEEP_ALIVE_SECONDS) -> None:
        """Send heartbeats for a sandbox in the background until it or this client ends.

        Args:
            sandbox: which one.
            heartbeat_timeout: the timeout that it was created with; four heartbeats are sent within it.
        """
        self._session.heartbeats.add(*sandbox.made, seconds_of("heartbeat_timeout", heartbeat_timeout))

    @with_options(TrajectoryOptions)
    def record(
        self,
        task: Task | str | None = None,
        *,
        sandbox: AsyncSandbox | None = None,
        **options: Unpack[TrajectoryOptions],
    ) -> AsyncRecording:
        """Keep a rollout as a trajectory, which is sealed at the end: COMPLETED, FAILED by an exception, ABORTED by a
        cancellation or a failure of the platform.

            async with client.record(task="django__django-11099", sandbox=sandbox) as trajectory:
                trajectory.add({"role": "user", "content": "..."})

        Args:
            task: what it is an attempt at; a string is an instance's id.
            sandbox: record this sandbox's commands too, as `attach` does.
            options: see TrajectoryOptions: group_id, attempt, harness, model, tools, labels, ...

        Raises:
            InvalidArgument: a value cannot be meant.

        Raises, on entry:
            AlreadyExists: the id is taken.
            InvalidArgument: a value breaks a rule.

        Raises, on exit:
            RecordingIncomplete: some of it could not be stored.
        """
        # What cannot be meant is told here, where it stands.
        trajectory_message(task, options)
        return AsyncRecording(self._session, self.trajectories, task, options, sandbox)

    async def version(self) -> Version:
        """Which build answers, and for which tenant."""
        return await get_version(self._session.transport)

    async def usage(
        self,
        *,
        start: dt.datetime | None = None,
        end: dt.datetime | None = None,
        group_by: str = "",
        tenant: str = "",
    ) -> Sequence[Usage]:
        """What sandboxes used in a period: one sum, or one for each value of a label, most sandbox-seconds first.

        Args:
            start: begin of the period. Default: the beginning.
            end: its end. Default: now.
            group_by: a label.
            tenant: another tenant than one's own; needs the role admin.
        """
        return await get_usage(self._session.transport, start=start, end=end, group_by=group_by, tenant=tenant)

    def audit(
        self,
        *,
        tenant: str = "",
        key_id: str = "",
        method: str = "",
        target: str = "",
        status: str = "",
        start: dt.datetime | None = None,
        end: dt.datetime | None = None,
        page_size: int = 1000,
    ) -> AsyncIterator[AuditEntry]:
        """Who changed what and what was refused, newest first; needs the scope audit. Empty arguments select all.

        Args:
            tenant: another than one's own needs the role admin, which sees all by default.
            key_id: calls with this key.
            method: whole, or the part behind its '/', like "DeleteSandbox".
            target: id or name of a sandbox, key, tenant or image.
            status: like "OK" or "PERMISSION_DENIED".
            start: entries from this time on.
            end: entries before this time.
            page_size: how many are asked for at once, at most 1000.
        """
        return list_audit(
            self._session.transport,
            tenant=tenant,
            key_id=key_id,
            method=method,
            target=target,
            status=status,
            start=start,
            end=end,
            page_size=page_size,
        )

    async def close(self) -> None:
        """Delete the sandboxes that this client made, and close every connection. It cannot be used afterwards.

        Raises:
            OrchardError: a sandbox could not be deleted.
        """
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._session.background.shielded("close", self.close())
        except errors.OrchardError as failure:
            if error is None:
                raise
            _log.warning("%s", failure)


def _state_number(state: SandboxState | str) -> sandbox_pb2.SandboxState.ValueType:
    name = str(state)
    if name not in SandboxState._value2member_map_ or name == SandboxState.UNKNOWN:
        known = ", ".join(s for s in SandboxState if s is not SandboxState.UNKNOWN)
        raise errors.InvalidArgument.of("states", f"{name!r} is none of {known}")
    return sandbox_pb2.SandboxState.Value(f"SANDBOX_STATE_{name.upper()}")
