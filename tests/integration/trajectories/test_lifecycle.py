"""Create, append, seal, read and follow over gRPC."""

import asyncio
import hashlib

import grpc
import psycopg
import pytest
from orchard.trajectory.v1 import trajectory_pb2, trajectory_service_pb2

from services.common.errors import STATUS_DETAILS_KEY
from services.trajectories.packing import frame, pack
from services.trajectories.store.tables import SCHEMA
from tests.integration.trajectories.conftest import Calls, step, steps


def reason_of(error: grpc.aio.AioRpcError) -> str:
    from google.rpc import error_details_pb2, status_pb2

    trailing = dict(error.trailing_metadata() or ())
    info = error_details_pb2.ErrorInfo()
    for detail in status_pb2.Status.FromString(trailing[STATUS_DETAILS_KEY]).details:
        if detail.Unpack(info):
            return info.reason
    raise AssertionError("no ErrorInfo")


async def fails(awaitable) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code(), reason_of(caught.value)


async def test_steps_come_back_as_they_were_appended(calls: Calls) -> None:
    await calls.create("one", model="m", tools_json='[{"type": "function"}]', labels={"a": "b"})
    sent = [
        step(0, "do it", trajectory_pb2.ROLE_SYSTEM),
        step(1, "", trajectory_pb2.ROLE_USER, name="user"),
        step(
            2,
            reasoning="hm",
            tool_calls=[{"call_id": "c", "name": "bash", "arguments": '{"cmd": "ls"}'}],
            model_call={
                "prompt_tokens": 10,
                "completion_tokens": 3,
                "completion_token_ids": [1, 2, 3],
                "logprobs": [-1, -2, -3],
            },
        ),
        step(3, "\x00bytes \u00e9 \U0001f333", trajectory_pb2.ROLE_TOOL, tool_call_id="c", parent=2),
    ]
    assert await calls.append("one", sent[:2]) == 2
    assert await calls.append("one", sent[2:]) == 4
    assert await calls.read("one") == sent
    found = (await calls.get("one")).trajectory
    assert (found.totals.steps, found.totals.turns, found.totals.prompt_tokens) == (4, 1, 10)
    assert found.tools_json == '[{"type": "function"}]'
    await calls.seal("one", expected_steps=4)
    packed = await calls.packed("one")
    assert (
        packed.content_hash
        == hashlib.sha256(b"".join(frame(s.SerializeToString(deterministic=True)) for s in sent)).hexdigest()
    )
    assert await calls.read("one") == sent
    assert await calls.read("one", 3) == sent[3:]


async def test_a_create_repeated_is_the_same_and_another_is_refused(calls: Calls) -> None:
    first = await calls.create("one", model="m", labels={"a": "1", "b": "2"})
    assert await calls.create("one", model="m", labels={"b": "2", "a": "1"}) == first
    assert await fails(calls.create("one", model="other")) == (grpc.StatusCode.ALREADY_EXISTS, "TRAJECTORY_EXISTS")
    assert (await calls.create("")).trajectory_id != (await calls.create("")).trajectory_id


async def test_appends_are_idempotent_and_leave_no_hole(calls: Calls) -> None:
    await calls.create("one")
    assert await calls.append("one", steps(3)) == 3
    assert await calls.append("one", steps(3)) == 3
    assert await calls.append("one", steps(5)) == 5
    assert await calls.append("one", steps(2, first=1), steps(3, first=3)) == 6
    assert await fails(calls.append("one", steps(1, first=8))) == (grpc.StatusCode.FAILED_PRECONDITION, "STEP_GAP")
    assert await fails(calls.append("one", [step(4, "other")])) == (grpc.StatusCode.ABORTED, "STEP_CONFLICT")
    assert await fails(calls.append("none", steps(1))) == (grpc.StatusCode.NOT_FOUND, "TRAJECTORY_NOT_FOUND")
    assert [found.index for found in await calls.read("one")] == list(range(6))


async def test_of_two_writers_one_wins_until_the_other_takes_over(calls: Calls) -> None:
    await calls.create("one")
    await calls.append("one", steps(1), writer="first")
    refused = (grpc.StatusCode.ABORTED, "WRITER_CONFLICT")
    assert await fails(calls.append("one", steps(1, first=1), writer="second")) == refused
    assert await calls.append("one", steps(1, first=1), writer="second", take_over=True) == 2
    assert await fails(calls.append("one", steps(1, first=2), writer="first")) == refused


