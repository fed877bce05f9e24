"""Sandboxes on the host's root that are made before anybody asks for one, so that a create only has to claim one.

A spare has everything but what a request says: its agent waits to be told. It is in no journal: what a daemon leaves of
its spares, the next one removes as it removes everything that it does not know.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from services.common.logs import get_logger
from services.local.runtime import claim
from services.local.runtime.removal import RemovalError
from services.local.runtime.steps import StartError
from services.local.runtime.zygote_client import Answer, ZygoteDiedError, ZygoteError

_log = get_logger(__name__)
_FIRST_SECONDS: Final = 1.0
_QUIET_SECONDS: Final = 0.25  # making one in between would slow down whoever makes one after the other
_MOST_PAUSE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Spare:
    """A sandbox that nobody asked for yet."""

    uid: str
    answer: Answer

    def tell(self, fields: Mapping[str, Any]) -> None:
        """Tell its agent what it is.

        Raises:
            OSError: it has ended.
        """
        assert self.answer.claim is not None  # noqa: S101 (what a plan that waits is answered with)
        claim.tell(self.answer.claim, fields)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self.answer.init_fd, self.answer.agent_fd):
            if descriptor is not None:
                os.close(descriptor)
        if self.answer.claim is not None:
            self.answer.claim.close()


class Spares:
    """Keeps up to `count` of them ready."""

    def __init__(self, count: int, make: Callable[[], Awaitable[Spare]]) -> None:
        self._count = count
        self._make = make
        self._ready: deque[Spare] = deque()
        self._reserved: dict[str, Spare] = {}
        self._at_work = 0
        self._changed = asyncio.Event()

    @property
    def ready(self) -> int:
        """How many wait to be claimed."""
        return len(self._ready)

    def reserve(self) -> str | None:
        """The uid of one that is the caller's from now on, if there is one."""
        if not self._ready:
            return None
        spare = self._ready.popleft()
        self._reserved[spare.uid] = spare
        return spare.uid

    def take(self, uid: str) -> Spare | None:
        """The reserved one of this uid; its descriptors are the caller's."""
        return self._reserved.pop(uid, None)

    @contextmanager
    def others_first(self) -> Iterator[None]:
        """No spare is begun as long as a sandbox that somebody waits for is being made."""
        self._at_work += 1
        self._changed.set()
        try:
            yield
        finally:
            self._at_work -= 1
            self._changed.set()

    async def keep_full(self) -> None:
        """Make them, one at a time, while nothing else is being made."""
        if not self._count:
            return
        pause = _FIRST_SECONDS  # the services of the platform start at the same time
        while True:
            await asyncio.sleep(pause)
            await self._room()
            try:
                spare = await self._make()
                self._ready.append(spare)
                _log.debug("spare sandbox ready", uid=spare.uid)
                pause = 0.0
            except (StartError, ZygoteError, ZygoteDiedError, RemovalError, OSError) as error:
                pause = min(_MOST_PAUSE_SECONDS, max(_FIRST_SECONDS, pause * 2))
                _log.warning("no spare sandbox could be made", error=str(error), again_seconds=pause)

    async def _room(self) -> None:
        """Wait until there is room for one, and what was made last has had time to be found ready."""
        while True:
            self._changed.clear()
            if len(self._ready) >= self._count or self._at_work:
                await self._changed.wait()
                continue
            try:
                async with asyncio.timeout(_QUIET_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                return

    def drain(self) -> list[Spare]:
        """All that nobody claimed; they are the caller's to remove."""
        left = [*self._ready, *self._reserved.values()]
        self._ready.clear()
        self._reserved.clear()
        return left
