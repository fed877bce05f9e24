"""How a call's peer ended it, where grpc.aio would put an error of its own in its place.

A peer may end a call before it has read every request. When grpc.aio then fails to send the next one it writes INTERNAL
over the status that it has had already (16 of 20,000 refused uploads, grpcio 1.85): nobody would learn what it was.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio


@contextmanager
def peer_status(call: Any) -> Iterator[None]:
    """Around the wait for a call that streams its requests: raises the error that its peer gave.

    A stream of responses that its peer ended well has no error: all of them have been read by then. The one response of
    a call without such a stream is lost with its status.

    Raises:
        grpc.aio.AioRpcError: the call failed.
    """
    first: list[grpc.aio.AioRpcError] = []
    call.add_done_callback(lambda done: first.append(_error_of(done)))
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INTERNAL or not first:
            raise
        if first[0].code() is not grpc.StatusCode.OK:
            raise first[0] from None
        if not isinstance(call, grpc.aio.StreamStreamCall):
            raise


def _error_of(call: Any) -> grpc.aio.AioRpcError:
    """How a call has ended."""
    return grpc.aio.AioRpcError(
        _now(call.code()),
        _now(call.initial_metadata()),
        _now(call.trailing_metadata()),
        details=_now(call.details()),
        debug_error_string=_now(call.debug_error_string()),
    )


def _now(ready: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for; awaited it would come after the status is replaced."""
    try:
        ready.send(None)
    except StopIteration as result:
        return result.value
    raise RuntimeError("an ended call waits for its status")
