"""What a call is told to have ended with, where gRPC's own error of what was still sent comes over its status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from orchard._client.ending import Ending

from services.common import errors as platform

HIDING = grpc.aio.AioRpcError(
    grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "Internal error from Core"
)


class Call:
    """Ends once, and tells whoever wants to know, as grpc.aio's calls do."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], None]] = []
        self._status: tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def end(self, code: grpc.StatusCode, details: str = "", *trailing: tuple[str, str | bytes]) -> None:
        self._status = (code, details, trailing)
        for callback in self._callbacks:
            callback(self)

    async def code(self) -> grpc.StatusCode:
        return self._status[0]

    async def details(self) -> str:
        return self._status[1]

    async def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._status[2]


def test_a_refusal_is_told_though_something_was_still_sent() -> None:
    call = Call()
    ending = Ending(call)
    refusal = platform.AlreadyExistsError("it exists already", reason="FILE_EXISTS")
    details = ("grpc-status-details-bin", refusal.to_status().SerializeToString())
    call.end(grpc.StatusCode.ALREADY_EXISTS, refusal.message, details)
    failure = ending.failed(HIDING, "req-1").failure
    assert (failure.code, failure.reason, failure.is_transient) == ("ALREADY_EXISTS", "FILE_EXISTS", False)


@pytest.mark.parametrize(
    "ended",
    [(grpc.StatusCode.OK,), (grpc.StatusCode.UNAVAILABLE, "Socket closed"), None],
    ids=["well", "cut", "not yet"],
)
def test_what_the_platform_did_not_say_is_a_connection_that_broke(ended: tuple[Any, ...] | None) -> None:
    call = Call()
    ending = Ending(call)
    if ended is not None:
        call.end(*ended)
    failure = ending.failed(HIDING, "req-1").failure
    assert (failure.code, failure.is_transient, failure.may_have_acted) == ("INTERNAL", True, True)
