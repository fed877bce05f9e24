"""A secret environment goes to the agent of its own create, as often as it takes, and is held in little room."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest
from orchard.sandbox.v1 import (
    sandbox_pb2,
)

from services.common.errors import (
    ResourceExhaustedError,
)
from services.common.states import State
from services.common.tasks import TaskGroup
from services.gateway.couriers import SecretCourier
from tests.integration.gateway.world import BACKSTOP, WHO, agent_at, serving, start_exec, world_and_gateway


async def test_a_secret_goes_to_the_sandbox_its_create_made_and_to_no_other_of_that_id(tmp_path: Path) -> None:
    async with (
        world_and_gateway(tmp_path) as (world, gateway, _server),
        agent_at(world, "u1") as old,
        agent_at(world, "u2") as new,
    ):
        world.records["x"] = sandbox_pb2.Sandbox(request_id="r2", state=sandbox_pb2.SANDBOX_STATE_QUEUED)
        world.tell("x", "u1", State.READY, "r1")
        await gateway.until_seen("x", "u1")
        await gateway.agents.find("t", "x")
        gateway.courier.deliver_later(WHO, "x", "r2", {"S": "1"})
        await asyncio.wait_for(world.asked.wait(), BACKSTOP)
        world.tell("x", "u1", State.DELETED, "r1")
        world.tell("x", "u2", State.STARTING, "r2")
        world.tell("x", "u2", State.READY, "r2")
        await asyncio.wait_for(new.delivered.wait(), BACKSTOP)
        await gateway.until(lambda: not gateway.courier.waiting)
        assert (old.secrets, new.secrets) == ([], [{"S": "1"}])


async def test_a_secret_waits_for_an_agent_that_does_not_answer_yet(tmp_path: Path) -> None:
    async with world_and_gateway(tmp_path) as (world, gateway, _server):
        world.tell("x", "u1", State.READY, "r1")
        gateway.courier.deliver_later(WHO, "x", "r1", {"S": "1"})
        gateway.courier.deliver_later(WHO, "x", "r1", {"S": "2"})
        assert gateway.courier.held == 1
        async with agent_at(world, "u1") as agent:
            await asyncio.wait_for(agent.delivered.wait(), BACKSTOP)
            await gateway.until(lambda: not gateway.courier.waiting)
            assert agent.secrets == [{"S": "2"}]


@pytest.mark.parametrize(
    "record",
    [
        None,
        sandbox_pb2.Sandbox(request_id="other", state=sandbox_pb2.SANDBOX_STATE_QUEUED),
        sandbox_pb2.Sandbox(request_id="r1", state=sandbox_pb2.SANDBOX_STATE_DELETED),
    ],
)
async def test_the_secret_of_a_sandbox_that_ended_in_the_queue_is_let_go(tmp_path: Path, record) -> None:
    async with world_and_gateway(tmp_path) as (world, gateway, _server):
        world.records["x"] = sandbox_pb2.Sandbox(request_id="r1", state=sandbox_pb2.SANDBOX_STATE_QUEUED)
        gateway.courier.deliver_later(WHO, "x", "r1", {"S": "1"})
        for _ in range(2):
            world.asked.clear()
            await asyncio.wait_for(world.asked.wait(), BACKSTOP)
        assert gateway.courier.held == 1
        if record is None:
            del world.records["x"]
        else:
            world.records["x"] = record
        await gateway.until_nothing_is_held()


async def test_a_secret_of_a_create_that_was_repeated_as_the_first_was_found_lost_is_kept(tmp_path: Path) -> None:
    async with world_and_gateway(tmp_path) as (world, gateway, _server), agent_at(world, "u1") as agent:

        def repeated() -> None:
            # The scheduler has said that there is none, and is asked to make it before its answer is here.
            world.before_answer = lambda: None
            world.records["x"] = sandbox_pb2.Sandbox(request_id="r1", state=sandbox_pb2.SANDBOX_STATE_QUEUED)
            gateway.courier.deliver_later(WHO, "x", "r1", {"S": "2"})

        world.before_answer = repeated
        gateway.courier.deliver_later(WHO, "x", "r1", {"S": "1"})
        for _ in range(2):
            world.asked.clear()
            await asyncio.wait_for(world.asked.wait(), BACKSTOP)
        world.tell("x", "u1", State.READY, "r1")
        await asyncio.wait_for(agent.delivered.wait(), BACKSTOP)
        assert agent.secrets == [{"S": "2"}]


async def test_a_connection_over_which_a_secret_is_delivered_is_not_closed_to_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.agents_client._CHANNELS_KEPT", 1)
    async with world_and_gateway(tmp_path) as (world, gateway, _server), agent_at(world, "u1") as agent:
        world.tell("x", "u1", State.READY, "r1")
        world.tell("y", "u2", State.READY, "r2")
        await gateway.until_seen("y", "u2")
        agent.takes.clear()
        gateway.courier.deliver_later(WHO, "x", "r1", {"S": "1"})
        await asyncio.wait_for(agent.delivered.wait(), BACKSTOP)
        delivering = await gateway.agents.find("t", "x")
        await gateway.agents.find("t", "y")
        assert await gateway.agents.find("t", "x") is delivering
        agent.takes.set()
        await gateway.until(lambda: not gateway.courier.waiting)
        assert gateway.courier.held == 1
        # Nobody has used it.
        assert gateway.agents.take_active() == []


async def test_a_fresh_agent_gets_the_secret_again_as_often_as_it_takes(tmp_path: Path) -> None:
    async with world_and_gateway(tmp_path) as (world, gateway, _server), serving(gateway, tmp_path):
        world.tell("x", "u1", State.READY, "r1")
        await gateway.until_seen("x", "u1")
        gateway.courier.deliver_later(WHO, "x", "r1", {"S": "1"})
        for _ in range(3):
            async with agent_at(world, "u1") as agent:
                # Whoever calls: what made the sandbox need not be there any more.
                async with asyncio.timeout(BACKSTOP):
                    while True:
                        try:
                            await start_exec(tmp_path, "x")
                            break
                        except grpc.aio.AioRpcError as error:
                            assert error.code() is grpc.StatusCode.UNAVAILABLE
                await gateway.until(lambda: not gateway.courier.waiting)
                assert {"S": "1"} in agent.secrets
            assert gateway.courier.held == 1
        world.tell("x", "u1", State.DELETED, "r1")
        await gateway.until_nothing_is_held()


async def test_an_agent_whose_secret_is_of_another_create_gets_nothing(tmp_path: Path) -> None:
    async with (
        world_and_gateway(tmp_path) as (world, gateway, _server),
        serving(gateway, tmp_path),
        agent_at(world, "u1") as old,
        agent_at(world, "u2") as new,
    ):
        world.tell("x", "u1", State.READY, "r1")
        await gateway.until_seen("x", "u1")
        gateway.courier.deliver_later(WHO, "x", "r1", {"S": "1"})
        await gateway.until(lambda: not gateway.courier.waiting)
        former = await gateway.agents.find("t", "x")
        world.tell("x", "u1", State.DELETED, "r1")
        world.tell("x", "u2", State.READY, "r2")
        await gateway.until_seen("x", "u2")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await start_exec(tmp_path, "x")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        gateway.courier.deliver_again(former)
        assert (gateway.courier.held, gateway.courier.waiting) == (0, 0)
        assert (old.secrets, new.secrets) == ([{"S": "1"}], [])


@pytest.mark.parametrize("bound", [{"most": 3}, {"most_bytes": 30}])
async def test_what_was_delivered_makes_room_and_what_was_not_is_not_dropped(
    tmp_path: Path, bound: dict[str, int]
) -> None:
    async with world_and_gateway(tmp_path) as (world, gateway, _server), TaskGroup() as tasks:
        courier = SecretCourier(gateway.cache, gateway.agents, gateway.scheduler, tasks, **bound)
        env = {"S": "123456789"}  # ten bytes
        async with agent_at(world, "u0"), agent_at(world, "u1"):
            for number in range(2):
                world.tell(f"x{number}", f"u{number}", State.READY, "r")
                await gateway.until_seen(f"x{number}", f"u{number}")
                courier.deliver_later(WHO, f"x{number}", "r", env)
                await gateway.until(lambda: not courier.waiting)
            assert courier.held == 2
            for number in range(2, 5):
                world.records[f"x{number}"] = sandbox_pb2.Sandbox(
                    request_id="r", state=sandbox_pb2.SANDBOX_STATE_QUEUED
                )
                with courier.room(env):
                    courier.deliver_later(WHO, f"x{number}", "r", env)
                assert courier.held == 3
            with pytest.raises(ResourceExhaustedError) as caught, courier.room(env):
                pass
            assert caught.value.reason == "SECRET_ENV_BACKLOG"
            # A repeat takes no more room than it had.
            courier.deliver_later(WHO, "x4", "r", env)
            assert (courier.held, courier.waiting) == (3, 3)
        await tasks.close()


@pytest.mark.parametrize("bound", [{"most": 3}, {"most_bytes": 30}])
async def test_creates_that_come_together_get_no_more_room_than_there_is(tmp_path: Path, bound: dict[str, int]) -> None:
    async with world_and_gateway(tmp_path) as (_world, gateway, _server), TaskGroup() as tasks:
        courier = SecretCourier(gateway.cache, gateway.agents, gateway.scheduler, tasks, **bound)
        env, go_on = {"S": "123456789"}, asyncio.Event()

        async def create() -> None:
            with courier.room(env):
                await go_on.wait()

        creates = [asyncio.ensure_future(create()) for _ in range(5)]
        await asyncio.sleep(0)
        go_on.set()
        ends = await asyncio.gather(*creates, return_exceptions=True)
        assert [type(end) for end in ends] == [type(None)] * 3 + [ResourceExhaustedError] * 2
        with courier.room(env), courier.room(env), courier.room(env):
            assert courier.held == 0
