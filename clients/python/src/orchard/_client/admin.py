"""Keys, images, usage and version."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from orchard._client import convert
from orchard._client.arguments import explained
from orchard._client.errors import InvalidArgument
from orchard._client.paging import paged
from orchard._client.status import CallFailed
from orchard._client.transport import Retry, Transport
from orchard._client.types import ApiKey, Image, ImportProgress, NewApiKey, Usage, Version
from orchard._client.units import Seconds, duration, timestamp
from orchard.admin.v1 import (
    admin_pb2,
    image_service_pb2,
    key_service_pb2,
    usage_service_pb2,
    version_service_pb2,
)


@explained
class AsyncKeys:
    """API keys; needs the scope keys. Without the role admin, those of one's own tenant."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self,
        tenant: str,
        *,
        name: str = "",
        roles: Sequence[str] | None = None,
        scopes: Sequence[str] = (),
        ttl: Seconds | None = None,
    ) -> NewApiKey:
        """Make a key; its secret is shown this once. Not repeated when the connection breaks, so that no unknown key
        is left.

        Args:
            tenant: whom its bearer acts for.
            name: a name for people.
            roles: bundles of scopes: "user" (what is its tenant's but keys), "admin" (all, for every tenant). Default:
                "user", or none where `scopes` are given.
            scopes: single scopes: sandboxes:read, sandboxes:write, exec, files, trajectories:read, trajectories:write,
                judgements:read, judgements:write, usage, keys, tenants, images, audit, debug.
            ttl: how long it works. None: until it is revoked.

        Raises:
            InvalidArgument, PermissionDenied: as their names say.
        """
        if roles is None:
            roles = () if scopes else ("user",)
        request = key_service_pb2.CreateKeyRequest(
            tenant=tenant, name=name, roles=[_role(role) for role in roles], scopes=scopes
        )
        if ttl is not None:
            request.ttl.CopyFrom(duration("ttl", ttl))
        response = await self._transport.unary(lambda c: c.key.CreateKey, request, retry=Retry(0.0))
        return NewApiKey(convert.api_key(response.key), response.secret)

    def list(self, *, tenant: str = "") -> AsyncGenerator[ApiKey, None]:
        """Keys, newest first; of one tenant, or of all."""
        request = key_service_pb2.ListKeysRequest(page_size=1000, tenant=tenant)
        return paged(self._transport, lambda c: c.key.ListKeys, request, lambda page: page.keys, convert.api_key)

    async def revoke(self, key_id: str) -> ApiKey:
        """Stop a key within a few seconds.

        Raises:
            NotFound: there is none of this id.
        """
        response = await self._transport.unary(
            lambda c: c.key.RevokeKey, key_service_pb2.RevokeKeyRequest(key_id=key_id)
        )
        return convert.api_key(response.key)


@explained
class AsyncImages:
    """Images of a one-machine platform; needs the scope images, which the role admin has."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def import_image(self, name: str, source: str, *, replace: bool = False) -> AsyncIterator[ImportProgress]:
        """Import a `docker save` archive, OCI layout, root tar or folder that is on the platform's machine; yields
        its progress.

        Raises:
            NotFound, InvalidArgument, AlreadyExists, NoSpace: as their names say.
        """
        request = image_service_pb2.ImportImageRequest(name=name, source_path=source, replace=replace)
        try:
            async with self._transport.stream(
                lambda c: c.image.ImportImage, request, self._transport.context()
            ) as stream:
                async for response in stream:
                    image = convert.image(response.image) if response.HasField("image") else None
                    yield ImportProgress(response.done_bytes, response.total_bytes, image)
        except CallFailed as error:
            await self._transport.pause_or_raise(error, Retry(0.0), "")

    def list(self) -> AsyncGenerator[Image, None]:
        """Images, by name."""
        request = image_service_pb2.ListImagesRequest(page_size=1000)
        return paged(self._transport, lambda c: c.image.ListImages, request, lambda page: page.images, convert.image)

    async def remove(self, name: str) -> None:
        """Remove an image.

        Raises:
            NotFound: there is none of this name.
            FailedPrecondition: sandboxes use it.
        """
        await self._transport.unary(lambda c: c.image.RemoveImage, image_service_pb2.RemoveImageRequest(name=name))


async def get_version(transport: Transport) -> Version:
    """Which build answers."""
    response = await transport.unary(lambda c: c.version.GetVersion, version_service_pb2.GetVersionRequest())
    return Version(response.version, response.minimum_agent_version, response.runtime, response.tenant)


async def get_usage(
    transport: Transport,
    *,
    start: dt.datetime | None,
    end: dt.datetime | None,
    group_by: str,
    tenant: str,
) -> Sequence[Usage]:
    """What was used in a period."""
    request = usage_service_pb2.GetUsageRequest(tenant=tenant, group_by_label=group_by)
    if start is not None:
        request.start_time.CopyFrom(timestamp(start))
    if end is not None:
        request.end_time.CopyFrom(timestamp(end))
    response = await transport.unary(lambda c: c.usage.GetUsage, request)
    return [convert.usage(usage) for usage in response.usages]


def _role(name: str) -> admin_pb2.Role.ValueType:
    if name not in ("user", "admin"):
        raise InvalidArgument.of("roles", f"{name!r} is none of user, admin")
    return admin_pb2.Role.Value(f"ROLE_{name.upper()}")
