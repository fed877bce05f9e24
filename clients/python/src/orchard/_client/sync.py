"""The synchronous client: a thin typed face of the asynchronous one, which runs on a background thread."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Self, Unpack

from orchard._client.arguments import explained
from orchard._client.audit import AuditEntry
from orchard._client.cleanup import REGISTRY
from orchard._client.client import AsyncSandboxClient
from orchard._client.errors import OrchardError
from orchard._client.judge.sync import Judge
from orchard._client.options import KEEP_ALIVE_SECONDS, CreateOptions, with_options
from orchard._client.portal import Portal
from orchard._client.sandbox import AsyncSandbox
from orchard._client.sync_sandbox import Sandbox
from orchard._client.tenants import Tenant
from orchard._client.trajectories.options import TrajectoryOptions
from orchard._client.trajectories.sync import Recording, Trajectories
from orchard._client.trajectories.types import Task
from orchard._client.types import (
    ApiKey,
    Image,
    ImportProgress,
    NewApiKey,
    SandboxInfo,
    SandboxState,
    Usage,
    Version,
)
from orchard._client.units import Seconds

_log: Final = logging.getLogger("orchard")


@explained
class SandboxClient:
    """A connection to the platform.

        with SandboxClient() as client, client.create() as sandbox:
            result = sandbox.exec("echo hello")

    Works in scripts, in notebooks (within a running event loop), from any number of threads, and after a fork: the
    child opens its own connections, and its parent's sandboxes stay the parent's. See AsyncSandboxClient for the rest.
    """

    def __init__(
        self, endpoint: str | None = None, *, api_key: str | None = None, retry_timeout: Seconds = 60.0
    ) -> None:
        self._client = AsyncSandboxClient(endpoint, api_key=api_key, retry_timeout=retry_timeout)
        self._portal = Portal()
        self._closed = False
        self.keys = Keys(self._portal, self._client)
        """API keys; needs the scope keys."""
        self.tenants = Tenants(self._portal, self._client)
        """Tenants and their quotas; needs the scope tenants."""
        self.images = Images(self._portal, self._client)
        """Images of a one-machine platform; needs the scope images."""
        self.trajectories = Trajectories(self._portal, self._client.trajectories)
        """What agents did, with its judgements and groups."""
        self.judge = Judge(self._portal, self._client.judge)
        """Verdicts of language models on what agents did."""
        REGISTRY.add_client(self)

    @property
    def endpoint(self) -> str:
        """Where the platform is."""
        return self._client.endpoint

    @with_options(CreateOptions)
    def create(
        self,
        image: str | None = None,
        *,
        wait: bool = True,
        timeout: Seconds | None = 1800.0,
        detach: bool = False,
        **options: Unpack[CreateOptions],
    ) -> Sandbox:
        """Make a sandbox. Interrupted or failing half-way, it leaves none behind. See AsyncSandboxClient.create."""
        REGISTRY.handle_sigterm()

        async def create() -> AsyncSandbox:
            return await self._client.create(image, wait=wait, timeout=timeout, detach=detach, **options)

        return Sandbox(self._portal, self._portal.run(create()))

    def get(self, sandbox_id: str) -> Sandbox:
        """A sandbox by its id; closing this client leaves it alone."""
        return Sandbox(self._portal, self._portal.run(self._client.get(sandbox_id)))

    def attach(self, sandbox_id: str) -> Sandbox:
        """A sandbox by its id, without asking the platform; closing this client leaves it alone."""
        return Sandbox(self._portal, self._client.attach(sandbox_id))

    def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        states: Sequence[SandboxState | str] = (),
        all: bool = False,  # noqa: A002 (as on the command line)
    ) -> Iterator[SandboxInfo]:
        """Sandboxes, newest first, page by page. See AsyncSandboxClient.list."""
        return self._portal.iterate(self._client.list(labels=labels, states=states, all=all))

    def delete(self, sandbox_id: str) -> None:
        """End a sandbox and everything in it."""
        self._portal.run(self._client.delete(sandbox_id))

    def heartbeat(self, sandbox_ids: Sequence[str]) -> Sequence[str]:
        """Renew sandboxes once, any number; returns the ids that are not alive."""
        return self._portal.run(self._client.heartbeat(sandbox_ids))

    def keep_alive(self, sandbox: Sandbox, *, heartbeat_timeout: Seconds = KEEP_ALIVE_SECONDS) -> None:
        """Send heartbeats for a sandbox in the background until it or this client ends."""

        async def keep() -> None:
            self._client.keep_alive(sandbox.asynchronous, heartbeat_timeout=heartbeat_timeout)

        self._portal.run(keep())

    @with_options(TrajectoryOptions)
    def record(
        self, task: Task | str | None = None, *, sandbox: Sandbox | None = None, **options: Unpack[TrajectoryOptions]
    ) -> Recording:
        """Keep a rollout as a trajectory, which is sealed at the end. See AsyncSandboxClient.record.

        with client.record(task="django__django-11099", sandbox=sandbox) as trajectory:
            trajectory.add({"role": "user", "content": "..."})
        """
        attached = None if sandbox is None else sandbox.asynchronous
        return Recording(self._portal, self._client.record(task, sandbox=attached, **options))

    def version(self) -> Version:
        """Which build answers, and for which tenant."""
        return self._portal.run(self._client.version())

    def usage(
        self,
        *,
        start: dt.datetime | None = None,
        end: dt.datetime | None = None,
        group_by: str = "",
        tenant: str = "",
    ) -> Sequence[Usage]:
        """What sandboxes used in a period. See AsyncSandboxClient.usage."""
        return self._portal.run(self._client.usage(start=start, end=end, group_by=group_by, tenant=tenant))

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
    ) -> Iterator[AuditEntry]:
        """Who changed what and what was refused, newest first. See AsyncSandboxClient.audit."""
        return self._portal.iterate(
            self._client.audit(
                tenant=tenant,
                key_id=key_id,
                method=method,
                target=target,
                status=status,
                start=start,
                end=end,
                page_size=page_size,
            )
        )

    def close(self) -> None:
        """Delete the sandboxes that this client made, and close every connection. It cannot be used afterwards."""
        if self._closed:
            return
        self._closed = True
        try:
            self._portal.run(self._client.close())
        finally:
            self._portal.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OrchardError as failure:
            if error is None:
                raise
            _log.warning("%s", failure)


@explained
class Keys:
    """See AsyncKeys."""

    def __init__(self, portal: Portal, client: AsyncSandboxClient) -> None:
        self._portal = portal
        self._keys = client.keys

    def create(
        self,
        tenant: str,
        *,
        name: str = "",
        roles: Sequence[str] | None = None,
        scopes: Sequence[str] = (),
        ttl: Seconds | None = None,
    ) -> NewApiKey:
        """Make a key; its secret is shown this once."""
        return self._portal.run(self._keys.create(tenant, name=name, roles=roles, scopes=scopes, ttl=ttl))

    def list(self, *, tenant: str = "") -> Iterator[ApiKey]:
        """Keys, newest first; of one tenant, or of all."""
        return self._portal.iterate(self._keys.list(tenant=tenant))

    def revoke(self, key_id: str) -> ApiKey:
        """Stop a key within a few seconds."""
        return self._portal.run(self._keys.revoke(key_id))


@explained
class Tenants:
    """See AsyncTenants."""

    def __init__(self, portal: Portal, client: AsyncSandboxClient) -> None:
        self._portal = portal
        self._tenants = client.tenants

    def set(
        self,
        tenant: str,
        *,
        sandboxes: int | None = None,
        cpu: float | None = None,
        memory: int | str | None = None,
        creates_per_second: float | None = None,
        maximum_lifetime: Seconds | None = None,
    ) -> Tenant:
        """Set a tenant's quota as a whole: what is left out is not bounded any more."""
        return self._portal.run(
            self._tenants.set(
                tenant,
                sandboxes=sandboxes,
                cpu=cpu,
                memory=memory,
                creates_per_second=creates_per_second,
                maximum_lifetime=maximum_lifetime,
            )
        )

    def list(self, *, tenant: str = "") -> Iterator[Tenant]:
        """Tenants that have a quota or a key, by name; or only one."""
        return self._portal.iterate(self._tenants.list(tenant=tenant))


@explained
class Images:
    """See AsyncImages."""

    def __init__(self, portal: Portal, client: AsyncSandboxClient) -> None:
        self._portal = portal
        self._images = client.images

    def import_image(self, name: str, source: str, *, replace: bool = False) -> Iterator[ImportProgress]:
        """Import an archive or folder that is on the platform's machine; yields its progress."""
        return self._portal.iterate(self._images.import_image(name, source, replace=replace))

    def list(self) -> Iterator[Image]:
        """Images, by name."""
        return self._portal.iterate(self._images.list())

    def remove(self, name: str) -> None:
        """Remove an image."""
        self._portal.run(self._images.remove(name))
