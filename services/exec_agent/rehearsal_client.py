"""A rehearsal: one whole agent and a client of it, in the process that agents are later forked from, or in one that was
forked before its sandbox is asked for.

CPython adapts code as it runs and gRPC's core builds its tables at first use. Done once before the fork, agents inherit
the outcome instead of doing it again, each in pages of its own. Done after it, the pages that a first run writes to are
the agent's own by the time somebody waits for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orchard.exec.v1 import exec_pb2, exec_service_pb2, exec_service_pb2_grpc

from services.common.server import CHANNEL_OPTIONS
from services.common.tokens import AGENT_TOKEN_KEY, Signer, generate_key, public_pem
from services.exec_agent.launcher import open_or_gap
from services.exec_agent.settings import AgentConfig

_UID: Final = "rehearsal"
_COMMANDS: Final = 12  # CPython has adapted what ran eight times
_CALL_SECONDS: Final = 10
_COMMAND: Final = exec_pb2.ExecSpec(argv=exec_pb2.Argv(args=["true"]))


async def rehearse(
    serve: Callable[[AgentConfig], AbstractAsyncContextManager[object]], folder: Path, launcher_fd: int | None = None
) -> None:
    """Serve an agent in an empty folder, have it run commands, and end it and all that belongs to it.

    Args:
        serve: how agents are served.
        folder: the empty folder.
        launcher_fd: the launcher; None: what scripts/build-launcher made, if it is there.

    Raises:
        OSError: this machine has no room for it.
        ListenError: the folder's path is too long for a socket.
        grpc.aio.AioRpcError: the agent refuses.
    """
    key = generate_key()
    with contextlib.ExitStack() as held:
        state = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, state)
        launcher = launcher_fd
        if launcher is None:
            launcher, _ = open_or_gap()
            if launcher is not None:
                held.callback(os.close, launcher)
        config = AgentConfig(
            uid=_UID,
            sandbox_id=_UID,
            listen=f"unix:{folder}/s",
            public_keys_pem=public_pem(key).decode(),
            state_fd=state,
            launcher_fd=launcher,
            env={"PATH": os.defpath},
        )
        async with serve(config), grpc.aio.insecure_channel(config.listen, options=CHANNEL_OPTIONS) as channel:
            await _ask(channel, (AGENT_TOKEN_KEY, Signer(key).agent_token(_UID)))


async def _ask(channel: grpc.aio.Channel, token: tuple[str, str]) -> None:
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=_UID), timeout=_CALL_SECONDS)
    commands = exec_service_pb2_grpc.ExecServiceStub(channel)
    for _ in range(_COMMANDS):
        request = exec_service_pb2.StartExecRequest(
            sandbox_id=_UID, exec_id=secrets.token_hex(8), spec=_COMMAND, wait=Duration(seconds=_CALL_SECONDS)
        )
        await commands.StartExec(request, metadata=(token,), timeout=_CALL_SECONDS)
