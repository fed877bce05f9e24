"""A client that is attached to a command: says what the test says, and keeps what comes."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from orchard.exec.v1 import exec_pb2, exec_service_pb2
from orchard.exec.v1.exec_service_pb2_grpc import ExecServiceStub

from services.common.peer_status import peer_status

BACKSTOP = 110.0


class Attached:
    """One Attach call. `output` begins at the offset that was asked for."""

    def __init__(
        self,
        stub: ExecServiceStub,
        metadata: Any,
        sandbox_id: str,
        exec_id: str,
        spec: exec_pb2.ExecSpec | None = None,
        *,
        offset: int = 0,
    ) -> None:
        attach: Any = stub.Attach  # the stubs know only calls that are given their requests
        self.call: Any = attach(metadata=metadata, timeout=BACKSTOP)
        start = exec_service_pb2.AttachStart(exec_id=exec_id, spec=spec, output_offset=offset)
        self._first = exec_service_pb2.AttachRequest(sandbox_id=sandbox_id, start=start)
        self.exec_id = exec_id
        self.offset = offset
        self.output = b""
        self.sent = 0
        self.started = exec_service_pb2.AttachStarted()
        self.stdin: list[exec_pb2.StdinState] = []
        self.keepalives = 0
        self.result: exec_pb2.ExecResult | None = None

    async def __aenter__(self) -> Self:
        with peer_status(self.call):
            await self.call.write(self._first)
            first = await self.call.read()
        # A call that failed has no first message: this raises what it failed with.
        if not isinstance(first, exec_service_pb2.AttachResponse):
            await self.call.initial_metadata()
            await self.call
        self.started = first.started
        self.sent = self.started.stdin.offset
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.call.cancel()

    async def send(self, **payload: Any) -> None:
        """Raises the error of the agent where that has ended the call."""
        with peer_status(self.call):
            await self.call.write(exec_service_pb2.AttachRequest(**payload))

    async def write(self, data: bytes, *, end: bool = False) -> None:
        chunk = exec_service_pb2.StdinChunk(offset=self.sent, data=data, end=end)
        self.sent += len(data)
        await self.send(stdin=chunk)

    async def resize(self, rows: int, columns: int) -> None:
        await self.send(resize=exec_pb2.WindowSize(rows=rows, columns=columns))

    async def step(self) -> bool:
        """Take one message; False at the end."""
        response = await self.call.read()
        if not isinstance(response, exec_service_pb2.AttachResponse):
            await self.call.code()
            return False
        kind = response.WhichOneof("event")
        if kind == "output":
            assert response.output.offset == self.offset + len(self.output), "chunks must follow each other"
            assert response.output.stream in (exec_pb2.OUTPUT_STREAM_STDOUT, exec_pb2.OUTPUT_STREAM_STDERR)
            self.output += response.output.data
        elif kind == "stdin":
            self.stdin.append(response.stdin)
        elif kind == "keepalive":
            self.keepalives += 1
        elif kind == "exit":
            self.result = response.exit
        else:
            raise AssertionError(f"unexpected {kind}")
        return True

    async def until(self, wanted: bytes, after: int = 0) -> bytes:
        """Read until the output behind `after` has `wanted`; returns all output."""
        while wanted not in self.output[after:]:
            assert await self.step(), f"ended without {wanted!r}: {self.output!r}"
        return self.output

    async def exit(self) -> exec_pb2.ExecResult:
        """Read to the end; how the command ended."""
        while await self.step():
            pass
        assert self.result is not None, self.call
        return self.result
