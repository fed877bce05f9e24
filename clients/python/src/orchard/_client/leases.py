"""Heartbeats: one task renews every kept sandbox of a client, a thousand a call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from typing import Final

from orchard._client import errors
from orchard._client.runtime import leak
from orchard._client.transport import Transport
from orchard.sandbox.v1 import sandbox_service_pb2

_log: Final = logging.getLogger("orchard")
_BATCH: Final = 1000


class Heartbeats:
    """Renews sandboxes four times within the shortest of their timeouts, as long as the event loop runs."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._timeouts: dict[str, float] = {}
        self._requests: dict[str, str] = {}
        self._new: set[str] = set()
        self._added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, sandbox_id: str, request_id: str, timeout: float) -> None:
        """Keep a sandbox whose heartbeat timeout is `timeout` seconds; `request_id` is of its create, if known."""
        self._timeouts[sandbox_id] = timeout
        self._requests[sandbox_id] = request_id
        self._new.add(sandbox_id)
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop() is not loop:
            self._added = asyncio.Event()
            self._task = loop.create_task(self._run(), name="orchard heartbeats")
        self._added.set()

    def remove(self, sandbox_id: str, request_id: str = "") -> None:
        """Stop keeping a sandbox: whichever has the id, or only the one that this create made."""
        if not request_id or self._requests.get(sandbox_id) in ("", request_id):
            self._timeouts.pop(sandbox_id, None)
            self._requests.pop(sandbox_id, None)

    def forget(self) -> None:
        """Stop keeping anything."""
        self._timeouts, self._requests = {}, {}
        task, self._task = self._task, None
        if task is not None and not task.get_loop().is_closed():
            task.cancel()

    def after_fork(self) -> None:
        """In a forked child: heartbeats are the parent's."""
        leak(self._task)
        self._timeouts, self._requests, self._task = {}, {}, None

    async def _run(self) -> None:
        round_at = time.monotonic()
        while self._timeouts:
            now = time.monotonic()
            period = min(self._timeouts.values()) / 4
            if now >= round_at:
                due, round_at = set(self._timeouts), now + period
            else:
                # What was added since: of a burst of creates each is renewed once, not as often as there are creates.
                due, round_at = self._new & self._timeouts.keys(), min(round_at, now + period)
            self._new.clear()
            self._added.clear()
            if not await self._renew(due):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(round_at - time.monotonic()):
                    await self._added.wait()

    async def _renew(self, sandbox_ids: Collection[str]) -> bool:
        """Renew some; False if the client was closed."""
        try:
            for missing in await self.beat(list(sandbox_ids)):
                # One that was added meanwhile may have been made anew under its id.
                if missing not in self._new:
                    _log.warning("sandbox %s is no longer alive", missing)
                    self.remove(missing)
        except errors.ClientClosed:
            return False
        except errors.OrchardError as error:
            _log.warning("heartbeat failed, will be repeated: %s", error)
        return True

    async def beat(self, sandbox_ids: Sequence[str]) -> list[str]:
        """Renew sandboxes once; returns the ids that are not alive."""
        missing: list[str] = []
        for start in range(0, len(sandbox_ids), _BATCH):
            response = await self._transport.unary(
                lambda c: c.sandbox.Heartbeat,
                sandbox_service_pb2.HeartbeatRequest(sandbox_ids=sandbox_ids[start : start + _BATCH]),
                timeout=10.0,
            )
            missing.extend(response.missing_sandbox_ids)
        return missing
