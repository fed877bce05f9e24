"""The agent's composition root."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import resource
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvloop
from orchard.exec.v1.agent_service_pb2_grpc import add_AgentServiceServicer_to_server
from orchard.exec.v1.exec_service_pb2_grpc import add_ExecServiceServicer_to_server
from orchard.exec.v1.file_service_pb2_grpc import add_FileServiceServicer_to_server
from orchard.exec.v1.port_service_pb2_grpc import add_PortServiceServicer_to_server
from orchard.exec.v1.tunnel_service_pb2_grpc import add_TunnelServiceServicer_to_server

from services.common import logs
from services.common.grpc_core import give_freed_memory_back, keep_freed_memory
from services.common.interceptor import CallInterceptor
from services.common.server import ListenError, Server
from services.common.tasks import TaskGroup
from services.common.tls import TlsError
from services.common.tokens import PublicKeysFile, Verifier, parse_public_keys
from services.exec_agent.auth import AgentAuthenticator
from services.exec_agent.files.service import FileService
from services.exec_agent.files.servicer import FileServicer
from services.exec_agent.journal import Journal, JournalInUseError
from services.exec_agent.ports.service import PortService
from services.exec_agent.ports.servicer import PortServicer
from services.exec_agent.process import Launcher
from services.exec_agent.rehearsal_client import rehearse as rehearse_with
from services.exec_agent.service import ExecService
from services.exec_agent.servicer import AgentServicer, ExecServicer
from services.exec_agent.servicer_health import AgentHealth
from services.exec_agent.settings import AgentConfig
from services.exec_agent.users import resolve_user
from services.exec_agent.waits import Waits

_log = logs.get_logger(__name__)

_JOURNAL_WAIT_SECONDS: Final = 2.0
_JOURNAL_RETRY_SECONDS: Final = 0.02
_LAZY_MODULES: Final = (
    "concurrent.futures.thread",
    "encodings.idna",
    "encodings.ascii",
    "grpc._utilities",
    "grpc.aio._server",
    "linecache",
    "traceback",
)


@dataclass(frozen=True, slots=True)
class Agent:
    """A running agent."""

    service: ExecService
    launcher: Launcher
    port: int
    tasks: TaskGroup


def preload() -> None:
    """Import what is otherwise imported at first use: after joining a sandbox nothing can be.

    Starts no gRPC object and no thread.
    """
    for module in _LAZY_MODULES:
        importlib.import_module(module)


def rehearse(folder: Path, launcher_fd: int | None = None) -> None:
    """Run and end an agent in this process and an empty folder; see rehearsal_client.

    What is left of it is memory, and a pipe that libuv opens once: no thread and no process.
    """
    uvloop.run(rehearse_with(serve, folder, launcher_fd))


@contextlib.asynccontextmanager
async def serve(config: AgentConfig) -> AsyncIterator[Agent]:
    """Run an agent on this event loop until the context is left.

    Raises:
        ListenError: the address cannot be listened on.
        TlsError: a file of TLS cannot be used.
        JournalInUseError: another agent of this sandbox still runs.
    """
    async with contextlib.AsyncExitStack() as stack:
        journal = stack.enter_context(await _open_journal(config.state_fd))
        waits = Waits()
        stack.callback(waits.close)
        launcher = Launcher(waits, config.launcher_fd, config.cgroup_procs_fds)
        launcher.start()
        stack.callback(launcher.close)
        files = FileService(
            working_directory=config.working_directory,
            default_owner=partial(_default_owner, config),
            state_fd=config.state_fd,
        )
        stack.callback(files.close)
        await files.settle()
        service = ExecService(config, journal, launcher, waits)
        stack.callback(service.close)
        keys = PublicKeysFile(config.public_keys_file) if config.public_keys_file else None
        verifier = Verifier(keys or parse_public_keys(config.public_keys_pem.encode()), config.uid)
        server = Server(
            interceptor=CallInterceptor(authenticator=AgentAuthenticator(verifier)),
            health=AgentHealth(config.uid),
            service_names=(),
            reflection=False,
        )
        add_ExecServiceServicer_to_server(ExecServicer(service, config), server.grpc_server)
        add_AgentServiceServicer_to_server(AgentServicer(service, config), server.grpc_server)
        add_FileServiceServicer_to_server(FileServicer(files, config.sandbox_id), server.grpc_server)
        ports = PortService()
        port_servicer = PortServicer(ports, config.sandbox_id)
        add_PortServiceServicer_to_server(port_servicer, server.grpc_server)
        add_TunnelServiceServicer_to_server(port_servicer, server.grpc_server)
        port = await server.start(config.listen, tls=config.tls)
        stack.push_async_callback(server.stop)
        if config.socket_for_all:
            Path(config.listen.removeprefix("unix:")).chmod(0o666)  # noqa: ASYNC240 (once, and of no disk)
        stack.callback(service.interrupt)
        stack.callback(ports.interrupt)
        tasks = await stack.enter_async_context(TaskGroup())
        tasks.start("commands of the last agent", service.await_the_last(), forever=False)
        tasks.start("forget old commands", service.sweep())
        tasks.start("forget broken uploads", files.forget_uploads())
        tasks.start("give freed memory back", give_freed_memory_back())
        yield Agent(service, launcher, port, tasks)


def run(config: AgentConfig) -> int:
    """Run an agent as this process until SIGTERM; returns the exit code."""
    # Each running command needs a few descriptors, each large output of an ended one needs one.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    keep_freed_memory()
    try:
        return uvloop.run(_run(config))
    except (ListenError, TlsError, JournalInUseError) as error:
        _log.error(str(error))
        return 2


async def _run(config: AgentConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serve(config) as agent:
        waiting: asyncio.Future[Any] = loop.create_task(stop.wait(), name="stop signal")
        await asyncio.wait([waiting, agent.tasks.failed], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return 1 if agent.tasks.failed.done() else 0


async def _open_journal(state_fd: int) -> Journal:
    """Open the journal; an agent that was just killed may hold it for a moment still."""
    loop = asyncio.get_running_loop()
    patience = loop.time() + _JOURNAL_WAIT_SECONDS
    while True:
        try:
            return Journal.open(state_fd)
        except JournalInUseError:
            if loop.time() >= patience:
                raise
        await asyncio.sleep(_JOURNAL_RETRY_SECONDS)


def _default_owner(config: AgentConfig) -> tuple[int, int]:
    """The user that new files belong to: the one that commands run as."""
    if not config.user or not config.can_switch_user:
        return os.geteuid(), os.getegid()
    identity = resolve_user(config.user)
    return identity.uid, identity.gid
