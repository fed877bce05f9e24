"""Commands that are followed or left running: ExecStream and Process."""

from __future__ import annotations

import signal as signals
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from types import TracebackType
from typing import Self

from orchard._client.arguments import explained
from orchard._client.convert import exec_info, exec_result
from orchard._client.errors import DeadlineExceeded, StdinClosed
from orchard._client.execs import Run, raise_unless_result
from orchard._client.signal_numbers import signal_number
from orchard._client.stdin import StdinWriter, feeding
from orchard._client.types import ExecEnd, ExecInfo, ExecResult, OutputChunk
from orchard._client.units import Seconds, seconds_of
from orchard.exec.v1 import exec_pb2, exec_service_pb2


@explained
class AsyncExecStream:
    """The output of a running command, chunk by chunk; iterate it once. Leaving the iteration early ends the command.

    Memory is that of one chunk: the output is not kept, so `result` has none of it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._iterated = False

    @property
    def exec_id(self) -> str:
        """The command's id."""
        return self._run.exec_id

    @property
    def result(self) -> ExecResult:
        """How it ended, without output; after the iteration.

        Raises:
            RuntimeError: the iteration is not over.
            SandboxLost, CommandInterrupted, CommandNotStarted: as exec.
        """
        return raise_unless_result(self._run.ended())

    def __aiter__(self) -> AsyncGenerator[OutputChunk, None]:
        if self._iterated:
            raise RuntimeError("a command's stream can be iterated once; use start() to read output again")
        self._iterated = True
        return self._chunks()

    async def _chunks(self) -> AsyncGenerator[OutputChunk, None]:
        run = self._run
        with run.transport.operation("exec", sandbox_id=run.sandbox_id, exec_id=run.exec_id) as operation:
            run.context = run.transport.context(operation)
            with run.observing() as observed:
                try:
                    async with await _fed(run), aclosing(run.follow(run.start_and_read)) as chunks:
                        async for chunk in chunks:
                            if observed is not None:
                                observed.saw(chunk.stream, chunk.data)
                            yield chunk
                finally:
                    if run.result is None:
                        await run.abandon()
                result = run.ended()
                if observed is not None:
                    observed.result = result
                if operation is not None:
                    operation.set(ended=str(result.ended), exit_code=result.exit_code, output_size=result.output_size)
                raise_unless_result(result)


