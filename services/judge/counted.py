"""Values that are there as long as somebody holds them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Counted(Generic[K, V]):
    """One value for each key: made for the first who holds it, and gone with the last."""

    def __init__(self) -> None:
        self._values: dict[K, tuple[V, int]] = {}

    @contextmanager
    def held(self, key: K, make: Callable[[], V]) -> Iterator[V]:
        """The value of a key, for the time of the context; `make` gives the first one."""
        value, count = self._values.get(key) or (make(), 0)
        self._values[key] = value, count + 1
        try:
            yield value
        finally:
            value, count = self._values.pop(key)
            if count > 1:
                self._values[key] = value, count - 1
