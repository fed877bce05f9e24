from __future__ import annotations

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
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from orchard.exec.v1 import exec_pb2, exec_service_pb2
from orchard.exec.v1.agent_service_pb2_grpc import AgentServiceStub
from orchard.exec.v1.exec_service_pb2_grpc import ExecServiceStub

from services.common.errors import STATUS_DETAILS_KEY
from services.common.server import CHANNEL_OPTIONS
from services.common.tokens import AGENT_TOKEN_KEY, Signer, generate_key, public_pem
from services.exec_agent.app import serve
from services.exec_agent.launcher import open_launcher
from services.exec_agent.settings import AgentConfig

ROOT = Path(__file__).parents[3]
SANDBOX = "box"
UID = "uid-1"
BACKSTOP = 200.0
PATH = "/usr/local/bin:/usr/bin:/bin"


def duration(seconds: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result


def spec(
    *argv: str,
    shell: str = "",
    timeout: float | None = None,
    queue_timeout: float | None = None,
    kill_grace: float | None = None,
    orphan_timeout: float | None = None,
    **fields: Any,
) -> exec_pb2.ExecSpec:
    made = exec_pb2.ExecSpec(**fields)
    if argv:
        made.argv.args.extend(argv)
    if shell:
        made.shell = shell
    durations = {"timeout": timeout, "queue_timeout": queue_timeout, "kill_grace": kill_grace}
    for name, seconds in {**durations, "orphan_timeout": orphan_timeout}.items():
        if seconds is not None:
            getattr(made, name).CopyFrom(duration(seconds))
    return made


def new_id() -> str:
    return uuid.uuid4().hex


@dataclass
class Output:
    """What a stream brought."""

    stdout: bytes = b""
    stderr: bytes = b""
    everything: bytes = b""
    gaps: list[tuple[int, int]] = field(default_factory=list)
    result: exec_pb2.ExecResult | None = None

    def take(self, event: Any) -> None:
        kind = event.WhichOneof("event")
        if kind == "chunk":
            expected = len(self.everything) + sum(size for _, size in self.gaps)
            assert event.chunk.offset - self.begin == expected, "chunks must follow each other"
            assert 0 < len(event.chunk.data) <= 1 << 20
            self.everything += event.chunk.data
            if event.chunk.stream == exec_pb2.OUTPUT_STREAM_STDERR:
                self.stderr += event.chunk.data
            else:
                self.stdout += event.chunk.data
        elif kind == "gap":
            self.gaps.append((event.gap.offset, event.gap.size))
        elif kind == "result":
            assert self.result is None
            self.result = event.result

    begin: int = 0


class Client:
    """Calls one agent."""

    def __init__(self, channel: grpc.aio.Channel, token: str, sandbox_id: str = SANDBOX) -> None:
        self.stub = ExecServiceStub(channel)
        self.agent = AgentServiceStub(channel)
        self.channel = channel
        self.metadata = ((AGENT_TOKEN_KEY, token),)
        self.sandbox_id = sandbox_id

    def start_call(self, command: exec_pb2.ExecSpec, wait: float, exec_id: str, *, reads_on: bool = False) -> Any:
        request = exec_service_pb2.StartExecRequest(
            sandbox_id=self.sandbox_id, exec_id=exec_id, spec=command, wait=duration(wait), reads_on=reads_on
        )
        return self.stub.StartExec(request, metadata=self.metadata, timeout=BACKSTOP)

    async def start(
        self, command: exec_pb2.ExecSpec, wait: float = 60.0, exec_id: str | None = None, *, reads_on: bool = False
    ) -> exec_service_pb2.StartExecResponse:
        return await self.start_call(command, wait, exec_id or new_id(), reads_on=reads_on)

    async def run(self, command: exec_pb2.ExecSpec, exec_id: str | None = None) -> Output:
        """Start, wait, and give what the unary form brought."""
        response = await self.start(command, exec_id=exec_id)
        assert response.output_complete
        output = Output(result=response.exec.result)
        for chunk in response.output:
            output.take(exec_service_pb2.ReadOutputResponse(chunk=chunk))
        return output

    def exec_call(self, command: exec_pb2.ExecSpec, exec_id: str, offset: int = 0) -> Any:
        request = exec_service_pb2.ExecRequest(sandbox_id=self.sandbox_id, exec_id=exec_id, spec=command, offset=offset)
        return self.stub.Exec(request, metadata=self.metadata, timeout=BACKSTOP)

    async def stream(self, command: exec_pb2.ExecSpec, exec_id: str | None = None, offset: int = 0) -> Output:
        output = Output(begin=offset)
        async for event in self.exec_call(command, exec_id or new_id(), offset):
            output.take(event)
        return output

    def read_call(self, exec_id: str, offset: int = 0, *, no_follow: bool = False) -> Any:
        request = exec_service_pb2.ReadOutputRequest(
            sandbox_id=self.sandbox_id, exec_id=exec_id, offset=offset, no_follow=no_follow
        )
        return self.stub.ReadOutput(request, metadata=self.metadata, timeout=BACKSTOP)

    async def read(self, exec_id: str, offset: int = 0, *, no_follow: bool = False) -> Output:
        output = Output(begin=offset)
        async for event in self.read_call(exec_id, offset, no_follow=no_follow):
            output.take(event)
        return output

    async def wait(self, exec_id: str, seconds: float = 180.0) -> exec_pb2.Exec:
        request = exec_service_pb2.WaitExecRequest(sandbox_id=self.sandbox_id, exec_id=exec_id, wait=duration(seconds))
        response = await self.stub.WaitExec(request, metadata=self.metadata, timeout=BACKSTOP)
        return response.exec

    async def signal(self, exec_id: str, **fields: Any) -> exec_pb2.Exec:
        request = exec_service_pb2.SignalExecRequest(sandbox_id=self.sandbox_id, exec_id=exec_id, **fields)
        response = await self.stub.SignalExec(request, metadata=self.metadata, timeout=BACKSTOP)
        return response.exec

    async def list(self) -> list[exec_pb2.Exec]:
        """All execs, newest first."""
        request = exec_service_pb2.ListExecsRequest(sandbox_id=self.sandbox_id, page_size=1000)
        response = await self.stub.ListExecs(request, metadata=self.metadata, timeout=BACKSTOP)
        return list(response.execs)

    async def until_output(self, exec_id: str, wanted: bytes) -> bytes:
        """Read until the output contains `wanted`; returns what came."""
        call = self.read_call(exec_id)
        seen = b""
        try:
            async for event in call:
                seen += event.chunk.data
                if wanted in seen:
                    return seen
        finally:
            call.cancel()
        raise AssertionError(f"{exec_id} ended without {wanted!r}: {seen!r}")


class AgentProcess:
    """An agent in a process of its own, on a Unix socket."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        key = generate_key()
        (folder / "keys.pem").write_bytes(public_pem(key))
        (folder / "state").mkdir()
        self.work = folder / "work"
        self.work.mkdir()
        self.signer = Signer(key)
        self.environment = {
            "PATH": PATH,
            "AGENT_PRIVATE": "not for commands",
            "ORCHARD_UID": UID,
            "ORCHARD_SANDBOX_ID": SANDBOX,
            "ORCHARD_LISTEN": f"unix:{folder}/s",
            "ORCHARD_PUBLIC_KEYS_FILE": str(folder / "keys.pem"),
            "ORCHARD_STATE_DIRECTORY": str(folder / "state"),
            "ORCHARD_WORKING_DIRECTORY": str(self.work),
            "ORCHARD_ENV": json.dumps({"PATH": PATH, "HOME": str(self.work), "FROM_CONFIG": "yes"}),
            **settings,
        }
        self.start()

    def start(self) -> None:
        (self.folder / "s").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.exec_agent"], env=self.environment, cwd=ROOT, stdin=subprocess.DEVNULL
        )
        self.await_ready()

    def await_ready(self) -> None:
        end = time.monotonic() + BACKSTOP
        while not self._accepts():
            assert self.process.poll() is None, "the agent ended at once"
            assert time.monotonic() < end
            time.sleep(0.005)

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.folder / "s")) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(BACKSTOP)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(BACKSTOP)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with grpc.aio.insecure_channel(f"unix:{self.folder}/s", options=CHANNEL_OPTIONS) as channel:
            yield Client(channel, self.signer.agent_token(UID))


@contextlib.asynccontextmanager
async def agent_here(folder: Path | None = None, **settings: Any) -> AsyncIterator[Client]:
    """An agent in this process, for what only descriptors or altered constants can bring about.

    With a folder it finds there what an agent before it left.
    """
    key = generate_key()
    if folder is None:
        with short_folder() as fresh:
            async with agent_here(fresh, **settings) as client:
                yield client
        return
    state, launcher_fd = os.open(folder, os.O_RDONLY), open_launcher()
    config = AgentConfig(
        uid=UID,
        sandbox_id=SANDBOX,
        listen=f"unix:{folder}/s",
        public_keys_pem=public_pem(key).decode(),
        state_fd=state,
        launcher_fd=launcher_fd,
        env={"PATH": PATH},
        working_directory=str(folder),
        **settings,
    )
    try:
        async with (
            serve(config),
            grpc.aio.insecure_channel(f"unix:{folder}/s", options=CHANNEL_OPTIONS) as channel,
        ):
            yield Client(channel, Signer(key).agent_token(UID))
    finally:
        os.close(state)
        os.close(launcher_fd)


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    # Not below pytest's folders: the path of a Unix socket has 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="orchard-agent-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def launcher() -> None:
    subprocess.run([ROOT / "scripts" / "build-launcher"], check=True)


@pytest.fixture(scope="session")
def shared_agent(launcher: None) -> Iterator[AgentProcess]:
    with new_agent() as agent:
        yield agent


@pytest.fixture
async def client(shared_agent: AgentProcess) -> AsyncIterator[Client]:
    async with shared_agent.client() as made:
        yield made


@contextlib.contextmanager
def new_agent(**settings: str) -> Iterator[AgentProcess]:
    with short_folder() as folder:
        folder.chmod(0o755)
        agent = AgentProcess(folder, **settings)
        try:
            yield agent
        finally:
            if agent.process.poll() is None:
                agent.process.send_signal(signal.SIGCONT)
                agent.kill()


@pytest.fixture
def make_agent(launcher: None) -> Iterator[Callable[..., AgentProcess]]:
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(new_agent(**settings))


@pytest.fixture
def work(shared_agent: AgentProcess) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir=shared_agent.work))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Problem:
    """A failed call."""

    code: grpc.StatusCode
    reason: str
    message: str
    fields: tuple[str, ...]
    retry: bool


@contextlib.contextmanager
def problem() -> Iterator[list[Problem]]:
    """Expect a failed call; the list then holds what it said."""
    found: list[Problem] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield found
    error = caught.value
    details = dict(error.trailing_metadata() or ()).get(STATUS_DETAILS_KEY)
    assert details is not None, error
    status = status_pb2.Status.FromString(details)
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    fields: tuple[str, ...] = ()
    has_retry = False
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            detail.Unpack(bad)
            fields = tuple(violation.field for violation in bad.field_violations)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            detail.Unpack(retry)
            has_retry = True
    found.append(Problem(error.code(), info.reason, error.details() or "", fields, has_retry))


def lives(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_end(pid: int) -> None:
    """Wait until a process that is no child of ours is gone."""
    end = time.monotonic() + BACKSTOP
    while lives(pid):
        assert time.monotonic() < end, f"{pid} still lives"
        time.sleep(0.005)


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("ORCHARD_")}
