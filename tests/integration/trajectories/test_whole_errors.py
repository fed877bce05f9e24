"""What is said of whole trajectories that are refused: the status reaches its caller, however much is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from orchard.trajectory.v1 import trajectory_pb2
from orchard.trajectory.v1 import trajectory_service_pb2 as pb

from tests.integration.trajectories.conftest import Calls
from tests.integration.trajectories.test_wholes import CODE, named, refused, whole
from tests.support.wire import details

LONG = "i" * (200 << 10)


def _repeated(name: str) -> list[pb.NewTrajectory]:
    return [whole(name, 0) for _ in range(1000)]


MANY: dict[str, Callable[[], list[pb.NewTrajectory]]] = {
    "without ids": lambda: _repeated(""),
    "of one id": lambda: _repeated("a" * 128),
    "of a long id": lambda: [whole(LONG, 0)],
    "of a long id twice": lambda: [whole(LONG, 0), whole(LONG, 0)],
}


async def test_labels_that_are_all_wrong_are_told(calls: Calls) -> None:
    labels = {"\N{GRINNING FACE}" * 80 + str(number): "" for number in range(64)}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calls.create("t", labels=labels)
    assert caught.value.code() is CODE.INVALID_ARGUMENT
    assert "more" in (caught.value.details() or "")
    bad = whole("bad")
    bad.trajectory.labels.update(labels)
    assert named(await refused(calls, CODE.INVALID_ARGUMENT, whole("first"), bad)) == "bad"


@pytest.mark.parametrize("which", MANY)
async def test_ids_that_are_all_wrong_are_told(calls: Calls, which: str) -> None:
    error = await refused(calls, CODE.INVALID_ARGUMENT, *MANY[which]())
    assert "trajectory_id" in (error.details() or "")


async def test_as_much_as_can_be_wrong_in_one_is_told(calls: Calls) -> None:
    await calls.create("t")
    values = [{"index": -1, "name": "no name", "value": float("nan")}] * 10_000
    request = pb.AnnotateTrajectoryRequest(trajectory_id="t", step_values=values)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calls.AnnotateTrajectory(request)
    assert caught.value.code() is CODE.INVALID_ARGUMENT
    assert "step_values[0].index: must not be negative" in (caught.value.details() or "")
    (bad,) = details(caught.value)[error_details_pb2.BadRequest]
    assert 1 <= len(bad.field_violations) < len(values)
    error = await refused(calls, CODE.INVALID_ARGUMENT, whole("first"), whole("bad", step_values=values))
    assert named(error) == "bad"


def _value_beyond() -> dict[str, Any]:
    return {"step_values": [{"index": 7, "name": "value", "value": 1.0}]}


def _no_body() -> dict[str, Any]:
    blob = {"blob": {"sha256": "a" * 64, "size": 1}}
    return {"steps": [trajectory_pb2.Step(role=trajectory_pb2.ROLE_USER, content=[blob])], "step_values": []}


@pytest.mark.parametrize(("name", "fields"), [("7", _value_beyond()), ("step", _no_body()), ("a", _no_body())])
async def test_one_is_named_whatever_its_id_is(calls: Calls, name: str, fields: dict[str, Any]) -> None:
    """Its id may be a word of what is said of it."""
    error = await refused(calls, grpc.StatusCode.FAILED_PRECONDITION, whole("first"), whole(name, **fields))
    assert named(error) == name
    assert repr(name) in (error.details() or "")
