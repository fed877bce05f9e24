"""The use case of whole trajectories: several are stored in one transaction, and what one is refused for names it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Final

from services.common.errors import InvalidArgumentError, OrchardError, UnavailableError, Violation
from services.trajectories.model import Status, Whole
from services.trajectories.store.wholes import RefusedError, WholeStore

_AT_ONCE: Final = 1
"""Transactions: each holds a connection to the database for long, and reads and appends need some too."""
_WAITING: Final = 64
"""Calls, each with a message's trajectories in memory."""
_ID_SHOWN: Final = 128
"""Of what is given as an id and may be none: an error reaches its client only if it is short."""


class Wholes:
    """Stores whole trajectories of every tenant."""

    def __init__(self, store: WholeStore, clock: Callable[[], datetime], *, sealed: Callable[[], None]) -> None:
        self._store = store
        self._clock = clock
        self._sealed = sealed
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0

    async def store(self, tenant: str, wholes: Sequence[Whole]) -> list[bool]:
        """Store trajectories; see TrajectoryService.StoreTrajectories. Of each, whether it was sealed before.

        Raises:
            OrchardError: why not the first one that is refused; those before it are durable.
            UnavailableError: also when more wait to be stored than the database keeps up with.
        """
        if self._waiting >= _WAITING:
            raise UnavailableError(
                "more trajectories wait to be stored than the database keeps up with; retry",
                reason="STORE_BACKLOG",
                retry_seconds=1.0,
            )
        self._waiting += 1
        try:
            async with self._turns:
                return await self._up_to_refused(tenant, wholes)
        finally:
            self._waiting -= 1

    async def _up_to_refused(self, tenant: str, wholes: Sequence[Whole]) -> list[bool]:
        try:
            sealed = await self._store.store(tenant, wholes, self._clock()) if wholes else []
        except RefusedError as refused:
            # Nothing was stored of any; those before it are, unless another one among them is refused later on.
            await self._up_to_refused(tenant, wholes[: refused.position])
            with naming(refused.position, wholes[refused.position].trajectory_id):
                raise refused.error from None
        if any(whole.status is not Status.OPEN for whole in wholes):
            self._sealed()
        return sealed


@contextmanager
def naming(position: int, trajectory_id: str) -> Iterator[None]:
    """Whatever is wrong says with which trajectory: a call has many."""
    shown = trajectory_id[:_ID_SHOWN]
    try:
        yield
    except InvalidArgumentError as error:
        violations = [Violation(f"trajectories[{position}].{one.field}", one.description) for one in error.violations]
        named = InvalidArgumentError(violations, reason=error.reason, **{**error.metadata, "trajectory_id": shown})
        named.message = f"trajectory {shown!r}: {named.message}"
        raise named from None
    except OrchardError as error:
        if repr(shown) not in error.message:
            error.message = f"trajectory {shown!r}: {error.message}"
        error.metadata = {**error.metadata, "trajectory_id": shown}
        raise
