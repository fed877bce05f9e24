"""Server bootstrap: options, health, reflection, channelz, and a graceful stop in the one right order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.logs import get_logger
from services.common.tls import TlsFiles, server_credentials

_log = get_logger(__name__)

MESSAGE_LIMIT: Final = 4 << 20  # StartExec and Exec requests may have 3 MiB
STREAM_GRACE_SECONDS: Final = 5.0
_CUT_SECONDS: Final = 1.0  # what calls get to say that they are given up, before they are cut

SERVER_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    # A second server on a port must fail instead of silently sharing it.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_concurrent_streams", 100_000),
    # The client's keepalive pings every 30 s, also while idle; gRPC's default would end such connections with GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # And ours to the client: the calls of one that vanished without a word end within 80 s. As often as it takes, also
    # while nothing is sent (the default stops after two).
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Despite its name the time that an attempt to connect may take; a busy machine needs more than an idle one.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A peer whose machine is gone is found within 40 s while a call runs. The time for the answer to a ping is this
    # option's: grpc.keepalive_timeout_ms alone leaves it at a minute (measured, grpcio 1.85).
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Each service and agent has its own connection; sharing gRPC's global pool would keep dead ones alive.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class ListenError(Exception):
    """The address cannot be listened on; the message says why and what to do."""


class Server:
    """A gRPC server of one service.

    Add servicers to `grpc_server`, then `start`. `stopping` is set first when it stops, so that long streams can end
    themselves with UNAVAILABLE instead of being cut.
    """

    def __init__(
        self,
        *,
        interceptor: CallInterceptor,
        health: Health,
        service_names: Sequence[str],
        reflection: bool = True,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._interceptor = interceptor
        self.health = health
        self.stopping = asyncio.Event()
        self.grpc_server = grpc.aio.server(
            interceptors=[interceptor], options=[*(dict(SERVER_OPTIONS) | dict(options)).items()]
        )
        self._health_server: grpc.aio.Server | None = None
        health.register(self.grpc_server, service_names)
        if reflection:
            _add_debug_services(self.grpc_server, service_names)

    async def start(self, address: str, *, tls: TlsFiles | None = None, health_address: str = "") -> int:
        """Listen and serve. `address` is "host:port" (port 0: any) or "unix:/path"; returns the port.

        Args:
            address: where. A Unix socket is always in the clear.
            tls: certificate and key to serve with, and the CA of which clients must have theirs.
            health_address: another address, in the clear, for grpc.health.v1 alone: probes that cannot speak TLS.

        Raises:
            ListenError: the port is in use, or the socket's folder is not there.
            TlsError: a file of `tls` cannot be used.
        """
        encrypted = tls is not None and not address.startswith("unix:")
        credentials = server_credentials(tls) if tls is not None and encrypted else None
        port = _listen(self.grpc_server, address, credentials)
        if health_address:
            self._health_server = grpc.aio.server(options=SERVER_OPTIONS)
            self.health.register(self._health_server)
            _listen(self._health_server, health_address, None)
        # gRPC's own health begins with SERVING, which would be a lie for a moment.
        await self.health.publish()
        await self.grpc_server.start()
        if self._health_server is not None:
            await self._health_server.start()
        where = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
        _log.info("serving", address=where, tls=encrypted)
        return port

    async def stop(self, *, notice_seconds: float = 0.0, wake: Callable[[], None] = lambda: None) -> None:
        """Stop in order: NOT_SERVING, let balancers notice, end streams, drain calls, wait for their clean-up.

        `wake` makes streams that wait for a change look at `stopping`.
        """
        await self.health.shutdown()
        await asyncio.sleep(notice_seconds)
        self.stopping.set()
        self.health.end_watches()
        wake()
        loop = asyncio.get_running_loop()
        giving_up = loop.call_later(STREAM_GRACE_SECONDS - _CUT_SECONDS, self._interceptor.in_flight.give_up)
        await self.grpc_server.stop(STREAM_GRACE_SECONDS)
        giving_up.cancel()
        if self._health_server is not None:
            await self._health_server.stop(None)
        if not await self._interceptor.in_flight.drained(STREAM_GRACE_SECONDS):
            _log.warning("calls were still running when the server stopped")


def _listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    if address.startswith("unix:") and not address.startswith("unix:/proc/"):
        # A socket left behind by a killed process; the folder is ours alone, so nobody else serves it.
        Path(address.removeprefix("unix:")).unlink(missing_ok=True)
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError:
        raise ListenError(f"cannot listen on {address}: it is in use or not an address of this machine") from None


def _add_debug_services(server: grpc.aio.Server, names: Sequence[str]) -> None:
    from grpc_channelz.v1 import channelz
    from grpc_health.v1 import health
    from grpc_reflection.v1alpha import reflection

    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    channelz.add_channelz_servicer(server)