@explained
class AsyncProcess:
    """A command that runs on its own. It survives this client; `async with` cancels it at the end."""

    def __init__(self, run: Run, pid: int = 0, *, stdin_offset: int | None = None) -> None:
        """`stdin_offset`: how much was written to it; None: the agent is asked."""
        self._run = run
        self._stdin = StdinWriter(run, stdin_offset)
        self.pid = pid
        """Process id inside the sandbox; 0 if it was still queued."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._run.exec_id} in {self._run.sandbox_id}>"

    @property
    def exec_id(self) -> str:
        """The command's id."""
        return self._run.exec_id

    @property
    def run(self) -> Run:
        """The command and the calls about it; for this package."""
        return self._run

    async def info(self) -> ExecInfo:
        """How it stands."""
        return exec_info(await self._run.wait(0.0))

    async def poll(self, *, output: bool = True) -> ExecResult | None:
        """Its result if it has ended, else None. With output=False it has no output, and none is read for it."""
        if self._run.result is None:
            found = await self._run.wait(0.0)
            if found.state != exec_pb2.EXEC_STATE_ENDED:
                return None
            if not output:
                return self._bare_result(found)
        return await self._result()

    async def wait(self, timeout: Seconds | None = None, *, check: bool = False) -> ExecResult:
        """Its result with the output, once it has ended.

        Args:
            timeout: how long to wait; the command itself goes on. None: no limit.
            check: raise unless it exited with 0.

        Raises:
            DeadlineExceeded: it has not ended in time. Also a TimeoutError.
            CommandFailed: with check.
            SandboxLost, CommandInterrupted, CommandNotStarted: as exec.
        """
        seconds = None if timeout is None else seconds_of("timeout", timeout)
        if self._run.result is None and (await self._run.wait(seconds)).state != exec_pb2.EXEC_STATE_ENDED:
            raise DeadlineExceeded(f"command {self._run.command!r} has not ended after {seconds} s; it goes on")
        result = await self._result()
        return result.check() if check else result

    async def _result(self) -> ExecResult:
        if self._run.result is None:
            await self._run.collect()
        return raise_unless_result(self._run.ended())

    async def output(self, offset: int = 0, *, follow: bool = True) -> AsyncGenerator[OutputChunk, None]:
        """Its output from the byte at `offset` on, to its end, or with follow=False to what is there now. Any number
        of times.
        """
        reader = Run(
            self._run.transport,
            self._run.background,
            self._run.sandbox_id,
            self._run.exec_id,
            self._run.context,
            self._run.spec,
            self._run.command,
            self._run.observers,
            offset=offset,
        )
        async with aclosing(reader.follow(reader.read_output, follow=follow)) as chunks:
            async for chunk in chunks:
                yield chunk

    def __aiter__(self) -> AsyncIterator[OutputChunk]:
        return self.output()

    async def write(self, data: bytes | str) -> None:
        """Write to its standard input, or type into its terminal; returns when the sandbox has taken all of it, which
        waits for a command that reads slowly. Each byte arrives once, also over broken connections. Start it with
        stdin=True or with tty.

        Raises:
            StdinClosed: it has closed its standard input or has ended, or close_stdin() was called.
            SandboxLost, CommandInterrupted: the platform ended it.
            FailedPrecondition: it takes no input (STDIN_NOT_OPEN).
        """
        try:
            await self._stdin.write(data.encode() if isinstance(data, str) else bytes(data))
        except StdinClosed:
            # What the platform did to it must not look like what it did itself.
            await self._raise_if_interrupted()
            raise

    async def _raise_if_interrupted(self) -> None:
        found = await self._run.wait(0.0)
        if found.state == exec_pb2.EXEC_STATE_ENDED and found.result.ended != exec_pb2.EXEC_END_NOT_STARTED:
            self._bare_result(found)

    def _bare_result(self, found: exec_pb2.Exec) -> ExecResult:
        run, end = self._run, found.result
        command = found.command or run.command
        return raise_unless_result(exec_result(run.exec_id, end, (), command=command, missing=end.dropped_bytes))

    async def close_stdin(self) -> None:
        """End its standard input. A terminal gets ^D. Repeatable."""
        await self._stdin.write(b"", end=True)

    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal.

        Raises:
            FailedPrecondition: it has none (NO_TTY).
        """
        run = self._run
        size = exec_pb2.WindowSize(rows=rows, columns=columns)
        request = exec_service_pb2.ResizePtyRequest(sandbox_id=run.sandbox_id, exec_id=run.exec_id, size=size)
        await run.transport.unary(lambda c: c.exec.ResizePty, request, sandbox_id=run.sandbox_id, context=run.context)

    async def signal(self, number: int | str | signals.Signals, *, leader_only: bool = False) -> None:
        """Send a signal, a number or a name like "TERM", to the whole process tree, or to the command's own process
        alone. Nothing happens if it has ended.
        """
        await self._run.signal(signal_number(number), leader_only=leader_only)

    async def kill(self) -> None:
        """Send KILL to the whole process tree."""
        await self.signal(signals.SIGKILL)

    async def cancel(self) -> None:
        """End it: TERM to the whole tree, KILL after its grace. It ends as `killed`."""
        await self._run.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._run.result is None or self._run.result.ended is ExecEnd.UNKNOWN:
            await self._run.abandon()


async def _fed(run: Run) -> AbstractAsyncContextManager[None]:
    """Within it a command gets its input, where that is written while it runs."""
    if run.input is None:
        return nullcontext()
    await run.start(0.0)
    return feeding(run, run.input)
