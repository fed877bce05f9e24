"""Bytes of the judgements that are held at once: trajectories come in faster than judges read them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from services.common.errors import ResourceExhaustedError

_PATIENCE_SECONDS: Final = 30.0


class Held:
    """Room for what all calls hold together.

    Args:
        most: bytes, as they were sent.
        patience_seconds: how long a sender waits of whom nothing is judged yet.
    """

    def __init__(self, most: int, *, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        self._most = most
        self._patience = patience_seconds
        self._changed = asyncio.Event()
        self.bytes = 0
        """Held now."""

    @contextmanager
    def share(self) -> Iterator[Share]:
        """What one call holds; it is free again when the context ends."""
        share = Share(self)
        try:
            yield share
        finally:
            self.give(share.bytes)

    async def take(self, share: Share, count: int) -> None:
        """Room for one share; see Share.take."""
        until: float | None = None
        while self.bytes + count > self._most:
            # What is being judged becomes free; what is only half there may wait for ours as we wait for theirs.
            if share.judging:
                until = None
            elif until is None:
                until = asyncio.get_running_loop().time() + self._patience
            try:
                async with asyncio.timeout_at(until):
                    await self._changed.wait()
            except TimeoutError:
                raise ResourceExhaustedError(
                    f"the judgements under way hold {self.bytes >> 20:,} of {self._most >> 20:,} MiB; retry later",
                    reason="TOO_MANY_JUDGEMENTS",
                    limit=self._most,
                ) from None
        self.bytes += count

    def give(self, count: int) -> None:
        """Make room."""
        self.bytes -= count
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Share:
    """What one call holds. `judging`: the part of it that is whole and is judged."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self.bytes = 0
        self.judging = 0

    async def take(self, count: int) -> None:
        """Hold more. Where there is no room the sender waits: as long as anything of its own is judged, else a while.

        Raises:
            ResourceExhaustedError: no room in all that time.
        """
        await self._held.take(self, count)
        self.bytes += count

    def whole(self, count: int) -> None:
        """So many bytes of it are judged from now on."""
        self.judging += count

    def judged(self, count: int) -> None:
        """They are not needed any more."""
        self.judging -= count
        self.bytes -= count
        self._held.give(count)
