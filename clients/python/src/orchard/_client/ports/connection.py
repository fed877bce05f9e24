"""One local connection and the call that carries it into a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from orchard._client.calls import Dialogue
from orchard._client.errors import Conflict, OrchardError, Unavailable
from orchard._client.status import CallFailed, error_of
from orchard._client.transport import Transport
from orchard.exec.v1 import port_service_pb2

CHUNK_BYTES: Final = 512 << 10
KEEPALIVE_SECONDS: Final = 30.0
"""How often a connection on which nothing is sent gives a sign of life; the platform ends those silent for 2 min."""
_REFUSED_SECONDS: Final = 0.2
_RESET_AT_CLOSE: Final = struct.pack("ii", 1, 0)


class LocalBreak(Exception):  # noqa: N818
    """The program on this machine broke its connection."""


class ForwardedConnection:
    """Carries the bytes of one accepted connection until both sides have ended, or one has broken it."""

    def __init__(
        self, transport: Transport, sandbox_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._reader = reader
        self._writer = writer
        self.sent = 0
        self.received = 0

    async def run(
        self,
        start: port_service_pb2.ForwardPortStart,
        *,
        wait_seconds: float,
        opened: Callable[[], None],
        moved: Callable[[], None],
    ) -> None:
        """Carry it to its end.

        Args:
            start: where to.
            wait_seconds: how long a server that does not listen yet is waited for.
            opened: called when the server has it.
            moved: called whenever bytes went one way or the other.

        Raises:
            LocalBreak: the local program broke it.
            OrchardError: it could not be opened, or the other side or the platform broke it.
        """
        try:
            async with self._open(start, wait_seconds) as dialogue:
                opened()
                await self._carry(dialogue, moved)
        except BaseException as error:
            self.reset()
            if isinstance(error, CallFailed):
                raise error_of(error.failure, sandbox_id=self._sandbox_id) from None
            raise

    @asynccontextmanager
    async def _open(self, start: port_service_pb2.ForwardPortStart, wait_seconds: float) -> AsyncIterator[Dialogue]:
        """A call whose connection is there. Until then nothing was taken from the local program: it can be repeated."""
        retry, until = self._transport.retry(), time.monotonic() + wait_seconds
        while True:
            async with self._transport.dialogue(lambda c: c.port.ForwardPort, self._transport.context()) as dialogue:
                try:
                    await dialogue.send(port_service_pb2.ForwardPortRequest(sandbox_id=self._sandbox_id, start=start))
                    if await dialogue.receive() is None:
                        raise Unavailable("the platform ended a connection before it was open")
                except CallFailed as error:
                    failed = error
                else:
                    self._transport.reached()
                    yield dialogue
                    return
            if failed.failure.reason == "PORT_REFUSED" and time.monotonic() < until:
                await asyncio.sleep(failed.failure.retry_seconds or _REFUSED_SECONDS)
            else:
                await self._transport.pause_or_raise(failed, retry, self._sandbox_id)

    async def _carry(self, dialogue: Dialogue, moved: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        up = loop.create_task(self._up(dialogue, moved), name="forward into the sandbox")
        down = loop.create_task(self._down(dialogue, moved), name="forward out of the sandbox")
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            if up.done():
                up.result()
            await down
        finally:
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _up(self, dialogue: Dialogue, moved: Callable[[], None]) -> None:
        """Ends without an error only when the call is over."""
        make = port_service_pb2.ForwardPortRequest
        while (data := await self._read()) != b"":
            if not await dialogue.send(make(keepalive=True) if data is None else make(data=data)):
                return
            if data is not None:
                self.sent += len(data)
                moved()
        request = make(eof=True)
        while await dialogue.send(request):
            await asyncio.sleep(KEEPALIVE_SECONDS)
            request = make(keepalive=True)

    async def _read(self) -> bytes | None:
        """The next bytes of the local program; none at their end, None if there were none for a while."""
        try:
            async with asyncio.timeout(KEEPALIVE_SECONDS) as limit:
                return await self._reader.read(CHUNK_BYTES)
        except OSError as error:
            # A socket whose other side has gone says ETIMEDOUT, a TimeoutError too.
            if limit.expired():
                return None
            raise LocalBreak(str(error)) from error

    async def _down(self, dialogue: Dialogue, moved: Callable[[], None]) -> None:
        try:
            while (response := await dialogue.receive()) is not None:
                if response.eof:
                    self._writer.write_eof()
                elif response.data:
                    self._writer.write(response.data)
                    await self._writer.drain()
                    self.received += len(response.data)
                    moved()
            self._writer.close()
            await self._writer.wait_closed()
        except OSError as error:
            if isinstance(error, OrchardError):
                raise
            raise LocalBreak(str(error)) from error

    def reset(self) -> None:
        """Break it, so that the local program cannot take it for complete. Can be repeated."""
        # Closed already: asyncio says OSError, uvloop ValueError, or has none any more.
        with contextlib.suppress(OSError, ValueError):
            if sock := self._writer.get_extra_info("socket"):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        self._writer.transport.abort()


def was_reset(error: OrchardError) -> bool:
    """Whether the server inside the sandbox broke the connection, which programs do."""
    return isinstance(error, Conflict) and error.reason == "CONNECTION_RESET"
