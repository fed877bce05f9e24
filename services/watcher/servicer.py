"""WatchService: proto to domain and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from orchard.watch.v1 import watch_service_pb2, watch_service_pb2_grpc

from services.common.errors import UnavailableError
from services.common.observed import to_proto
from services.watcher.service import Watcher

_BOOKMARK_SECONDS: Final = 5.0


class WatchServicer(watch_service_pb2_grpc.WatchServiceServicer):
    """Serves orchard.watch.v1.WatchService."""

    def __init__(self, watcher: Watcher, stopping: asyncio.Event) -> None:
        self._watcher = watcher
        self._stopping = stopping

    async def WatchSandboxes(  # noqa: N802 (gRPC's name)
        self,
        request: watch_service_pb2.WatchSandboxesRequest,
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[watch_service_pb2.WatchSandboxesResponse]:
        """Stream the snapshot, Synced, then changes."""
        response = watch_service_pb2.WatchSandboxesResponse
        snapshot, subscription = self._watcher.subscribe()
        complete = self._watcher.complete_revision
        with subscription:
            for sandbox in snapshot:
                yield response(sandbox=to_proto(sandbox, include_spec=request.include_spec))
            yield response(synced=watch_service_pb2.Synced(), complete_revision=complete)
            while not self._stopping.is_set():
                changes = await subscription.next(_BOOKMARK_SECONDS)
                # Of the same moment as the changes: nothing is published between the two.
                complete = self._watcher.complete_revision
                if not self._watcher.synced:
                    raise UnavailableError(
                        "this watcher has lost the runtime; start another stream", reason="WATCHER_NOT_SYNCED"
                    )
                for sandbox in changes[:-1]:
                    yield response(sandbox=to_proto(sandbox, include_spec=request.include_spec))
                for sandbox in changes[-1:]:
                    last = to_proto(sandbox, include_spec=request.include_spec)
                    yield response(sandbox=last, complete_revision=complete)
                if not changes:
                    yield response(bookmark=watch_service_pb2.Bookmark(), complete_revision=complete)
        raise UnavailableError("the watcher stops; start another stream", reason="SERVER_STOPPING")
