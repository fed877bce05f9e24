"""Channels from the supervisor to services of this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from grpc.aio import Channel

# Not those of services.common.server, whose import would cost the start half a second.
_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_reconnect_backoff_ms", 500),
)


def open_channel(address: str) -> Channel:
    """A channel to "host:port" or "unix:/path". gRPC is imported late: the services start meanwhile."""
    # Every fork of ours is followed by an exec; gRPC's fork support would only warn about its threads.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    import grpc.aio

    return grpc.aio.insecure_channel(address, options=_OPTIONS)
