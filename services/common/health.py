"""Health that tells the truth: SERVING only while every dependency that the service named is well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio

from services.common.logs import get_logger

_log = get_logger(__name__)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_PATIENCE_SECONDS: Final = 5.0

READY: Final = "ready"
"""Health name that balancers ask for: SERVING from when every dependency has been well once until the server stops.
What is away later every replica lacks, and one that is left out for it could not even say so.
"""


class _Watched:
    """The context of a Watch stream, with what it has told."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.writing = asyncio.Lock()
        self.told: int | None = None

    async def write(self, response: health_pb2.HealthCheckResponse) -> None:
        """See grpc.aio.ServicerContext."""
        async with self.writing:
            await self._context.write(response)
            self.told = response.status


class _Servicer(aio.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """gRPC's own, whose Watch streams would last until the server cuts them."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    async def Watch(  # noqa: N802 (gRPC's name)
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> None:
        """Tell the state and each change until the server stops."""
        watched = _Watched(context)
        watching = asyncio.ensure_future(super().Watch(request, watched))
        ended = asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait((watching, ended), return_when=asyncio.FIRST_COMPLETED)
            async with watched.writing:
                # Not in the middle of a write: the stream would take no other and last until the server cuts it.
                watching.cancel()
        finally:
            watching.cancel()
            ended.cancel()
            await asyncio.gather(watching, ended, return_exceptions=True)
        if watched.told != _NOT_SERVING:
            # The end came before the change was told.
            await context.write(health_pb2.HealthCheckResponse(status=_NOT_SERVING))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server stops")


class Health:
    """Keeps the condition of each dependency; a dependency that was never reported well counts as not."""

    def __init__(self, dependencies: Sequence[str] = ()) -> None:
        self._wrong: dict[str, str] = dict.fromkeys(dependencies, "not reached yet")
        self._unreached = set(dependencies)
        self._awaited = set(dependencies)
        self._made = time.monotonic()
        self._servicer = _Servicer()
        self._names: tuple[str, ...] = ("",)
        self._stopped = False

    def register(self, server: grpc.aio.Server, service_names: Sequence[str] = ()) -> None:
        """Serve grpc.health.v1 for the whole server, each service name and READY. A further server tells the same."""
        self._names = tuple(dict.fromkeys((*self._names, *service_names)))
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def publish(self) -> None:
        """Tell callers and Watch streams the present state."""
        status = _NOT_SERVING if self._wrong or self._stopped else _SERVING
        for name in self._names:
            await self._servicer.set(name, status)
        await self._servicer.set(READY, _NOT_SERVING if self._awaited or self._stopped else _SERVING)

    async def well(self, dependency: str) -> None:
        """The dependency answers."""
        self._unreached.discard(dependency)
        self._awaited.discard(dependency)
        if self._wrong.pop(dependency, None) is not None:
            _log.info("dependency is well", dependency=dependency)
            await self.publish()

    async def unwell(self, dependency: str, why: str, *, detail: str = "") -> None:
        """The dependency does not answer. `detail`, such as a driver's own words, is for the log alone."""
        if dependency not in self._wrong or (
            dependency in self._unreached and time.monotonic() - self._made > _PATIENCE_SECONDS
        ):
            # At a start everything is away for a moment; what stays away has a reason, such as a wrong certificate.
            self._unreached.discard(dependency)
            more = {"detail": detail} if detail else {}
            _log.warning("dependency is unwell", dependency=dependency, why=why, **more)
        if self._wrong.get(dependency) != why:
            self._wrong[dependency] = why
            await self.publish()

    @property
    def wrong(self) -> dict[str, str]:
        """Dependencies that do not answer, and why."""
        return dict(self._wrong)

    async def shutdown(self) -> None:
        """NOT_SERVING from now on."""
        self._stopped = True
        await self.publish()

    def end_watches(self) -> None:
        """End every Watch stream, after those who watch have had time to see NOT_SERVING."""
        self._servicer.ended.set()
