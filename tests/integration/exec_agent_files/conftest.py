from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from orchard.exec.v1.file_service_pb2_grpc import FileServiceStub

from services.common.server import CHANNEL_OPTIONS
from services.common.tokens import AGENT_TOKEN_KEY, Signer, generate_key, public_pem
from tests.integration.exec_agent_files.serving import UID, serving


class _WithToken:
    """A stub that shows the gateway's token with every call."""

    def __init__(self, stub: FileServiceStub, token: str) -> None:
        self._stub = stub
        self._metadata = ((AGENT_TOKEN_KEY, token),)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self._stub, name), metadata=self._metadata)


@contextlib.asynccontextmanager
async def connected(address: str, key: Ed25519PrivateKey | None) -> AsyncIterator[FileServiceStub]:
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = FileServiceStub(channel)
        yield cast("FileServiceStub", _WithToken(stub, Signer(key).agent_token(UID))) if key else stub


@pytest.fixture(scope="session")
def key() -> Ed25519PrivateKey:
    return generate_key()


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    # Not below tmp_path, whose names are too long for a socket.
    with tempfile.TemporaryDirectory(prefix="of") as folder:
        yield Path(folder)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
async def address(key: Ed25519PrivateKey, socket_folder: Path, work: Path) -> AsyncIterator[str]:
    address = f"unix:{socket_folder}/s"
    async with serving(address, public_pem(key), work):
        yield address


@pytest.fixture
async def stub(address: str, key: Ed25519PrivateKey) -> AsyncIterator[FileServiceStub]:
    async with connected(address, key) as stub:
        yield stub


class AgentProcess:
    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process = process
        self.address = address

    def memory(self) -> tuple[int, int]:
        """Resident bytes now, and the most there ever were."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        values = dict(line.split(":", 1) for line in status.splitlines())
        return tuple(int(values[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@pytest.fixture
def agent(key: Ed25519PrivateKey, socket_folder: Path, work: Path) -> Iterator[AgentProcess]:
    (socket_folder / "keys").write_bytes(public_pem(key))
    argv = [sys.executable, "-m", "tests.integration.exec_agent_files.serving"]
    with subprocess.Popen(
        [*argv, f"{socket_folder}/s", f"{socket_folder}/keys", str(work)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"serving\n"
        yield AgentProcess(process, f"unix:{socket_folder}/s")
        process.terminate()
        assert process.wait(110) == 0


@pytest.fixture
async def agent_stub(agent: AgentProcess, key: Ed25519PrivateKey) -> AsyncIterator[FileServiceStub]:
    async with connected(agent.address, key) as stub:
        yield stub
