"""A client that is attached to a command: keys and sizes go in, output comes out, over one connection after the other.

No byte is lost and none comes twice: output goes on at its offset, and input is kept until the command's terminal or
pipe has taken it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from orchard._client.calls import Dialogue
from orchard._client.convert import stream_name
from orchard._client.execs import Run
from orchard._client.status import CallFailed, parse_failure
from orchard._client.transport import Retry
from orchard._client.types import ExecResult
from orchard.exec.v1 import exec_pb2, exec_service_pb2

WINDOW_BYTES: Final = 128 << 10
"""Input that the command has not taken yet is held up to here; within it the agent never has to stop listening."""
_PIECE_BYTES: Final = 32 << 10
_KEEPALIVE_SECONDS: Final = 30.0
# The agent says something every 15 s.
_SILENCE_SECONDS: Final = 50.0
_PATIENCE_SECONDS: Final = 3600.0
"""So long a lost connection is tried anew: a machine may have been asleep."""

Output = Callable[[str, bytes], Awaitable[None]]


class Attachment:
    """One command's terminal or pipes. `run` it once, and write meanwhile, on the same event loop."""

    def __init__(self, run: Run, on_connection: Callable[[bool], None] = lambda _connected: None) -> None:
        """`on_connection` is told when the connection is lost, and when it is there again."""
        self._run = run
        self._on_connection = on_connection
        self._connected = self._was_connected = False
        self._pending = bytearray()
        self._begin = 0
        self._size: tuple[int, int] | None = None
        self._size_told = False
        self._ended = False
        self._moved = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.closed = False
        """Whether the command takes no more input."""

    async def write(self, data: bytes) -> bool:
        """Write input; waits while the command has not taken what was written before. False: it takes no more."""
        while not self.closed and len(self._pending) >= WINDOW_BYTES:
            self._room.clear()
            await self._room.wait()
        if not self.closed:
            self._pending += data
            self._moved.set()
        return not self.closed

    def end(self) -> None:
        """The input ends here."""
        self._ended = True
        self._moved.set()

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal."""
        self._size, self._size_told = (rows, columns), False
        self._moved.set()

    async def run(self, output: Output) -> ExecResult:
        """Hand on output from the run's offset on, to the command's end; how it ended.

        Raises:
            OrchardError: it cannot be reached any more, or has never started.
        """
        run = self._run
        retry = run.transport.retry()
        while True:
            try:
                async with run.transport.dialogue(lambda c: c.exec.Attach, run.context) as dialogue:
                    speaking = asyncio.get_running_loop().create_task(self._speak(dialogue), name="terminal input")
                    try:
                        await self._listen(dialogue, output)
                    finally:
                        speaking.cancel()
                        await asyncio.wait([speaking])
                return self._result()
            except CallFailed as error:
                if self._connected:
                    # From now on it is known to run, and the connection alone is at fault.
                    retry = Retry(_PATIENCE_SECONDS)
                    self._tell(connected=False)
                await run.transport.pause_or_raise(error, retry, run.sandbox_id)

    def _result(self) -> ExecResult:
        if self._run.result is None:  # the server has stopped in order
            raise CallFailed(parse_failure("UNAVAILABLE", "the stream ended without the command's result", {}))
        return self._run.result

    def _tell(self, *, connected: bool) -> None:
        if self._connected != connected:
            self._connected = connected
            self._on_connection(connected)

    async def _listen(self, dialogue: Dialogue, output: Output) -> None:
        run = self._run
        while (response := await _receive(dialogue)) is not None:
            event = response.WhichOneof("event")
            if event == "output":
                chunk = response.output
                data = chunk.data[max(0, run.offset - chunk.offset) :]
                if data:
                    run.missing += max(0, chunk.offset - run.offset)
                    run.offset = chunk.offset + len(chunk.data)
                    await output(stream_name(chunk.stream), data)
            elif event == "gap":
                run.skip(response.gap)
            elif event == "stdin":
                self._took(response.stdin.written, closed=response.stdin.closed)
            elif event == "started":
                self._started(response.started)
            elif event == "exit":
                run.end(response.exit)
                return

    def _started(self, started: exec_service_pb2.AttachStarted) -> None:
        self._run.transport.reached()
        if not started.HasField("stdin"):
            self._close()
        elif self._was_connected:
            self._took(started.stdin.offset, closed=started.stdin.closed)
        else:
            # What others have written before comes before what was typed here meanwhile.
            self._begin = started.stdin.offset
            self._took(self._begin, closed=started.stdin.closed)
        self._was_connected = True
        self._size_told = self._size is None
        self._tell(connected=True)
        self._moved.set()

    def _took(self, offset: int, *, closed: bool) -> None:
        """Everything before `offset` need not be sent again."""
        del self._pending[: max(0, offset - self._begin)]
        self._begin = max(self._begin, offset)
        if closed:
            self._close()
        if len(self._pending) < WINDOW_BYTES:
            self._room.set()

    def _close(self) -> None:
        self.closed = True
        self._pending.clear()
        self._room.set()

    async def _speak(self, dialogue: Dialogue) -> None:
        """Send what there is to say, until the call is over."""
        run = self._run
        start = exec_service_pb2.AttachStart(exec_id=run.exec_id, output_offset=run.offset)
        request = exec_service_pb2.AttachRequest(sandbox_id=run.sandbox_id, start=start)
        sent, end_sent = -1, False
        while await dialogue.send(request):
            while True:
                self._moved.clear()
                if self._connected:
                    sent = max(sent, self._begin)
                    found = self._next(sent, end_sent=end_sent)
                    if found is not None:
                        request, sent, end_sent = found
                        break
                try:
                    async with asyncio.timeout(_KEEPALIVE_SECONDS):
                        await self._moved.wait()
                except TimeoutError:
                    request = exec_service_pb2.AttachRequest(keepalive=exec_service_pb2.Keepalive())
                    break

    def _next(self, sent: int, *, end_sent: bool) -> tuple[exec_service_pb2.AttachRequest, int, bool] | None:
        """The next request, how far it goes, and whether it ends the input; None if there is nothing to say."""
        if self._size is not None and not self._size_told:
            self._size_told = True
            size = exec_pb2.WindowSize(rows=self._size[0], columns=self._size[1])
            return exec_service_pb2.AttachRequest(resize=size), sent, end_sent
        if self.closed or end_sent:
            return None
        data = bytes(self._pending[sent - self._begin : sent - self._begin + _PIECE_BYTES])
        end = self._ended and sent + len(data) == self._begin + len(self._pending)
        if not data and not end:
            return None
        chunk = exec_service_pb2.StdinChunk(offset=sent, data=data, end=end)
        return exec_service_pb2.AttachRequest(stdin=chunk), sent + len(data), end


async def _receive(dialogue: Dialogue) -> Any:
    try:
        async with asyncio.timeout(_SILENCE_SECONDS):
            return await dialogue.receive()
    except TimeoutError:
        raise CallFailed(parse_failure("UNAVAILABLE", "the stream stalled", {})) from None
