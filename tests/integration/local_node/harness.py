"""Runs a real node daemon, as any user, and talks to it and to its agents."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orchard.exec.v1 import exec_pb2, exec_service_pb2, exec_service_pb2_grpc
from orchard.node.v1 import node_pb2, node_service_pb2, node_service_pb2_grpc
from orchard.sandbox.v1 import sandbox_pb2

from services.common.server import CHANNEL_OPTIONS
from services.common.tokens import AGENT_TOKEN_KEY, Signer, generate_key, public_pem

REPOSITORY = Path(__file__).resolve().parents[3]
PATIENCE = 110.0
STARTING = node_pb2.NODE_SANDBOX_PHASE_STARTING
RUNNING = node_pb2.NODE_SANDBOX_PHASE_RUNNING
STOPPING = node_pb2.NODE_SANDBOX_PHASE_STOPPING
FAILED = node_pb2.NODE_SANDBOX_PHASE_FAILED
GONE = node_pb2.NODE_SANDBOX_PHASE_GONE


@dataclass(frozen=True)
class Account:
    uid: int
    gid: int


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    end: int


class Box:
    """One sandbox, through its agent."""

    def __init__(self, node: "NodeProcess", sandbox: Any) -> None:
        self.node = node
        self.uid = sandbox.uid
        self.sandbox = sandbox
        self.channel = grpc.aio.insecure_channel(sandbox.endpoint, options=CHANNEL_OPTIONS)
        self._metadata = ((AGENT_TOKEN_KEY, node.signer.agent_token(sandbox.uid)),)

    async def healthy(self) -> None:
        """Wait until the agent answers. A call to one that was just killed is UNAVAILABLE: then again."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service=self.uid)
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    await stub.Check(request, timeout=PATIENCE, wait_for_ready=True)
                except grpc.aio.AioRpcError as error:
                    if error.code() != grpc.StatusCode.UNAVAILABLE:
                        raise
                else:
                    return

    async def run(self, shell: str, *, user: str = "", timeout: float = 50, **fields: Any) -> Ended:
        """Run a shell string; output has stdout and stderr in one."""
        stub = exec_service_pb2_grpc.ExecServiceStub(self.channel)
        spec = exec_pb2.ExecSpec(
            shell=shell,
            user=user,
            merge_stderr=True,
            timeout=duration_pb2.Duration(seconds=int(timeout)),
            **fields,
        )
        answer = await stub.StartExec(
            exec_service_pb2.StartExecRequest(
                sandbox_id=self.sandbox.sandbox_id,
                exec_id=uuid.uuid4().hex,
                spec=spec,
                wait=duration_pb2.Duration(seconds=int(timeout) + 5),
            ),
            metadata=self._metadata,
            timeout=timeout + 30,
            wait_for_ready=True,
        )
        result = answer.exec.result
        output = b"".join(chunk.data for chunk in answer.output).decode(errors="replace")
        return Ended(result.exit_code, output, result.ended)

    async def ok(self, shell: str, **fields: Any) -> str:
        """Run a shell string that must succeed; returns its output."""
        ended = await self.run(shell, **fields)
        assert ended.code == 0 and ended.end == exec_pb2.EXEC_END_EXITED, ended
        return ended.output

    @property
    def init_pid(self) -> int:
        return int(self.record()["init"]["pid"])

    @property
    def agent_pid(self) -> int:
        return int(self.record()["agent"]["pid"])

    def record(self) -> Mapping[str, Any]:
        import json

        return json.loads((self.folder / "processes.json").read_text())

    @property
    def folder(self) -> Path:
        return self.node.data / "node" / "sandboxes" / self.uid


