"""The node daemon as the watcher sees it, whatever that runs sandboxes with: its stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import grpc
import grpc.aio
from orchard.node.v1 import node_pb2, node_service_pb2, node_service_pb2_grpc

from services.common.channel import connect
from services.common.errors import UnavailableError
from services.common.observed import Observed
from services.common.states import Reason, State
from services.common.times import to_ms
from services.common.validation import seconds_of
from services.watcher.model import Bookmark, Seen, Synced

_STATES: Final = {
    node_pb2.NODE_SANDBOX_PHASE_STARTING: State.STARTING,
    node_pb2.NODE_SANDBOX_PHASE_RUNNING: State.STARTING,
    node_pb2.NODE_SANDBOX_PHASE_STOPPING: State.DELETING,
    node_pb2.NODE_SANDBOX_PHASE_FAILED: State.FAILED,
    node_pb2.NODE_SANDBOX_PHASE_GONE: State.DELETED,
}


class NodeRuntime:
    """Watches one node daemon."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def watch(self) -> AsyncIterator[Seen | Synced | Bookmark]:
        """See model.Runtime."""
        async with connect(self._address) as channel:
            stub = node_service_pb2_grpc.NodeServiceStub(channel)
            call = stub.WatchSandboxes(node_service_pb2.WatchSandboxesRequest())
            try:
                async for response in call:
                    event, complete = response.WhichOneof("event"), response.complete_revision
                    if event == "sandbox":
                        yield _seen(response.sandbox, complete)
                    else:
                        yield Synced(complete) if event == "synced" else Bookmark(complete)
            except grpc.aio.AioRpcError as error:
                raise UnavailableError(f"the node daemon's stream broke: {error.code().name}") from None
            finally:
                call.cancel()


def _seen(sandbox: node_pb2.NodeSandbox, complete_revision: int) -> Seen:
    running = sandbox.phase == node_pb2.NODE_SANDBOX_PHASE_RUNNING
    return Seen(
        Observed(
            tenant=sandbox.tenant,
            sandbox_id=sandbox.sandbox_id,
            uid=sandbox.uid,
            revision=sandbox.revision,
            state=_STATES[sandbox.phase],
            reason=Reason(sandbox.reason),
            message=sandbox.message,
            endpoint=sandbox.endpoint if running else "",
            create_ms=to_ms(sandbox.create_time),
            expire_ms=to_ms(sandbox.expire_time),
            request_id=sandbox.request_id,
            spec_hash=sandbox.spec_hash,
            spec=sandbox.spec.SerializeToString(deterministic=True),
        ),
        start_timeout_seconds=seconds_of(sandbox.spec.start_timeout) or 60.0,
        complete_revision=complete_revision,
    )
