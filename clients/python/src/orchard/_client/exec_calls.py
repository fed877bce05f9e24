"""The single calls about one command: its state, signals, its end."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from orchard._client import errors
from orchard._client.background import Background
from orchard._client.calls import CallContext
from orchard._client.pool import Connection
from orchard._client.transport import CALL_SECONDS, Transport
from orchard._client.units import duration
from orchard.exec.v1 import exec_pb2, exec_service_pb2

T = TypeVar("T")

_LONG_WAIT_SECONDS: Final = 60.0
_CANCEL_SECONDS: Final = 10.0


def new_exec_id() -> str:
    """An id that no other command has."""
    return os.urandom(16).hex()


@dataclass(eq=False)
class ExecCalls:
    """The calls about one command of one sandbox."""

    transport: Transport
    background: Background
    sandbox_id: str
    exec_id: str
    context: CallContext

    def unary(
        self,
        method: Callable[[Connection], Callable[..., Awaitable[T]]],
        request: Any,
        *,
        timeout: float = CALL_SECONDS,
    ) -> Awaitable[T]:
        """One idempotent call, repeated while it is UNAVAILABLE."""
        return self.transport.unary(method, request, timeout=timeout, sandbox_id=self.sandbox_id, context=self.context)

    async def wait(self, timeout: float | None) -> exec_pb2.Exec:
        """The command once it has ended, or as it stands after `timeout` seconds (None: no end)."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            seconds = min(_LONG_WAIT_SECONDS, left)
            response = await self.unary(
                lambda c: c.exec.WaitExec,
                exec_service_pb2.WaitExecRequest(
                    sandbox_id=self.sandbox_id, exec_id=self.exec_id, wait=duration("wait", seconds)
                ),
                timeout=CALL_SECONDS + seconds,
            )
            if response.exec.state == exec_pb2.EXEC_STATE_ENDED or left <= seconds:
                return response.exec

    async def signal(self, number: int, *, leader_only: bool) -> None:
        """Send a signal."""
        target = exec_service_pb2.SIGNAL_TARGET_LEADER if leader_only else exec_service_pb2.SIGNAL_TARGET_TREE
        await self.unary(
            lambda c: c.exec.SignalExec,
            exec_service_pb2.SignalExecRequest(
                sandbox_id=self.sandbox_id,
                exec_id=self.exec_id,
                signal=number,
                target=target,
                request_id=new_exec_id(),  # its retries send no second one
            ),
        )

    async def cancel(self) -> None:
        """End it, also if it is queued or has not arrived yet."""
        await self.unary(
            lambda c: c.exec.SignalExec,
            exec_service_pb2.SignalExecRequest(sandbox_id=self.sandbox_id, exec_id=self.exec_id, cancel=True),
        )

    async def abandon(self) -> None:
        """Cancel it for a caller that is gone: carried through even if this task is cancelled again; never raises an
        error of its own.
        """
        await self.background.shielded(f"cancel {self.exec_id}", self._cancel_briefly())

    async def _cancel_briefly(self) -> None:
        try:
            async with asyncio.timeout(_CANCEL_SECONDS):
                await self.cancel()
        except (errors.OrchardError, TimeoutError):
            # The sandbox is gone or cannot be reached; there the orphan timeout ends the command.
            return
