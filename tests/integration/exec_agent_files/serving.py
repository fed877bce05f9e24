"""FileService on a unix socket, as the agent serves it; also a process of its own, whose memory can be measured.

python -m tests.integration.exec_agent_files.serving SOCKET KEYS_FILE DIRECTORY
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop
from orchard.exec.v1.file_service_pb2_grpc import add_FileServiceServicer_to_server

from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.server import Server
from services.common.tokens import Verifier, parse_public_keys
from services.exec_agent.auth import AgentAuthenticator
from services.exec_agent.files.service import FileService
from services.exec_agent.files.servicer import FileServicer

UID = "files-test"
SANDBOX_ID = "sandbox"


@contextlib.asynccontextmanager
async def serving(address: str, public_keys: bytes, directory: Path) -> AsyncIterator[Server]:
    state = Path(tempfile.mkdtemp(prefix="of-state"))
    state_fd = os.open(state, os.O_RDONLY)
    service = FileService(
        working_directory=str(directory), default_owner=lambda: (os.geteuid(), os.getegid()), state_fd=state_fd
    )
    server = Server(
        interceptor=CallInterceptor(authenticator=AgentAuthenticator(Verifier(parse_public_keys(public_keys), UID))),
        health=Health(),
        service_names=(),
        reflection=False,
    )
    add_FileServiceServicer_to_server(FileServicer(service, SANDBOX_ID), server.grpc_server)
    await server.start(address)
    try:
        yield server
    finally:
        await server.stop()
        service.close()
        os.close(state_fd)
        shutil.rmtree(state)


async def main(socket: str, keys: str, directory: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with serving(f"unix:{socket}", Path(keys).read_bytes(), Path(directory)):
        print("serving", flush=True)
        await stop.wait()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
