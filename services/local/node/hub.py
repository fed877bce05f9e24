"""Fans changes out to watchers. A slow watcher gets the newest state of each sandbox, never an older one, and holds
nobody up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from services.common.errors import UnavailableError
from services.local.node.model import Record

# Sandboxes that come and go while a watcher does not read; past that it starts over with a fresh snapshot.
_MOST_PENDING: Final = 100_000


class Subscription:
    """What one watcher has not read yet, by uid, oldest first."""

    def __init__(self, snapshot: Iterable[Record]) -> None:
        self._pending = {record.uid: record for record in snapshot}
        self._some = asyncio.Event()
        self._over: UnavailableError | None = None
        self._some.set()

    def put(self, record: Record) -> None:
        """Note a change."""
        self._pending.pop(record.uid, None)
        if len(self._pending) >= _MOST_PENDING:
            self.end(UnavailableError("the watcher was too slow; watch again", reason="WATCH_OVERRUN"))
            self._pending.clear()
        self._pending[record.uid] = record
        self._some.set()

    def end(self, why: UnavailableError) -> None:
        """Let the next `take` raise."""
        self._over = why
        self._some.set()

    def take(self) -> list[Record]:
        """All that is pending.

        Raises:
            UnavailableError: the watcher was too slow, or the daemon stops.
        """
        if self._over is not None:
            raise self._over
        taken = list(self._pending.values())
        self._pending.clear()
        self._some.clear()
        return taken

    async def batches(self, quiet_seconds: float) -> AsyncIterator[list[Record]]:
        """Changes as they come; an empty batch after every `quiet_seconds` without one."""
        while True:
            try:
                async with asyncio.timeout(quiet_seconds):
                    await self._some.wait()
            except TimeoutError:
                yield []
            else:
                yield self.take()


class Hub:
    """All watchers."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()

    def publish(self, record: Record) -> None:
        """Tell every watcher of a change."""
        for subscription in self._subscriptions:
            subscription.put(record)

    @contextmanager
    def subscribe(self, snapshot: Iterable[Record]) -> Iterator[Subscription]:
        """A subscription that begins with `snapshot`. Taken in one turn of the event loop, nothing falls between the
        two.
        """
        subscription = Subscription(snapshot)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def close(self) -> None:
        """End every watch: the daemon stops."""
        for subscription in self._subscriptions:
            subscription.end(UnavailableError("the node daemon stops; watch again", reason="SERVER_STOPPING"))
