"""What one attempt of a call carries, and the attempts that are streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from orchard._client.ending import Ending
from orchard._client.runtime import grpc_module
from orchard._client.status import CallFailed, call_failed, parse_failure


class CallContext(NamedTuple):
    """What a call carries besides its request."""

    metadata: tuple[tuple[str, str], ...]
    request_id: str


class Stream:
    """The responses of one attempt of a server-streaming call, with failures as CallFailed."""

    def __init__(self, call: Any, context: CallContext, reached: Callable[[], None]) -> None:
        """`reached` is told of the first response."""
        self._call = call
        self._context = context
        self._reached = reached
        self._interrupted = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        reached = False
        try:
            async for response in self._call:
                if not reached:
                    self._reached()
                    reached = True
                yield response
        except grpc_module().aio.AioRpcError as error:
            raise call_failed(error, self._context.request_id) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._interrupted or (task is not None and task.cancelling()):
                raise
            raise CallFailed(parse_failure("UNAVAILABLE", "the stream stalled", {})) from None

    def interrupt(self) -> None:
        """End the stream as if its connection had broken."""
        self._interrupted = True
        self._call.cancel()


class Dialogue:
    """One attempt of a call with requests and answers at once. One task may send while another receives."""

    def __init__(self, call: Any, context: CallContext) -> None:
        self._call = call
        self._ending = Ending(call)
        self._context = context
        self._error: type[Exception] = grpc_module().aio.AioRpcError
        self._end = grpc_module().aio.EOF

    async def send(self, request: Any) -> bool:
        """Send a request; returns once gRPC has taken it, which waits for a slow receiver. False: the call is over, and
        `receive` says how.
        """
        try:
            await self._call.write(request)
        except (self._error, asyncio.InvalidStateError):
            return False
        return True

    async def receive(self) -> Any:
        """The next response; None at the end.

        Raises:
            CallFailed: the call failed.
        """
        try:
            response = await self._call.read()
        except self._error as error:
            raise self._ending.failed(error, self._context.request_id) from None
        return None if response is self._end else response
