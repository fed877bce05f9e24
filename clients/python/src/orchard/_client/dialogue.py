"""A call with requests and answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from orchard._client.runtime import grpc_module
from orchard._client.status import CallFailed, call_failed, parse_failure

if TYPE_CHECKING:
    from orchard._client.transport import CallContext


class Dialogue:
    """One attempt of such a call. One task may send while another receives."""

    def __init__(self, call: Any, context: CallContext) -> None:
        self._call = call
        # What is sent on a call that has just ended can put an error of gRPC's own in the place of its status.
        self._first: list[CallFailed] = []
        call.add_done_callback(self._ended)
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
            failed = call_failed(error, self._context.request_id)
            if not failed.failure.from_platform and self._first:
                failed = self._first[0]
            raise failed from None
        return None if response is self._end else response

    def _ended(self, call: Any) -> None:
        """Keep the status with which the call ended, while it is what the platform said."""
        code = _now(call.code())
        if code is not None and code.name != "OK":
            trailing = {str(key): value for key, value in _now(call.trailing_metadata()) or ()}
            failure = parse_failure(code.name, _now(call.details()) or "", trailing)
            if failure.from_platform:
                self._first.append(CallFailed(failure))


def _now(ready: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for."""
    try:
        ready.send(None)
    except StopIteration as result:
        return result.value
    ready.close()
    return None
