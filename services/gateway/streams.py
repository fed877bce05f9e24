"""Streams of responses that a stopping gateway ends instead of letting them be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from services.common.errors import UnavailableError

if TYPE_CHECKING:
    import grpc.aio

    Context = grpc.aio.ServicerContext[Any, Any]


class OpenStreams:
    """The calls to services behind the gateway from which it passes responses on."""

    def __init__(self) -> None:
        self._calls: set[Any] = set()
        self._stopping = False

    def end(self) -> None:
        """The server stops: end every stream with UNAVAILABLE, also those that begin now."""
        self._stopping = True
        for call in list(self._calls):
            call.cancel()

    @contextlib.contextmanager
    def ending(self, call: Any, context: Context) -> Iterator[None]:
        """Around the reads of one stream; its call is cancelled at the end whatever happens."""
        self._calls.add(call)
        if self._stopping:
            call.cancel()
        try:
            yield
        except asyncio.CancelledError:
            if self._stopping and not context.cancelled():
                raise UnavailableError("the gateway stops; start another stream", reason="SERVER_STOPPING") from None
            raise
        finally:
            self._calls.discard(call)
            call.cancel()
