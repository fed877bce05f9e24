"""How the platform ended a call that sends requests, where grpc.aio puts an error of its own in its place.

What is sent on a call that has just ended fails, and the error of that (INTERNAL) is written over the status that has
come already: a refusal would read as a connection that broke, and a repeat as one that comes too late.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from orchard._client.status import CallFailed, call_failed, parse_failure


class Ending:
    """Keeps the first status of one call."""

    def __init__(self, call: Any) -> None:
        self._first: CallFailed | None = None
        call.add_done_callback(self._ended)

    def failed(self, error: Any, request_id: str) -> CallFailed:
        """What to raise for gRPC's own error of the call, which carried this request id."""
        failed = call_failed(error, request_id)
        return failed if failed.failure.from_platform or self._first is None else self._first

    def _ended(self, call: Any) -> None:
        code = _now(call.code())
        if code is not None and code.name != "OK":
            trailing = {str(key): value for key, value in _now(call.trailing_metadata()) or ()}
            failure = parse_failure(code.name, _now(call.details()) or "", trailing)
            if failure.from_platform:
                self._first = CallFailed(failure)


def _now(ready: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for; awaited it would come after the status is replaced."""
    try:
        ready.send(None)
    except StopIteration as result:
        return result.value
    ready.close()
    return None
