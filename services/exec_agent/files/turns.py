"""Calls about the same place, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Final

from services.common.errors import UnavailableError

_PATIENCE_SECONDS: Final = 60.0


class Turns:
    """Who has the turn for what. Calls come from worker threads.

    A client whose connection broke asks again, or looks what became of its call, while the agent may still be at it:
    half a change is no answer.
    """

    def __init__(self, *, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self._changed = threading.Condition()
        self._taken: set[Hashable] = set()

    @contextmanager
    def take(self, what: Hashable) -> Iterator[None]:
        """Around a call about `what`.

        Raises:
            UnavailableError: the one before is stuck (AGENT_BUSY).
        """
        with self._changed:
            if not self._changed.wait_for(lambda: what not in self._taken, self._patience_seconds):
                raise UnavailableError("an earlier call is still at work there; retry", reason="AGENT_BUSY")
            self._taken.add(what)
        try:
            yield
        finally:
            with self._changed:
                self._taken.discard(what)
                self._changed.notify_all()