async def test_many_writers_at_once_on_one_trajectory_leave_one_sequence(calls: Calls) -> None:
    await calls.create("one")

    async def write(writer: str) -> bool:
        try:
            await calls.append("one", [step(0, writer)], writer=writer)
        except grpc.aio.AioRpcError as error:
            assert reason_of(error) in ("WRITER_CONFLICT", "STEP_CONFLICT")
            return False
        return True

    won = await asyncio.gather(*(write(f"writer-{number}") for number in range(30)))
    assert sum(won) == 1
    assert len(await calls.read("one")) == 1


async def test_a_sealed_trajectory_takes_no_steps(calls: Calls) -> None:
    await calls.create("one")
    await calls.append("one", steps(2))
    assert await fails(calls.seal("one", expected_steps=3)) == (grpc.StatusCode.FAILED_PRECONDITION, "STEPS_MISSING")
    sealed = await calls.seal("one", trajectory_pb2.TRAJECTORY_STATUS_FAILED, message="step limit")
    assert (sealed.status, sealed.status_message) == (trajectory_pb2.TRAJECTORY_STATUS_FAILED, "step limit")
    again = await calls.seal("one", trajectory_pb2.TRAJECTORY_STATUS_FAILED)
    assert again.seal_time == sealed.seal_time
    other = (grpc.StatusCode.FAILED_PRECONDITION, "TRAJECTORY_SEALED")
    assert await fails(calls.seal("one", trajectory_pb2.TRAJECTORY_STATUS_COMPLETED)) == other
    assert await fails(calls.append("one", steps(1, first=2))) == other


async def test_a_sealed_trajectory_that_is_being_packed_holds_up_nobodys_appends(calls: Calls) -> None:
    for name in ("sealed", "open"):
        await calls.create(name)
        await calls.append(name, steps(1))
    await calls.seal("sealed")
    await calls.packed("sealed")
    with psycopg.connect(calls.process.database) as packer:
        packer.execute(f"SELECT FROM {SCHEMA}.trajectories WHERE trajectory_id = 'sealed' FOR UPDATE")
        late = [asyncio.ensure_future(fails(calls.append("sealed", steps(1, first=1)))) for _ in range(20)]
        assert await calls.append("open", steps(1, first=1)) == 2
        sealed = (grpc.StatusCode.FAILED_PRECONDITION, "TRAJECTORY_SEALED")
        assert await asyncio.gather(*late) == [sealed] * 20
        packer.rollback()


async def test_followers_see_every_step_once_and_end_with_the_seal(calls: Calls) -> None:
    await calls.create("one")
    await calls.append("one", steps(3))
    request = trajectory_service_pb2.ReadStepsRequest(trajectory_id="one", follow=True)
    seen: list[int] = []
    arrived = asyncio.Condition()

    async def follow() -> None:
        async for response in calls.ReadSteps(request):
            async with arrived:
                seen.extend(found.index for found in response.steps)
                arrived.notify_all()

    async def until(count: int) -> None:
        async with asyncio.timeout(110), arrived:
            await arrived.wait_for(lambda: len(seen) >= count)

    task = asyncio.create_task(follow())
    await until(3)
    for first in range(3, 9):
        await calls.append("one", steps(1, first=first))
        await until(first + 1)
    await calls.seal("one")
    await asyncio.wait_for(task, 110)
    assert seen == list(range(9))


async def test_what_is_made_under_the_id_of_a_deleted_one_is_not_what_is_followed(calls: Calls) -> None:
    for name, count in (("one", 2), ("two", 3)):
        await calls.create(name)
        await calls.append(name, steps(count))
    seen: list[int] = []
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for response in calls.ReadSteps(
            trajectory_service_pb2.ReadStepsRequest(trajectory_id="one", follow=True)
        ):
            seen += [found.index for found in response.steps]
            if len(seen) == 2 and response.steps:
                # At once, so that nobody finds none.
                with psycopg.connect(calls.process.database) as connection:
                    connection.execute(f"DELETE FROM {SCHEMA}.trajectories WHERE trajectory_id = 'one'")
                    connection.execute(
                        f"UPDATE {SCHEMA}.trajectories SET trajectory_id = 'one' WHERE trajectory_id = 'two'"
                    )
            assert len(seen) <= 2
    assert (raised.value.code(), reason_of(raised.value)) == (grpc.StatusCode.NOT_FOUND, "TRAJECTORY_NOT_FOUND")


async def test_another_tenant_sees_nothing(calls: Calls) -> None:
    await calls.create("one")
    await calls.append("one", steps(1))
    other = calls.of("other")
    missing = (grpc.StatusCode.NOT_FOUND, "TRAJECTORY_NOT_FOUND")
    assert await fails(other.get("one")) == missing
    assert await fails(other.append("one", steps(1))) == missing
    assert await fails(other.seal("one")) == missing
    await other.create("one", model="theirs")
    assert (await calls.get("one")).trajectory.totals.steps == 1


