"""The agent of a sandbox of a running platform, called as the gateway calls it, and what its process holds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from orchard.sandbox.v1 import sandbox_pb2
from orchard.watch.v1 import watch_service_pb2, watch_service_pb2_grpc

from services.common.channel import connect
from services.common.tokens import AGENT_TOKEN_KEY, Signer, load_private_key
from tests.support.platform import PlatformProcess
from tests.support.wire import Wire

_BACKSTOP = 110


@dataclass(frozen=True, slots=True)
class Usage:
    """What a sandbox holds of the machine."""

    threads: int
    descriptors: int
    uploads: int
    """Open files that have no name, or one for the time being: each is half an upload that may be gone on with."""
    processes: int
    """Of the whole sandbox."""
    memory: int
    """Of the agent alone, in bytes."""


@dataclass(frozen=True, slots=True)
class SandboxAgent:
    """One agent. Its process is in namespaces of its own, and of no root file system but the sandbox's."""

    sandbox_id: str
    uid: str
    endpoint: str
    pid: int
    signer: Signer
    log: Path
    """What it prints."""

    @property
    def metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return ((AGENT_TOKEN_KEY, self.signer.agent_token(self.uid)),)

    def channel(self) -> grpc.aio.Channel:
        return connect(self.endpoint)

    def usage(self) -> Usage:
        """As of now."""
        agent = Path(f"/proc/{self.pid}")
        memory = next(line for line in (agent / "status").read_text().splitlines() if line.startswith("VmRSS:"))
        files = list(_links(agent / "fd"))
        return Usage(
            threads=len(list((agent / "task").iterdir())),
            descriptors=len(files),
            uploads=len([file for file in files if _is_upload(file)]),
            processes=len(_members((agent / "ns/pid").readlink())),
            memory=int(memory.split()[1]) << 10,
        )


async def agent_of(platform: PlatformProcess, wire: Wire, sandbox_id: str) -> SandboxAgent:
    """The agent of a sandbox that is READY. Needs root, to look at its process."""
    uid = (await wire.get(sandbox_id)).uid
    endpoint = await _endpoint(platform, uid)
    pid = await asyncio.to_thread(_listener, endpoint.removeprefix("unix:"))
    for namespace in ("mnt", "pid", "user"):
        own = Path(f"/proc/self/ns/{namespace}").readlink()
        assert Path(f"/proc/{pid}/ns/{namespace}").readlink() != own, f"the agent shares the host's {namespace}"
    assert not Path(f"/proc/{pid}/root").samefile("/"), "the agent sees the host's root"
    signer = Signer(load_private_key(platform.data / "keys" / "signing.pem"))
    log = platform.data / "node" / "sandboxes" / uid / "agent.log"
    return SandboxAgent(sandbox_id, uid, endpoint, pid, signer, log)


async def _endpoint(platform: PlatformProcess, uid: str) -> str:
    """Where the watcher says that an agent is, as it says it to gateways."""
    async with connect(platform.address("watcher")) as channel:
        stub = watch_service_pb2_grpc.WatchServiceStub(channel)
        async for event in stub.WatchSandboxes(watch_service_pb2.WatchSandboxesRequest(), timeout=_BACKSTOP):
            sandbox = event.sandbox
            if sandbox.uid == uid and sandbox.state == sandbox_pb2.SANDBOX_STATE_READY:
                return sandbox.endpoint
    raise AssertionError("the watcher's stream ended")


def _listener(path: str) -> int:
    """Process id, as this process sees it, of who listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_BACKSTOP)
        probe.connect(path)
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def _links(folder: Path) -> Iterator[str]:
    for link in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # just closed
            yield str(link.readlink())


def _is_upload(file: str) -> bool:
    name = file.rpartition("/")[2]
    return name.startswith(".orchard-") or (name.startswith("#") and name.endswith(" (deleted)"))


def _members(namespace: Path) -> list[int]:
    """Processes of a pid namespace."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "ns/pid").readlink() == namespace:
                found.append(int(entry.name))
        except OSError:
            continue
    return found
