"""Running a command: started exactly once, followed to its end over broken connections, cancelled when its caller
is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from orchard._client import errors
from orchard._client.convert import exec_result, stream_name
from orchard._client.exec_calls import ExecCalls
from orchard._client.observing import ObservedCommand, Observers
from orchard._client.options import Command
from orchard._client.pool import Connection
from orchard._client.status import CallFailed
from orchard._client.stdin import check_takes_input, feeding
from orchard._client.text import Characters
from orchard._client.transport import CALL_SECONDS, Retry
from orchard._client.types import ExecEnd, ExecResult, OutputChunk
from orchard._client.units import duration
from orchard.exec.v1 import exec_pb2, exec_service_pb2

# A command that ends within this time is one call. Longer, and output beyond the retained limit could be lost before
# it is read.
INLINE_WAIT_SECONDS: Final = 1.0
_STALL_SECONDS: Final = 60.0
_OUTPUT_SLACK: Final = 15.0


def describe(command: Command) -> str:
    """The command for people, shortened."""
    text = command if isinstance(command, str) else " ".join(command)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(eq=False)
class Run(ExecCalls):
    """One command, from its start over its output to its result."""

    spec: exec_pb2.ExecSpec
    command: str
    observers: Observers
    chunks: list[tuple[str, bytes]] = field(default_factory=list)
    offset: int = 0
    missing: int = 0
    gap: int = 0
    """Of those, bytes just before `offset` that no chunk has told of yet."""
    result: ExecResult | None = None
    input: bytes | None = None
    """Written while it runs; None: the specification has it all."""

    def observing(self, *, background: bool = False) -> AbstractContextManager[ObservedCommand | None]:
        """Around it, for those who observe the sandbox's commands."""
        return self.observers.observing(self.sandbox_id, self.exec_id, self.spec, background=background)

    async def start(self, wait_seconds: float, *, reads_on: bool = False) -> exec_service_pb2.StartExecResponse:
        """Start it; repeats start nothing. With `wait_seconds` the answer has its end and output, if it comes in that
        time. Whoever `reads_on` from the beginning finds all output, however much that is by then.
        """
        if self.spec.stdin_mode or self.spec.HasField("tty"):
            await check_takes_input(self)
        request = exec_service_pb2.StartExecRequest(
            sandbox_id=self.sandbox_id,
            exec_id=self.exec_id,
            spec=self.spec,
            wait=duration("wait", wait_seconds),
            reads_on=reads_on,
        )
        return await self.unary(lambda c: c.exec.StartExec, request, timeout=CALL_SECONDS + wait_seconds)

    async def finish(self) -> ExecResult:
        """Start it and return its result; output comes with the first answer if it is short and quick, else by a
        stream.
        """
        wait_seconds = INLINE_WAIT_SECONDS if self.input is None else 0.0
        while True:
            response = await self.start(wait_seconds, reads_on=True)
            if response.exec.state == exec_pb2.EXEC_STATE_ENDED and response.output_complete:
                self.chunks = [(stream_name(chunk.stream), chunk.data) for chunk in response.output]
                return self.end(response.exec.result)
            try:
                async with nullcontext() if self.input is None else feeding(self, self.input):
                    return await self.collect()
            except errors.ExecNotFound:
                # Once more, if it waited for others when its agent was killed: older ones kept none that never began.
                if response.exec.state != exec_pb2.EXEC_STATE_QUEUED or self.offset:
                    raise
            wait_seconds = 0.0

    async def collect(self) -> ExecResult:
        """The result of a started command with all its retained output."""
        async for chunk in self.follow(self.read_output):
            self.chunks.append((chunk.stream, chunk.data))
        return self.ended()

    def end(self, message: exec_pb2.ExecResult) -> ExecResult:
        """Note the end and make the result of it."""
        self.result = exec_result(self.exec_id, message, self.chunks, command=self.command, missing=self.missing)
        return self.result

    def ended(self) -> ExecResult:
        """The result of a command that has ended."""
        if self.result is None:
            raise RuntimeError("the command has not ended")
        return self.result

    def read_output(self, connection: Connection) -> Callable[..., Any]:
        return connection.exec.ReadOutput

    def start_and_read(self, connection: Connection) -> Callable[..., Any]:
        return connection.exec.Exec

    async def follow(
        self, method: Callable[[Connection], Callable[..., Any]], *, follow: bool = True
    ) -> AsyncGenerator[OutputChunk, None]:
        """Yield output from `offset` on until the end, which sets `result`; re-attaches when the stream breaks."""
        characters = Characters()
        retry = self.transport.retry()
        while True:
            try:
                async with self.transport.stream(method, self._request(method, follow), self.context) as stream:
                    watchdog = _Watchdog(self, stream.interrupt)
                    try:
                        async for response in stream:
                            watchdog.progress()
                            retry.succeeded()
                            event = response.WhichOneof("event")
                            if event == "chunk":
                                chunk = self._take(response.chunk, characters)
                                if chunk is not None:
                                    watchdog.rest()
                                    yield chunk
                                    watchdog.progress()
                            elif event == "gap":
                                self.skip(response.gap)
                            elif event == "result":
                                self.end(response.result)
                                break
                    finally:
                        watchdog.stop()
                if self.result is not None or not follow:
                    break
                await self._reattach(retry)
            except CallFailed as error:
                await self.transport.pause_or_raise(error, retry, self.sandbox_id)
        for name, rest in characters.finish():
            yield OutputChunk(name, b"", rest, self.offset)
        if self.gap:
            yield OutputChunk("stdout", b"", b"", self.offset, self.gap)

    async def _reattach(self, retry: Retry) -> None:
        """A stream that ended without a result was cut by a server that stopped in order."""
        if not await retry.failed(0.0):
            raise errors.SandboxUnavailable(
                "the command's output ended without its result, again and again", attempts=retry.attempts
            )

    def _request(self, method: Callable[[Connection], Callable[..., Any]], follow: bool) -> Any:
        if method == self.start_and_read:
            return exec_service_pb2.ExecRequest(
                sandbox_id=self.sandbox_id, exec_id=self.exec_id, spec=self.spec, offset=self.offset
            )
        return exec_service_pb2.ReadOutputRequest(
            sandbox_id=self.sandbox_id, exec_id=self.exec_id, offset=self.offset, no_follow=not follow
        )

    def skip(self, gap: exec_pb2.OutputGap) -> None:
        """Go on behind output that is no longer retained."""
        size = max(0, gap.offset + gap.size - self.offset)
        self.missing += size
        self.gap += size
        self.offset += size

    def _take(self, message: exec_pb2.OutputChunk, characters: Characters) -> OutputChunk | None:
        """The next chunk, in sequence; None if it brings nothing new."""
        data, offset = message.data, message.offset
        if offset < self.offset:
            data, offset = data[self.offset - offset :], self.offset
        missing = offset - self.offset
        if not data:
            return None
        self.missing += missing
        missing, self.gap = missing + self.gap, 0
        self.offset = offset + len(data)
        name = stream_name(message.stream)
        return OutputChunk(name, data, characters.whole(name, data), offset, missing)


