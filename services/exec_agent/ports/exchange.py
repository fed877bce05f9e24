"""The agent's half of one connection: a socket of the sandbox on one side, a call of the gateway on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from services.common.errors import AbortedError, OrchardError
from services.common.sockets import Connection

T = TypeVar("T")


class Breakable:
    """Something that waits, and that others can end with an error."""

    def __init__(self) -> None:
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._broken.add_done_callback(lambda done: done.cancelled() or done.exception())

    def end_with(self, error: BaseException) -> None:
        """Raise this wherever it waits, now or later. The first error stays."""
        if not self._broken.done():
            self._broken.set_exception(error)

    async def unless_broken(self, future: asyncio.Future[T]) -> T:
        """The outcome of a future.

        Raises:
            BaseException: what `end_with` was given, if that comes first; the future is cancelled.
        """
        if not self._broken.done():
            both: set[asyncio.Future[Any]] = {future, self._broken}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self._broken.done():
            future.cancel()
            self._broken.result()
        return future.result()


class Exchange(Breakable):
    """Carries bytes both ways until both sides have ended."""

    def __init__(self, connection: Connection, incoming: AsyncIterator[bytes]) -> None:
        """`incoming` is what the call brings. Where it ends, nothing more is sent to the socket; an error of it breaks
        the connection.
        """
        super().__init__()
        self._connection = connection
        self._sending = asyncio.get_running_loop().create_task(self._send(incoming), name="send to a port")
        self._sending.add_done_callback(self._sent)

    async def outgoing(self) -> AsyncIterator[bytes]:
        """What the socket brings; nothing, once, where that ends. It goes on until the other side has ended too.

        Raises:
            AbortedError: the program on the socket's other side broke the connection (CONNECTION_RESET).
            OrchardError: that of `incoming`, or what the exchange was ended with.
        """
        try:
            # A program that answers and closes without having read everything breaks what is still sent to it: what it
            # had said by then is there to read all the same.
            while data := await self.unless_broken(self._connection.receive()):
                yield data
            if not self._sending.done() or self._sending.cancelled() or self._sending.exception() is None:
                yield b""
            await self.unless_broken(self._sending)
        except OSError as error:
            raise AbortedError(
                "the program inside the sandbox broke the connection", reason="CONNECTION_RESET"
            ) from error
        self._connection.close()

    def abandon(self) -> None:
        """Nobody carries it any more: break what is not complete."""
        self._sending.cancel()
        self._connection.reset()

    async def _send(self, incoming: AsyncIterator[bytes]) -> None:
        async for data in incoming:
            await self._connection.send(data)
        self._connection.send_eof()

    def _sent(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), OrchardError):
            self.end_with(error)
