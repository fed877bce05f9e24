"""What a client writes to a command that runs: in order, each byte once, over broken connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from orchard._client import errors
from orchard._client.exec_calls import ExecCalls
from orchard.exec.v1 import exec_pb2, exec_service_pb2

_PIECE_BYTES: Final = 64 << 10


class StdinWriter:
    """Writes one command's input. Writes that are asked for together go one after the other."""

    def __init__(self, run: ExecCalls, offset: int | None) -> None:
        """`offset` is where the next byte goes; None: the agent is asked."""
        self._run = run
        self._offset = offset
        self._order = asyncio.Lock()

    async def write(self, data: bytes, *, end: bool = False) -> None:
        """Write bytes; returns when the sandbox has taken them all. `end`: nothing follows.

        Raises:
            StdinClosed: the command takes no more.
        """
        async with self._order:
            rest, offset = memoryview(data), self._offset
            # Until this write has come to its end nobody knows how much of it was taken: then the agent is asked, by an
            # empty write, behind which nothing more is taken of those before it.
            self._offset = None
            if offset is None:
                offset = (await self._send(0, rest[:0], end=False)).offset
            while rest or end:
                state = await self._send(offset, rest, end=end)
                # It answers early where the command reads nothing for long.
                rest = rest[state.offset - offset :]
                offset = state.offset
                if not rest and (not end or state.closed):
                    break
            self._offset = offset

    async def _send(self, offset: int, data: memoryview, *, end: bool) -> exec_pb2.StdinState:
        run, retry = self._run, self._run.transport.retry()
        begin_at: int | None = None

        async def requests() -> AsyncIterator[exec_service_pb2.WriteStdinRequest]:
            nonlocal begin_at
            if begin_at is None:
                begin_at = offset
            else:
                # Not all of it once more, where it is longer than what a connection lives for.
                taken = max(offset, (await self.state()).offset)
                if taken > begin_at:
                    retry.succeeded()
                begin_at = taken
            start = exec_service_pb2.WriteStdinStart(exec_id=run.exec_id, offset=begin_at)
            yield exec_service_pb2.WriteStdinRequest(sandbox_id=run.sandbox_id, start=start)
            for begin in range(begin_at - offset, len(data), _PIECE_BYTES):
                yield exec_service_pb2.WriteStdinRequest(data=bytes(data[begin : begin + _PIECE_BYTES]))
            if end:
                yield exec_service_pb2.WriteStdinRequest(end=True)

        response = await run.transport.upload(
            lambda c: c.exec.WriteStdin,
            requests,
            sandbox_id=run.sandbox_id,
            context=run.context,
            retry=retry,
        )
        return response.state

    async def state(self) -> exec_pb2.StdinState:
        """How far its input is."""
        run = self._run
        request = exec_service_pb2.GetStdinRequest(sandbox_id=run.sandbox_id, exec_id=run.exec_id)
        response = await run.transport.unary(
            lambda c: c.exec.GetStdin, request, sandbox_id=run.sandbox_id, context=run.context
        )
        return response.state


@asynccontextmanager
async def feeding(run: ExecCalls, data: bytes) -> AsyncIterator[None]:
    """Write a started command's whole input while its output is read within.

    A command need not read it. When it cannot be written for another reason the command is ended, and this raises it.
    """
    failures: list[errors.OrchardError] = []
    writer = StdinWriter(run, 0)

    async def feed() -> None:
        try:
            await writer.write(data, end=True)
        except (errors.StdinClosed, errors.ExecExpired, errors.ExecNotFound):
            return  # whoever reads its output is told what became of it
        except errors.OrchardError as error:
            failures.append(error)
            await run.abandon()

    task = asyncio.get_running_loop().create_task(feed(), name=f"input of {run.exec_id}")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    if failures:
        raise failures[0]


async def check_takes_input(run: ExecCalls) -> None:
    """Before a command is started that is written to or has a terminal: agents that know neither would run it without.

    Raises:
        Unimplemented: the sandbox's agent is such a one, or its gateway.
    """
    try:
        await StdinWriter(run, 0).state()
    except errors.Unimplemented as error:
        raise errors.Unimplemented(
            "the sandbox's agent is of an earlier version, or its gateway: it knows neither input while a command runs"
            " nor terminals; make a new sandbox, or give at most 512 KiB of input",
            reason=error.reason,
            request_id=error.request_id,
        ) from error
    except (errors.Unavailable, errors.SandboxNotFound):
        raise
    except errors.OrchardError:
        return  # it knows no such command yet; what else is wrong the start says better
