"""One client that is attached to a command: its messages in, the command's output out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from orchard.exec.v1 import exec_service_pb2

from services.common.errors import FailedPreconditionError, InvalidArgumentError
from services.common.requests import IDLE_SECONDS, idle_error
from services.common.validation import MEBIBYTE, Fields
from services.exec_agent.execution import Execution
from services.exec_agent.model import Chunk
from services.exec_agent.process import Target
from services.exec_agent.reader import Nudged, OutputReader
from services.exec_agent.service import ExecService
from services.exec_agent.servicer_messages import check_size, exec_message, fill, result_message, stdin_message
from services.exec_agent.stdin import Stdin

KEEPALIVE_SECONDS: Final = 15.0
CLIENT_SILENCE_SECONDS: Final = IDLE_SECONDS
"""What is said here keeps the stream from being idle: a client that is heard of no more ends it nevertheless."""
_TOLD_BYTES: Final = 32 << 10
"""The client is told of its input at every so many bytes written: it keeps what is not."""


class Attachment:
    """Close it, also after an error."""

    def __init__(self, service: ExecService, execution: Execution, reader: OutputReader) -> None:
        """Owns `reader`."""
        self._service = service
        self._execution = execution
        self._reader = reader
        self._loop = asyncio.get_running_loop()
        self._stdin: Stdin | None = None
        self._told = 0
        self._told_closed = False
        self._hearing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_silent = False
        self._heard_at: float | None = None
        """When the client was heard last; None while nobody listens to it."""
        self._is_idle = False

    def ended(self, _context: Any) -> None:
        """The call is over: a client can leave between two messages, and the generator is collected later."""
        self.close()

    def close(self) -> None:
        """Detach. Repeatable; the command goes on."""
        self._reader.close()
        if self._hearing is not None:
            self._hearing.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._stdin is not None:
            self._stdin.listeners.discard(self._stdin_moved)

    async def responses(
        self, requests: AsyncIterator[exec_service_pb2.AttachRequest]
    ) -> AsyncIterator[exec_service_pb2.AttachResponse]:
        """What the client gets, while what it sends is obeyed."""
        execution, reader = self._execution, self._reader
        yield self._started()
        self._hearing = self._loop.create_task(self._hear(requests), name=f"attached to {execution.exec_id}")
        self._hearing.add_done_callback(lambda _task: reader.nudge())
        self._tick()
        while True:
            try:
                found = await reader.next()
            except Nudged:
                for response in self._news():
                    yield response
                continue
            if found is None:
                break
            response = exec_service_pb2.AttachResponse()
            if isinstance(found, Chunk):
                fill(response.output, found)
            else:
                response.gap.offset, response.gap.size = found
            yield response
        if execution.start_error is not None:
            raise execution.start_error
        yield exec_service_pb2.AttachResponse(exit=result_message(execution))

    def _started(self) -> exec_service_pb2.AttachResponse:
        execution = self._execution
        started = exec_service_pb2.AttachStarted(exec=exec_message(execution))
        command = execution.command
        if command is not None and (command.stdin_open or command.tty is not None):
            self._stdin = self._service.stdin_of(execution)
            self._stdin.listeners.add(self._stdin_moved)
            self._told, self._told_closed = self._stdin.written, self._stdin.closed
            started.stdin.CopyFrom(stdin_message(self._stdin))
        return exec_service_pb2.AttachResponse(started=started)

    # ------------------------------------------------------------ what the client is told besides output

    def _tick(self) -> None:
        """Every KEEPALIVE_SECONDS something is sent."""
        if self._timer is not None:
            self._is_silent = True
            self._reader.nudge()
        if self._heard_at is not None and self._loop.time() - self._heard_at > CLIENT_SILENCE_SECONDS:
            self._is_idle = True
        self._timer = self._loop.call_later(KEEPALIVE_SECONDS, self._tick)

    def _stdin_moved(self) -> None:
        stdin = self._stdin
        if stdin is not None and (stdin.closed != self._told_closed or stdin.written - self._told >= _TOLD_BYTES):
            self._reader.nudge()

    def _news(self) -> Iterator[exec_service_pb2.AttachResponse]:
        hearing, stdin = self._hearing, self._stdin
        if hearing is not None and hearing.done() and not hearing.cancelled():
            hearing.result()
        if self._is_idle:
            raise idle_error(CLIENT_SILENCE_SECONDS)
        if stdin is not None and (stdin.closed, stdin.written) != (self._told_closed, self._told):
            self._told, self._told_closed = stdin.written, stdin.closed
            yield exec_service_pb2.AttachResponse(stdin=stdin_message(stdin))
        if self._is_silent:
            self._is_silent = False
            yield exec_service_pb2.AttachResponse(keepalive=exec_service_pb2.Keepalive())

    # ------------------------------------------------------------ what the client says

    async def _hear(self, requests: AsyncIterator[exec_service_pb2.AttachRequest]) -> None:
        self._heard_at = self._loop.time()
        async for request in requests:
            self._heard_at = None
            payload = request.WhichOneof("payload")
            if payload == "stdin":
                await self._take(request.stdin)
            elif payload == "resize":
                fields = Fields()
                check_size(fields, "resize", request.resize)
                fields.done()
                self._service.resize(self._execution, request.resize.rows, request.resize.columns)
            elif payload == "signal":
                self._signal(request.signal)
            elif payload != "keepalive":
                raise InvalidArgumentError.of("payload", "every message after the first must be anything but a start")
            self._heard_at = self._loop.time()
        self._heard_at = None  # it has said all it had to

    async def _take(self, chunk: exec_service_pb2.StdinChunk) -> None:
        if len(chunk.data) > MEBIBYTE:
            raise InvalidArgumentError.of("stdin.data", "must be at most 1 MiB a message; send it in smaller ones")
        if chunk.offset < 0:
            raise InvalidArgumentError.of("stdin.offset", "must not be negative")
        stdin = self._service.stdin_of(self._execution)
        if stdin.closed:
            return  # the client is told so; what it said before it heard of that may begin behind what was taken
        try:
            while not await stdin.take(chunk.offset, chunk.data):
                # The agent stops with this half taken: what is on its way behind it is not to be looked at any more.
                self._execution.check_interrupted()
        except FailedPreconditionError:
            return  # it is closed, and the client is told so
        if chunk.end:
            stdin.end(chunk.offset + len(chunk.data))

    def _signal(self, wanted: exec_service_pb2.AttachSignal) -> None:
        fields = Fields()
        fields.check(1 <= wanted.signal <= 64, "signal.signal", "must be from 1 to 64")
        fields.check(0 <= wanted.target <= 2, "signal.target", "must be TREE or LEADER")
        fields.token_id("signal.request_id", wanted.request_id, optional=True)
        fields.done()
        self._service.signal(self._execution.exec_id, Target(wanted.target or 1), wanted.signal, wanted.request_id)