class NodeProcess:
    """A daemon with folders and a lifeline of its own."""

    def __init__(self, account: Account | None, settings: Mapping[str, str]) -> None:
        assert account is not None
        self.account = account
        self.settings = settings
        self.home = Path(tempfile.mkdtemp(prefix="on-", dir="/tmp"))
        self.data, self.run = self.home / "data", self.home / "run"
        self.signer_key = generate_key()
        self.signer = Signer(self.signer_key)
        for folder in (self.data, self.run):
            folder.mkdir(mode=0o700)
        (self.home / "keys.pem").write_bytes(public_pem(self.signer_key))
        for path in (self.home, *self.home.iterdir()):
            os.chown(path, account.uid, account.gid)
        self.mounts = ""
        """A shell script that mounts things before it starts, in a mount namespace of its own; as root."""
        self.lifeline_read, self.lifeline_write = os.pipe()
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: Any = None
        self.boxes: list[Box] = []

    @property
    def address(self) -> str:
        return f"unix:{self.run}/node.sock"

    def spawn(self) -> None:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "clients/python/src")]),
            "ORCHARD_LISTEN": self.address,
            "ORCHARD_PUBLIC_KEYS_FILE": str(self.home / "keys.pem"),
            "ORCHARD_DATA_DIRECTORY": str(self.data),
            "ORCHARD_RUN_DIRECTORY": str(self.run),
            "ORCHARD_LIFELINE_FD": str(self.lifeline_read),
            "ORCHARD_SPARE_SANDBOXES": "0",
            **self.settings,
        }
        command = [sys.executable, "-m", "services.local.node"]
        if os.geteuid() == 0:
            # Not by subprocess, which forks for that: what gRPC does in a fork of a process that uses it may crash it.
            become = ("setpriv", "--reuid", str(self.account.uid), "--regid", str(self.account.gid), "--clear-groups")
            command = [*become, "--", *command]
        if self.mounts:
            script = f'set -e\n{self.mounts}\nexec "$@"'
            command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *command]
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, pass_fds=[self.lifeline_read], stdout=log, stderr=log, cwd="/"
            )

    async def start(self) -> None:
        self.spawn()
        await self.reach()

    async def reach(self) -> None:
        """Connect, and wait until the daemon serves."""
        if self.channel is not None:
            await self.channel.close()
        self.channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self.stub = node_service_pb2_grpc.NodeServiceStub(self.channel)
        assert self.process is not None
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            try:
                await self.stub.GetNode(node_service_pb2.GetNodeRequest(), timeout=1, wait_for_ready=True)
            except grpc.aio.AioRpcError:
                if self.process.poll() is not None or asyncio.get_running_loop().time() > deadline:
                    raise AssertionError(f"the node daemon did not start:\n{self.log()}") from None
            else:
                return

    def log(self) -> str:
        return (self.home / "log").read_text(errors="replace")[-8000:]

    async def describe(self) -> Any:
        return await self.stub.GetNode(node_service_pb2.GetNodeRequest(), timeout=PATIENCE)

    async def create(self, sandbox_id: str = "", **fields: Any) -> Any:
        """Ask for a sandbox; returns at once with it."""
        sandbox_id = sandbox_id or f"s-{uuid.uuid4().hex[:8]}"
        request = node_service_pb2.CreateSandboxRequest(
            tenant=fields.pop("tenant", "t"),
            sandbox_id=sandbox_id,
            request_id=fields.pop("request_id", sandbox_id),
            spec_hash=fields.pop("spec_hash", "h"),
            spec=sandbox_pb2.SandboxSpec(**fields),
        )
        return (await self.stub.CreateSandbox(request, timeout=PATIENCE)).sandbox

    async def box(self, **fields: Any) -> Box:
        """A sandbox whose agent answers."""
        sandbox = await self.create(**fields)
        box = self.box_of(await self.until(sandbox.uid, RUNNING))
        await box.healthy()
        return box

    def box_of(self, sandbox: Any) -> Box:
        """A sandbox that runs."""
        box = Box(self, sandbox)
        self.boxes.append(box)
        return box

    async def until(self, uid: str, phase: int) -> Any:
        """Wait until a sandbox is in a phase; fails at once if it fails instead."""
        async with asyncio.timeout(PATIENCE), self.watch() as events:
            async for event in events:
                if event.HasField("sandbox") and event.sandbox.uid == uid:
                    if event.sandbox.phase == phase:
                        return event.sandbox
                    assert event.sandbox.phase != FAILED, f"{event.sandbox.message}\n{self.log()}"
        raise AssertionError("the watch ended")

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator[Any]:
        call = self.stub.WatchSandboxes(node_service_pb2.WatchSandboxesRequest())
        try:
            yield call
        finally:
            call.cancel()

    async def snapshot(self) -> dict[str, Any]:
        """All sandboxes, by uid."""
        found = {}
        async with asyncio.timeout(PATIENCE), self.watch() as events:
            async for event in events:
                if event.HasField("synced"):
                    return found
                found[event.sandbox.uid] = event.sandbox
        raise AssertionError("the watch ended")

    async def delete(self, uid: str) -> None:
        await self.stub.DeleteSandbox(node_service_pb2.DeleteSandboxRequest(uid=uid), timeout=PATIENCE)

    async def kill(self) -> None:
        """kill -9 the daemon."""
        assert self.process is not None
        self.process.kill()
        await asyncio.to_thread(self.process.wait, PATIENCE)

    async def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, PATIENCE)

    def cut_lifeline(self) -> None:
        os.close(self.lifeline_write)
        self.lifeline_write = -1

    async def close(self) -> None:
        for box in self.boxes:
            await box.channel.close()
        if self.channel is not None:
            await self.channel.close()
        if self.lifeline_write >= 0:
            self.cut_lifeline()
        os.close(self.lifeline_read)
        if self.process is not None:
            try:
                await asyncio.to_thread(self.process.wait, PATIENCE)
            finally:
                self.process.kill()
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        if os.geteuid() == 0:
            shutil.rmtree(self.home)
        else:
            from services.local.runtime.removal import remove_tree

            remove_tree(self.home)


async def gone(pid: int) -> None:
    """Wait until a process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), PATIENCE)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
