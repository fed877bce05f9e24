"""A call with requests and answers at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from orchard._client.ending import Ending
from orchard._client.runtime import grpc_module

if TYPE_CHECKING:
    from orchard._client.transport import CallContext


class Dialogue:
    """One attempt of such a call. One task may send while another receives."""

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
