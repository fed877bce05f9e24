"""What waits to be stored of a recording: bounded, and stored behind the program that records."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

from orchard._client.background import Background
from orchard._client.errors import OrchardError, Unavailable
from orchard._client.trajectories.writer import BATCH_BYTES, BATCH_STEPS, AsyncTrajectory, Prepared

_log: Final = logging.getLogger("orchard")
WAITING_BYTES: Final = 64 << 20
WAITING_STEPS: Final = 10_000


class StepBuffer:
    """Steps of one recording on their way. What is taken is stored in order; what finds no room is lost, and counted.

    Args:
        trajectory: where they go.
        background: owns the task that stores them.
        most_bytes: how much may wait.
    """

    def __init__(self, trajectory: AsyncTrajectory, background: Background, *, most_bytes: int = WAITING_BYTES) -> None:
        self._trajectory = trajectory
        self._background = background
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[Prepared, int]] = deque()
        self._bytes = 0
        self._storing: asyncio.Task[None] | None = None
        self._most_at_once = BATCH_STEPS
        self._refused = False
        self.lost = 0
        """Steps that found no room, or that cannot be stored any more."""
        self.error: OrchardError | None = None
        """Why steps are lost, or wait for so long."""

    @property
    def next_index(self) -> int:
        """Index that the next step will have."""
        return self._trajectory.next_index + len(self._waiting)

    def add(self, steps: Sequence[Prepared]) -> None:
        """Take steps, all or none. Nothing is waited for."""
        size = sum(message.ByteSize() + sum(len(body.data) for body in bodies) for message, bodies in steps)
        full = self._bytes + size > self._most_bytes or len(self._waiting) + len(steps) > WAITING_STEPS
        # Behind a step that is missing, what follows would stand for a conversation that never was.
        if self.lost or full:
            if not self.lost:
                self.error = self.error or OrchardError(
                    f"more than {self._most_bytes:,} bytes of steps wait to be stored", reason="RECORDING_BUFFER_FULL"
                )
            self.lost += len(steps)
            return
        for step in steps:
            self._waiting.append((step, size // len(steps)))
        self._bytes += size // len(steps) * len(steps) if steps else 0
        self._start()

    def _start(self) -> None:
        if self._waiting and not self._refused and (self._storing is None or self._storing.done()):
            self._storing = self._background.start(f"record {self._trajectory.trajectory_id}", self._store())

    async def _store(self) -> None:
        while self._waiting:
            batch = self._batch()
            try:
                await self._trajectory.append_prepared([step for step, _size in batch])
            except OrchardError as error:
                if len(batch) > 1 and not isinstance(error, Unavailable):
                    # One of them is refused, and those before it are none the worse for it.
                    self._most_at_once = 1
                    continue
                _log.warning("recording of %s: %s", self._trajectory.trajectory_id, error)
                self.error = error
                # Of what is only away, the next step or the end of the recording tries again.
                if not isinstance(error, Unavailable):
                    self._refused = True
                    self._drop()
                return
            if not self.lost:
                self.error = None
            for _ in batch:
                self._bytes -= self._waiting.popleft()[1]

    def _drop(self) -> None:
        self.lost += len(self._waiting)
        self._waiting.clear()
        self._bytes = 0

    def _batch(self) -> list[tuple[Prepared, int]]:
        batch: list[tuple[Prepared, int]] = []
        size = 0
        for step in self._waiting:
            if batch and (size + step[1] > BATCH_BYTES or len(batch) >= self._most_at_once):
                break
            batch.append(step)
            size += step[1]
        return batch

    async def flush(self) -> None:
        """Return when everything that was added is durable.

        Raises:
            OrchardError: why it is not.
        """
        while self._waiting:
            self._start()
            if self._storing is not None:
                await asyncio.shield(self._storing)
            if self._waiting and self.error is not None:
                raise self.error
        if self.lost and self.error is not None:
            raise self.error

    def stop(self) -> int:
        """Store nothing more; how many steps are lost."""
        if self._storing is not None:
            self._storing.cancel()
        self._drop()
        return self.lost
