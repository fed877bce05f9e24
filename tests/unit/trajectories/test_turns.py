"""What a large message costs is not taken from the event loop at once: others have their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from orchard.trajectory.v1 import trajectory_pb2
from orchard.trajectory.v1 import trajectory_service_pb2 as pb

from services.common.objects import ObjectStore
from services.trajectories.bodies import Bodies
from services.trajectories.servicer_steps import TURN_STEPS, new_steps
from services.trajectories.servicer_wholes import new_whole

ROUNDS = 20


@pytest.fixture
def bodies(tmp_path: Any) -> Bodies:
    """None is asked for: every text is small."""
    return Bodies(None, ObjectStore(f"file://{tmp_path}"), None)  # type: ignore[arg-type]


def _steps(count: int) -> list[trajectory_pb2.Step]:
    return [trajectory_pb2.Step(index=index, role=trajectory_pb2.ROLE_USER) for index in range(count)]


async def _turns_beside(work: Coroutine[Any, Any, Any]) -> int:
    """How often another task has its turn while this one works."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    await work
    beside.cancel()
    return turns


async def test_others_have_their_turn_between_steps(bodies: Bodies) -> None:
    assert await _turns_beside(new_steps(_steps(ROUNDS * TURN_STEPS), "t", bodies)) >= ROUNDS - 1


async def test_others_have_their_turn_between_trajectories(bodies: Bodies) -> None:
    async def several() -> None:
        for number in range(ROUNDS):
            await new_whole(
                pb.NewTrajectory(
                    trajectory={"trajectory_id": f"t{number}"},
                    steps=_steps(3),
                    writer="w",
                    status=trajectory_pb2.TRAJECTORY_STATUS_COMPLETED,
                ),
                "t",
                bodies,
            )

    assert await _turns_beside(several()) >= ROUNDS - 1
