"""What in a sandbox calls to its agent are aimed at (commands, files, a server, connections), and words that hit it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import tarfile
from collections import ChainMap
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from orchard.exec.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    exec_pb2,
    exec_service_pb2,
    exec_service_pb2_grpc,
    file_service_pb2,
    file_service_pb2_grpc,
    tunnel_service_pb2,
    tunnel_service_pb2_grpc,
)

from tests.support.agents import SandboxAgent
from tests.support.random_messages import Known
from tests.support.wire import seconds

_BACKSTOP: Final = 110
_SERVER: Final = Path(__file__).with_name("port_server.py")
_SERVER_PORT: Final = 20_000
_CONNECTIONS: Final = 4
_NEW_IDS: Final = 10
_LARGE: Final = 8 << 10
"""Output above this is kept in a file (spool.INLINE_LIMIT)."""
_SHELLS: Final = (
    *("true", "echo x", "cat", "sleep 1", "seq 3000", "exit 3", "kill -9 $$", "kill -STOP $$", "head -c 99"),
    *("(sleep 1 &) ; echo y", "trap '' TERM HUP; sleep 60", "exec <&-; sleep 1", "stty -echo; cat", "exec >&- 2>&-"),
)
_ARGVS: Final = (("true",), ("cat",), ("echo", "x"), ("sleep", "1"), ("/bin/sh", "-c", "cat; echo y >&2"))
_PIPE: Final = exec_pb2.STDIN_MODE_PIPE
EXAMPLES: Final = {
    exec_pb2.ExecSpec.DESCRIPTOR.full_name: (
        *(exec_pb2.ExecSpec(shell=shell) for shell in _SHELLS),
        *(exec_pb2.ExecSpec(shell=shell, concurrent=True, stdin_mode=_PIPE) for shell in _SHELLS),
        *(exec_pb2.ExecSpec(shell=shell, tty=exec_pb2.Tty()) for shell in _SHELLS),
        *(exec_pb2.ExecSpec(argv=exec_pb2.Argv(args=argv), stdin=b"x\n", merge_stderr=True) for argv in _ARGVS),
        *(exec_pb2.ExecSpec(argv=exec_pb2.Argv(args=argv), timeout=seconds(0.5)) for argv in _ARGVS),
        *(exec_pb2.ExecSpec(shell=shell, concurrent=True, orphan_timeout=seconds(0.1)) for shell in _SHELLS),
    )
}
_FILES: Final = (
    "rm -rf /tmp/fuzz /tmp/fuzz2 /root/relative; mkdir -p /tmp/fuzz/d/e && cd /tmp/fuzz && echo a > a && ln -s a link"
    " && ln -s . loop && mkfifo fifo && seq 300000 > big && touch relative && chmod 0 d/e"
)
_PATCH: Final = b"--- a/a\n+++ b/a\n@@ -1 +1,2 @@\n-a\n+b\n+c\n"
_NEW_FILE: Final = b"diff --git a/n b/n\nnew file mode 100644\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+n\n"


class Targets:
    """An async context; `known` is what random messages are made from, and changes with `renew`."""

    def __init__(self, channel: grpc.aio.Channel, agent: SandboxAgent, rng: random.Random) -> None:
        self.known: dict[str, tuple[Any, ...]] = _words(agent.sandbox_id)
        self._pieces = {"UploadArchive": _pieces(_archive(), _archive("../out"), _archive("\u00e4/" * 60 + "n"))}
        self._pieces["ApplyPatch"] = _pieces(_PATCH, _PATCH, _NEW_FILE, _NEW_FILE + _PATCH)
        self._agent = agent
        self._rng = rng
        self._execs: Any = exec_service_pb2_grpc.ExecServiceStub(channel)
        self._files: Any = file_service_pb2_grpc.FileServiceStub(channel)
        self._tunnels: Any = tunnel_service_pb2_grpc.TunnelServiceStub(channel)
        self._agents: Any = agent_service_pb2_grpc.AgentServiceStub(channel)
        self._endpoints: list[Any] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.end()

    def known_of(self, method: MethodDescriptor) -> Known:
        """`known`, with the data that this method takes."""
        return ChainMap(self._pieces.get(method.name, {}), self.known)

    async def renew(self) -> None:
        """End what is left of the targets before, and make new ones."""
        await self.end()
        name = f"{self._rng.getrandbits(40):010x}"
        await self._start(f"{name}-pipe", exec_pb2.ExecSpec(shell="cat", stdin_mode=exec_pb2.STDIN_MODE_PIPE))
        await self._start(f"{name}-deaf", exec_pb2.ExecSpec(shell="sleep 600", stdin_mode=exec_pb2.STDIN_MODE_PIPE))
        await self._start(f"{name}-tty", exec_pb2.ExecSpec(shell="cat", tty=exec_pb2.Tty()))
        await self._start(f"{name}-large", exec_pb2.ExecSpec(shell="seq 100000"), wait=60)
        await self._start(f"{name}-files", exec_pb2.ExecSpec(shell=_FILES), wait=60)
        await self._start(f"{name}-ended", exec_pb2.ExecSpec(shell="echo x"), wait=60)
        made = tuple(f"{name}-{kind}" for kind in ("pipe", "deaf", "tty", "large", "ended"))
        self.known["exec_id"] = (*made * 2, *(f"{name}-new{number}" for number in range(_NEW_IDS)))
        self.known["upload_id"] = tuple(f"{name}-upload{number}" for number in range(3))
        await self._serve(f"{name}-server")
        self.known["connection_id"] = await self._connect(f"{name}-out")

    async def end(self) -> None:
        """No command runs and nothing listens any more."""
        for endpoint in self._endpoints:
            endpoint.cancel()
        self._endpoints.clear()
        while running := [found async for found in self.execs() if found.state != exec_pb2.EXEC_STATE_ENDED]:
            await asyncio.gather(*(self._end(found) for found in running))
        request = agent_service_pb2.SetSecretEnvRequest(sandbox_id=self._agent.sandbox_id)
        await self._call(self._agents.SetSecretEnv, request)

    async def state(self) -> tuple[set[str], set[str]]:
        """What a call changes: commands as they stand, and files below /tmp."""
        execs = {f"{found.exec_id} {found.state} {found.output_bytes}" async for found in self.execs()}
        request = file_service_pb2.ListDirectoryRequest(
            sandbox_id=self._agent.sandbox_id, path="/tmp", recursive=True, page_size=5000
        )
        answer = await self._call(self._files.ListDirectory, request)
        return execs, {f"{found.path} {found.size} {found.mode} {found.modify_time}" for found in answer.files}

    async def large_outputs(self) -> int:
        """Commands whose output is in a file."""
        return len([found async for found in self.execs() if found.output_bytes > _LARGE])

    async def execs(self) -> AsyncIterator[exec_pb2.Exec]:
        """Every command that the agent holds."""
        token = ""
        while True:
            request = exec_service_pb2.ListExecsRequest(
                sandbox_id=self._agent.sandbox_id, page_size=1000, page_token=token
            )
            page = await self._call(self._execs.ListExecs, request)
            for found in page.execs:
                yield found
            token = page.next_page_token
            if not token:
                return

    async def _call(self, method: Any, request: Any) -> Any:
        return await method(request, metadata=self._agent.metadata, timeout=_BACKSTOP)

    async def _start(self, exec_id: str, spec: exec_pb2.ExecSpec, wait: float = 0) -> exec_pb2.Exec:
        spec.concurrent = True
        request = exec_service_pb2.StartExecRequest(
            sandbox_id=self._agent.sandbox_id, exec_id=exec_id, spec=spec, wait=seconds(wait)
        )
        return (await self._call(self._execs.StartExec, request)).exec

    async def _end(self, found: exec_pb2.Exec) -> None:
        """By KILL to all of it, which no grace holds up."""
        named = {"sandbox_id": self._agent.sandbox_id, "exec_id": found.exec_id}
        if found.state == exec_pb2.EXEC_STATE_RUNNING:
            signal = exec_service_pb2.SignalExecRequest(**named, signal=9, target=exec_service_pb2.SIGNAL_TARGET_TREE)
        else:
            signal = exec_service_pb2.SignalExecRequest(**named, cancel=True)
        with contextlib.suppress(grpc.aio.AioRpcError):  # it may just have ended, and been forgotten
            await self._call(self._execs.SignalExec, signal)
            await self._call(self._execs.WaitExec, exec_service_pb2.WaitExecRequest(**named, wait=seconds(1)))

    async def _serve(self, exec_id: str) -> None:
        """A server that says what it hears."""
        argv = exec_pb2.Argv(args=["python3", "-c", _SERVER.read_text(), "echo", str(_SERVER_PORT)])
        await self._start(exec_id, exec_pb2.ExecSpec(argv=argv))
        request = exec_service_pb2.ReadOutputRequest(sandbox_id=self._agent.sandbox_id, exec_id=exec_id)
        call = self._execs.ReadOutput(request, metadata=self._agent.metadata, timeout=_BACKSTOP)
        event = await call.read()
        assert event.chunk.data == b"listening\n", event
        call.cancel()

    async def _connect(self, exec_id: str) -> tuple[str, ...]:
        """Ids of connections out of the sandbox that nobody has taken yet."""
        request = tunnel_service_pb2.ServeEndpointRequest(sandbox_id=self._agent.sandbox_id, request_id=exec_id)
        endpoint = self._tunnels.ServeEndpoint(request, metadata=self._agent.metadata, timeout=_BACKSTOP)
        self._endpoints.append(endpoint)
        port = (await endpoint.read()).listening.port
        opened = "".join(
            f"exec {fd}<>/dev/tcp/127.0.0.1/{port}; echo {fd} >&{fd}; " for fd in range(3, 3 + _CONNECTIONS)
        )
        await self._start(exec_id, exec_pb2.ExecSpec(shell=f"{opened} sleep 600"))
        return tuple([(await endpoint.read()).connection.connection_id for _ in range(_CONNECTIONS)])


def _words(sandbox_id: str) -> dict[str, tuple[Any, ...]]:
    """Values that reach further than random ones, by the names of their fields. None of them ends the sandbox."""
    paths = tuple(f"/tmp/fuzz/{name}" for name in ("a", "link", "new", "d/e", "d", "big", "fifo", "loop/loop/a", "a/b"))
    return {
        "sandbox_id": (sandbox_id,) * 20 + ("another",),
        "shell": _SHELLS,
        "args": ("true", "cat", "echo", "sleep", "1", "x"),
        "target": (0, 1, 2),
        "cancel": (False, False, False, True),
        "cwd": ("", "/tmp", "/tmp/fuzz"),
        "user": ("", "0", "root", "nobody", "65534:65534"),
        "owner": ("", "0", "root", "nobody:nogroup"),
        "term": ("", "xterm", "dumb"),
        "key": ("A", "B_1", "PATH"),
        "path": (*paths, "/tmp/fuzz", "/tmp/fuzz", "relative", "/proc/version", "/dev/full"),
        "source_path": (*paths, "relative"),
        "target_path": (*paths, "/tmp/fuzz2"),
        "host": ("", "localhost", "127.0.0.1", "::1"),
        "port": (0, *(_SERVER_PORT,) * 4, 20_001, 20_002),
        "request_id": ("r1", "r2", "r3"),
        # None that stops: what is stopped when its own command ends is nobody's to wake.
        "signal": (1, 2, 9, 15, 18, 28),
        "mode": (0, 0o644, 0o755, 0o7777),
        "rows": (1, 24, 65_535),
        "columns": (1, 80, 65_535),
        "seconds": (0, 0, 1, 2, 60),
        "nanos": (0, 1, 1_000_000, 500_000_000, -1),
        "offset": (0, 0, 0, 1, 5, 100_000, -1),
        "output_offset": (0, 0, 1, 5, 100_000),
        "length": (0, 1, 5, 100_000),
        "strip": (0, 1),
        "fuzz": (0, 3),
        "page_size": (0, 1, 100),
        "page_token": ("",),
        "end": (True,),
        "eof": (True,),
        "data": (b"", b"x\n", b"x" * 70_000, b"\x03", bytes(1024)),
    }


def _pieces(*wholes: bytes) -> dict[str, tuple[bytes, ...]]:
    """Whole ones twice as often as halves."""
    halves = [half for whole in wholes for half in (whole[: len(whole) // 2], whole[len(whole) // 2 :])]
    return {"data": (*wholes * 4, *halves, b"")}


def _archive(*more: str) -> bytes:
    """A tar file with an entry of each kind, and further files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, link in (
            *(("a", tarfile.REGTYPE, ""), ("d", tarfile.DIRTYPE, ""), ("d/e", tarfile.REGTYPE, "")),
            *(("link", tarfile.SYMTYPE, "a"), ("hard", tarfile.LNKTYPE, "a"), ("pipe", tarfile.FIFOTYPE, "")),
            *((name, tarfile.REGTYPE, "") for name in more),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, link
            content = b"a\n" if kind == tarfile.REGTYPE else b""
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
