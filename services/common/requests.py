"""Streams of requests whose client must keep sending: one that fell silent would hold its place for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, Final, Protocol

from services.common.errors import DeadlineExceededError

IDLE_SECONDS: Final = 120.0
"""Silence after which a stream of requests ends: far above the pauses of a slow network or of a busy client."""
ANSWER_SECONDS: Final = 900.0
"""What a call with one answer may take from its last request on."""


class Stopping(Protocol):
    """Knows whether the server has given its calls up."""

    given_up: bool


def idle_error(seconds: float) -> DeadlineExceededError:
    """The end of a call whose client fell silent for `seconds`."""
    return DeadlineExceededError(
        f"no message came for {seconds:g} s; send the stream without long pauses and end it",
        reason="STREAM_IDLE",
        idle_seconds=f"{seconds:g}",
    )


class Upload(AsyncIterator[Any]):
    """The requests of a call with one answer: each gives the whole call another `idle_seconds`.

    The limit lies around the handler and not around one read, so that a handler that hangs elsewhere ends too.
    """

    def __init__(
        self, requests: AsyncIterable[Any], limit: asyncio.Timeout, idle_seconds: float, stopping: Stopping
    ) -> None:
        self._requests = aiter(requests)
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._stopping = stopping
        self._loop = asyncio.get_running_loop()
        self.ended = False
        """Whether the client has sent everything."""
        self._extend(idle_seconds)

    async def __anext__(self) -> Any:
        try:
            request = await anext(self._requests)
        except StopAsyncIteration:
            self.ended = True
            self._extend(ANSWER_SECONDS)
            raise
        self._extend(self._idle_seconds)
        return request

    def _extend(self, seconds: float) -> None:
        # A call that is over has no limit to move: what passes messages on may read one more.
        if not self._stopping.given_up:
            with contextlib.suppress(RuntimeError):
                self._limit.reschedule(self._loop.time() + seconds)


class Dialogue(AsyncIterator[Any]):
    """The requests of a call with a stream of answers: silence counts only while nothing is said either way."""

    def __init__(self, requests: AsyncIterable[Any], idle_seconds: float) -> None:
        self._requests = aiter(requests)
        self._idle_seconds = idle_seconds
        self._loop = asyncio.get_running_loop()
        self._limit: asyncio.Timeout | None = None
        self.idle = False
        """Whether it was given up for silence; a handler that passes requests on sees only its own call cancelled."""

    def touch(self) -> None:
        """An answer goes out."""
        if self._limit is not None:
            # Of a read that is being given up already, nothing can be moved.
            with contextlib.suppress(RuntimeError):
                self._limit.reschedule(self._loop.time() + self._idle_seconds)

    async def __anext__(self) -> Any:
        # Around the read itself: a task of its own would cost more than all else that a message takes here.
        try:
            async with asyncio.timeout(self._idle_seconds) as limit:
                self._limit = limit
                return await anext(self._requests)
        except TimeoutError:
            if not limit.expired():
                raise
            self.idle = True
            raise idle_error(self._idle_seconds) from None
        finally:
            self._limit = None
