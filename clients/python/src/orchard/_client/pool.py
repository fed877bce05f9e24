"""A pool of connections to the gateway: as many as the calls in flight need, each call on the least loaded."""

from __future__ import annotations

import asyncio
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, cast

from orchard._client.errors import ClientClosed, OrchardError
from orchard._client.profile import Profile
from orchard._client.runtime import grpc_module, leak
from orchard._client.tls import Credentials
from orchard.admin.v1 import (
    audit_service_pb2_grpc,
    image_service_pb2_grpc,
    key_service_pb2_grpc,
    tenant_service_pb2_grpc,
    usage_service_pb2_grpc,
    version_service_pb2_grpc,
)
from orchard.exec.v1 import (
    endpoint_service_pb2_grpc,
    exec_service_pb2_grpc,
    file_service_pb2_grpc,
    port_service_pb2_grpc,
)
from orchard.judge.v1 import judge_service_pb2_grpc
from orchard.sandbox.v1 import sandbox_service_pb2_grpc
from orchard.trajectory.v1 import group_service_pb2_grpc, trajectory_service_pb2_grpc

if TYPE_CHECKING:
    import grpc.aio

# Proxies and some servers allow 100 streams a connection and queue the rest without a word: stay below.
STREAMS_PER_CONNECTION: Final = 64
MAXIMUM_CONNECTIONS: Final = 64

CONNECTION_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    # grpc.keepalive_timeout_ms alone leaves a ping a minute for its answer (measured, grpcio 1.85).
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # The time that an attempt to connect may take, despite its name.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Every channel is a connection of its own.
    ("grpc.use_local_subchannel_pool", 1),
    # Retries are made by transport.py, which knows what is idempotent.
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
)


@dataclass(eq=False, weakref_slot=True, slots=True)
class Connection:
    """One channel with its stubs."""

    channel: grpc.aio.Channel
    exec: exec_service_pb2_grpc.ExecServiceAsyncStub
    file: file_service_pb2_grpc.FileServiceAsyncStub
    port: port_service_pb2_grpc.PortServiceAsyncStub
    endpoint: endpoint_service_pb2_grpc.EndpointServiceAsyncStub
    sandbox: sandbox_service_pb2_grpc.SandboxServiceAsyncStub
    key: key_service_pb2_grpc.KeyServiceAsyncStub
    tenant: tenant_service_pb2_grpc.TenantServiceAsyncStub
    image: image_service_pb2_grpc.ImageServiceAsyncStub
    usage: usage_service_pb2_grpc.UsageServiceAsyncStub
    audit: audit_service_pb2_grpc.AuditServiceAsyncStub
    version: version_service_pb2_grpc.VersionServiceAsyncStub
    trajectory: trajectory_service_pb2_grpc.TrajectoryServiceAsyncStub
    group: group_service_pb2_grpc.GroupServiceAsyncStub
    judge: judge_service_pb2_grpc.JudgeServiceAsyncStub
    calls: int = 0

    @property
    def is_broken(self) -> bool:
        """Whether calls on it end at once, since it could not connect."""
        state: grpc.ChannelConnectivity = self.channel.get_state()
        return state is grpc_module().ChannelConnectivity.TRANSIENT_FAILURE

    def __enter__(self) -> Self:
        """Begin a call."""
        self.calls += 1
        return self

    def __exit__(self, *error: object) -> None:
        """End a call."""
        self.calls -= 1


def _connect(profile: Profile, credentials: Credentials | None) -> Connection:
    grpc = grpc_module()
    options = [*CONNECTION_OPTIONS, *((("grpc.enable_http_proxy", 0),) if profile.is_local else ())]
    if credentials is not None:
        channel = grpc.aio.secure_channel(profile.target, credentials.make(), options=options)
    else:
        channel = grpc.aio.insecure_channel(profile.target, options=options)
    # The stub classes are the async ones when given an async channel; the generated types say so in an overload.
    any_channel = cast("Any", channel)
    return Connection(
        channel,
        exec=exec_service_pb2_grpc.ExecServiceStub(any_channel),
        file=file_service_pb2_grpc.FileServiceStub(any_channel),
        port=port_service_pb2_grpc.PortServiceStub(any_channel),
        endpoint=endpoint_service_pb2_grpc.EndpointServiceStub(any_channel),
        sandbox=sandbox_service_pb2_grpc.SandboxServiceStub(any_channel),
        key=key_service_pb2_grpc.KeyServiceStub(any_channel),
        tenant=tenant_service_pb2_grpc.TenantServiceStub(any_channel),
        image=image_service_pb2_grpc.ImageServiceStub(any_channel),
        usage=usage_service_pb2_grpc.UsageServiceStub(any_channel),
        audit=audit_service_pb2_grpc.AuditServiceStub(any_channel),
        version=version_service_pb2_grpc.VersionServiceStub(any_channel),
        trajectory=trajectory_service_pb2_grpc.TrajectoryServiceStub(any_channel),
        group=group_service_pb2_grpc.GroupServiceStub(any_channel),
        judge=judge_service_pb2_grpc.JudgeServiceStub(any_channel),
    )


class Pool:
    """Connections of one client. Belongs to the event loop that it is first used on, until that loop is closed.

    Raises, when it is made:
        ConfigurationError: a file for TLS cannot be used.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._credentials = Credentials(profile) if profile.uses_tls else None
        self._connections: list[Connection] = []
        # Made with files that have changed since; each goes with its last call.
        self._outdated: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._closed = False

    def connection(self) -> Connection:
        """A connection for one call, which is made within `with`.

        Raises:
            ClientClosed: the client was closed.
            OrchardError: the client is in use on another running event loop.
        """
        if self._closed:
            raise _closed()
        self._adopt(asyncio.get_running_loop())
        if self._credentials is not None and self._credentials.changed():
            self._outdated.update(self._connections)
            self._connections = []
        # One that cannot connect ends its calls at once: it would always have the fewest, and get every repeat.
        chosen = min(self._connections, key=lambda one: (one.is_broken, one.calls), default=None)
        full = chosen is None or chosen.calls >= STREAMS_PER_CONNECTION
        if chosen is None or (full and len(self._connections) < MAXIMUM_CONNECTIONS):
            chosen = _connect(self.profile, self._credentials)
            self._connections.append(chosen)
        return chosen

    def check_cancelled(self) -> None:
        """Say why a call was cancelled.

        Raises:
            ClientClosed: that did it, and nobody has cancelled this task.
        """
        task = asyncio.current_task()
        if self._closed and (task is None or not task.cancelling()):
            raise _closed() from None

    def _adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._pid != os.getpid():
            leak([*self._connections, *self._outdated])
            self._connections, self._loop, self._pid = [], None, os.getpid()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise OrchardError(
                "this client is in use on another event loop; make one client for each loop, or use SandboxClient",
                reason="WRONG_EVENT_LOOP",
            )
        self._connections, self._loop = [], loop

    async def close(self) -> None:
        """Close every connection; calls in flight end."""
        self._closed = True
        connections, self._connections = [*self._connections, *self._outdated], []
        if self._pid == os.getpid() and self._loop is asyncio.get_running_loop():
            await asyncio.gather(*(connection.channel.close() for connection in connections))


def _closed() -> ClientClosed:
    return ClientClosed("this client was closed; make a new one")