async def test_many_large_steps_are_read_in_batches_from_rows_and_from_the_object(calls: Calls) -> None:
    await calls.create("one")
    sent = [step(index, f"{index} " * 9000) for index in range(120)]
    for start in range(0, 120, 20):
        await calls.append("one", sent[start : start + 10], sent[start + 10 : start + 20])
    assert await calls.read("one") == sent
    await calls.seal("one")
    await calls.packed("one")
    for first in (0, 1, 59, 119, 120, 500):
        assert await calls.read("one", first) == sent[first:]


async def test_a_large_text_becomes_a_body(calls: Calls) -> None:
    await calls.create("one")
    text = "grün " * 20_000
    await calls.append("one", [step(0, text)])
    await calls.append("one", [step(0, text)])
    (found,) = await calls.read("one")
    blob = found.content[0].blob
    assert (blob.media_type, blob.size) == ("text/plain", len(text.encode()))
    request = trajectory_service_pb2.GetBlobRequest(sha256=blob.sha256)
    assert b"".join([piece.data async for piece in calls.GetBlob(request)]) == text.encode()
    assert (await calls.get("one")).trajectory.totals.text_bytes == len(text.encode())


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (trajectory_pb2.Step(index=0), "steps[0].role"),
        (step(0, parent=0), "steps[0].parent"),
        (step(-1), "steps[-1].index"),
        (step(0, role=trajectory_pb2.ROLE_USER, tool_calls=[{"name": "x"}]), "steps[0].tool_calls"),
        (trajectory_pb2.Step(index=0, role=2, content=[{}]), "steps[0].content[0]"),
        (trajectory_pb2.Step(index=0, role=2, content=[{"blob": {"sha256": "x"}}]), "steps[0].content[0].blob.sha256"),
        (step(0, extra_json="[1]"), "steps[0].extra_json"),
        (step(0, extra_json='{"a": NaN}'), "steps[0].extra_json"),
        (step(0, model_call={"logprobs": [1]}), "steps[0].model_call.logprobs"),
        (step(0, model_call={"cost_usd": float("nan")}), "steps[0].model_call.cost_usd"),
        (step(0, model_call={"cost_usd": float("inf")}), "steps[0].model_call.cost_usd"),
        (step(0, model_call={"prompt_tokens": 2**63 - 1, "completion_tokens": 1}), "steps[0].model_call.prompt_tokens"),
    ],
)
async def test_bad_steps_are_refused_by_field(calls: Calls, message: trajectory_pb2.Step, field: str) -> None:
    await calls.create("one")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calls.append("one", [message])
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in caught.value.details()
    assert await calls.read("one") == []


@pytest.mark.parametrize("damage", ["cut", "changed", "shorter", "empty"])
async def test_a_damaged_object_never_reads_as_a_shorter_trajectory(calls: Calls, damage: str) -> None:
    for name in ("well", "damaged"):
        await calls.create(name)
        await calls.append(name, steps(50))
        await calls.seal(name)
        await calls.packed(name)
    with psycopg.connect(calls.process.database) as connection:
        query = f"SELECT object_name FROM {SCHEMA}.trajectories WHERE trajectory_id = 'damaged'"
        ((object_name,),) = connection.execute(query).fetchall()
    path = calls.process.folder / "objects" / object_name
    packed = path.read_bytes()
    kept = [one.SerializeToString(deterministic=True) for one in steps(40)]
    changed = packed[:-1] + bytes([packed[-1] ^ 1])
    path.write_bytes({"cut": packed[:-9], "changed": changed, "shorter": pack(kept)[0], "empty": b""}[damage])

    async def export(*names: str) -> list[trajectory_service_pb2.ExportTrajectoriesResponse]:
        request = trajectory_service_pb2.ExportTrajectoriesRequest(filter={"trajectory_ids": names})
        return [response async for response in calls.ExportTrajectories(request)]

    damaged = (grpc.StatusCode.INTERNAL, "OBJECT_DAMAGED")
    assert await fails(calls.read("damaged")) == damaged
    assert await fails(calls.read("damaged", 45)) == damaged
    assert await fails(export("damaged")) == damaged
    assert len(await calls.read("well")) == 50
    assert sum(len(response.steps) for response in await export("well")) == 50
    path.write_bytes(packed)
    assert await calls.read("damaged") == steps(50)