class _Watchdog:
    """Ends a stream that is silent though the command has moved on: a connection can be dead in ways that keepalive
    does not see.
    """

    def __init__(self, run: Run, interrupt: Callable[[], None]) -> None:
        self._run = run
        self._interrupt = interrupt
        self._last: float | None = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(_STALL_SECONDS, self._look)

    def progress(self) -> None:
        self._last = time.monotonic()

    def rest(self) -> None:
        """Somebody uses what came, and may take any time. Cut meanwhile, the command would be an orphan."""
        self._last = None

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        silent = 0.0 if self._last is None else time.monotonic() - self._last
        if self._last is not None and silent >= _STALL_SECONDS:
            self._task = loop.create_task(self._check(), name=f"check {self._run.exec_id}")
            silent = 0.0
        self._timer = loop.call_later(max(1.0, _STALL_SECONDS - silent), self._look)

    async def _check(self) -> None:
        last, offset = self._last, self._run.offset
        try:
            state = await self._run.wait(0.0)
        except errors.OrchardError:
            return
        moved = state.state == exec_pb2.EXEC_STATE_ENDED or state.output_bytes > offset
        if not moved:
            return
        await asyncio.sleep(_OUTPUT_SLACK)
        if last is not None and self._last == last:
            self._interrupt()


def raise_unless_result(result: ExecResult) -> ExecResult:
    """Return a result that is the command's own; what the platform did to it is an error and never a result.

    Raises:
        SandboxLost: its sandbox ended under it.
        CommandInterrupted: the agent was restarted, or the client had lost touch for too long.
        CommandNotStarted: it left the queue without having run.
    """
    if result.ended is ExecEnd.SANDBOX_LOST:
        raise errors.SandboxLost(result.message or "the sandbox ended while the command ran")
    if result.ended is ExecEnd.NOT_STARTED:
        raise errors.CommandNotStarted(result.message or "the command left the queue without having run")
    if result.ended in (ExecEnd.AGENT_RESTARTED, ExecEnd.ORPHANED, ExecEnd.UNKNOWN):
        why = {
            ExecEnd.AGENT_RESTARTED: "the sandbox's agent was restarted while the command ran",
            ExecEnd.ORPHANED: "the command was ended since no client was attached for too long",
        }.get(result.ended, "the command ended in a way that this SDK does not know")
        raise errors.CommandInterrupted(result.message or why, result=result, reason=result.ended.upper())
    return result
