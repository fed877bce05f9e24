"""Fan-out of changes to any number of subscribers, none of which can slow another or lose the latest value.

A subscriber's backlog keeps only the newest value of each key, so it is bounded by the number of keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Generic, Self, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Subscription(Generic[K, V]):
    """One subscriber's backlog; a context manager that ends the subscription."""

    def __init__(self, hub: Hub[K, V], initial: Iterable[tuple[K, V]]) -> None:
        self._hub = hub
        self._pending: dict[K, V] = dict(initial)
        self._changed = asyncio.Event()
        if self._pending:
            self._changed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hub.unsubscribe(self)

    def put(self, key: K, value: V) -> None:
        """Note a change; an older one of the same key is replaced and moves to the end."""
        self._pending.pop(key, None)
        self._pending[key] = value
        self._changed.set()

    def wake(self) -> None:
        """Let `next` return although nothing changed."""
        self._changed.set()

    async def next(self, timeout_seconds: float) -> list[V]:
        """The changes since the last call, oldest first; empty after `timeout_seconds` without one, or when woken."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()
        except TimeoutError:
            return []
        self._changed.clear()
        pending, self._pending = self._pending, {}
        return list(pending.values())


class Hub(Generic[K, V]):
    """Where changes are published."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription[K, V]] = set()

    def subscribe(self, initial: Iterable[tuple[K, V]] = ()) -> Subscription[K, V]:
        """A new subscription that starts with `initial`. Snapshot and subscribe without an await in between."""
        subscription = Subscription(self, initial)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription[K, V]) -> None:
        """Forget a subscription."""
        self._subscriptions.discard(subscription)

    @property
    def subscribed(self) -> bool:
        """Whether anybody listens."""
        return bool(self._subscriptions)

    def publish(self, key: K, value: V) -> None:
        """Tell every subscriber."""
        for subscription in self._subscriptions:
            subscription.put(key, value)

    def wake(self) -> None:
        """Wake every subscriber, for instance since the server stops."""
        for subscription in self._subscriptions:
            subscription.wake()
