"""Fan-out of changes to any number of subscribers, none of which can slow another or lose the latest value.

A subscriber's backlog keeps only the newest value of each key. Where keys come and go without end, it has a bound too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

from services.common.errors import UnavailableError

K = TypeVar("K")
V = TypeVar("V")


class Subscription(Generic[K, V]):
    """One subscriber's backlog; a context manager that ends the subscription."""

    def __init__(self, hub: Hub[K, V], initial: Iterable[tuple[K, V]], most_pending: int | None) -> None:
        self._hub = hub
        self._pending: dict[K, V] = dict(initial)
        self._most_pending = most_pending
        self._over: UnavailableError | None = None
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
        if self._over is not None:
            return
        self._pending.pop(key, None)
        if self._most_pending is not None and len(self._pending) >= self._most_pending:
            self.end(UnavailableError("the reader was too slow; watch again", reason="WATCH_OVERRUN"))
            return
        self._pending[key] = value
        self._changed.set()

    def wake(self) -> None:
        """Let `next` return although nothing changed."""
        self._changed.set()

    def end(self, why: UnavailableError) -> None:
        """Let `next` raise from now on; what is pending is dropped."""
        self._over = why
        self._pending.clear()
        self._changed.set()

    async def next(self, timeout_seconds: float) -> list[V]:
        """The changes since the last call, oldest first; empty after `timeout_seconds` without one, or when woken.

        Raises:
            UnavailableError: it was overrun or ended: what follows is not known without a new snapshot.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()
        # Also after a timeout: a change may have come with it, and an empty answer says that there was none.
        if self._over is not None:
            raise self._over
        self._changed.clear()
        pending, self._pending = self._pending, {}
        return list(pending.values())


class Hub(Generic[K, V]):
    """Where changes are published.

    A subscriber with `most_pending` keys that it has not read is overrun by the next one. None: no bound, for keys that
    are few, or a subscriber that must miss nothing.
    """

    def __init__(self, *, most_pending: int | None = None) -> None:
        self._most_pending = most_pending
        self._subscriptions: set[Subscription[K, V]] = set()

    def subscribe(self, initial: Iterable[tuple[K, V]] = ()) -> Subscription[K, V]:
        """A new subscription that starts with `initial`. Snapshot and subscribe without an await in between."""
        subscription = Subscription(self, initial, self._most_pending)
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

    def end(self, why: UnavailableError) -> None:
        """End every subscription that there is."""
        for subscription in self._subscriptions:
            subscription.end(why)


class Hubs(Generic[K, V]):
    """A hub for each key that somebody waits for: in a burst, a waiter wakes for changes of its own key alone."""

    def __init__(self) -> None:
        self._hubs: dict[K, Hub[K, V]] = {}

    def __len__(self) -> int:
        """How many keys somebody waits for."""
        return len(self._hubs)

    @contextmanager
    def subscribe(self, key: K) -> Iterator[Subscription[K, V]]:
        """Subscribe to one key; the last one that leaves it takes its hub away."""
        hub = self._hubs.setdefault(key, Hub())
        try:
            with hub.subscribe() as changes:
                yield changes
        finally:
            if not hub.subscribed:
                self._hubs.pop(key, None)

    def publish(self, key: K, value: V) -> None:
        """Tell every subscriber of this key."""
        if (hub := self._hubs.get(key)) is not None:
            hub.publish(key, value)

    def wake(self) -> None:
        """Wake every subscriber of every key."""
        for hub in list(self._hubs.values()):
            hub.wake()
