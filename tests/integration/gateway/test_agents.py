"""Which agent a call goes to, which it is refused to, and what becomes of its use and its streams."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from orchard.exec.v1 import exec_service_pb2, exec_service_pb2_grpc
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc

from services.common.errors import (
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from services.common.states import State
from services.common.tasks import TaskGroup
from services.gateway.couriers import ActivityReporter
from tests.integration.gateway.world import BACKSTOP, agent_at, world_and_gateway


async def test_an_agent_that_is_too_old_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async with world_and_gateway(tmp_path) as (world, gateway, _server):
        for version in ("0.0.9", "0.1", "newest", "0,1,0"):
            world.tell("x", f"u-{version}", State.READY, version=version)
            await gateway.until_seen("x", f"u-{version}")
            with pytest.raises(FailedPreconditionError, match=f"{version}.*0.1.0 and newer: delete") as caught:
                await gateway.agents.find("t", "x")
            assert caught.value.reason == "AGENT_TOO_OLD"
            assert caught.value.metadata["version"] == version
        for version in ("0.1.0", "0.1.7", "0.2.0-rc.1", "12.0.1"):
            world.tell("x", f"u-{version}", State.READY, version=version)
            await gateway.until_seen("x", f"u-{version}")
            assert (await gateway.agents.find("t", "x")).uid == f"u-{version}"


async def test_an_agent_that_tells_the_watcher_no_version_is_asked_once(tmp_path: Path) -> None:
    async with world_and_gateway(tmp_path) as (world, gateway, _server), agent_at(world, "u1") as agent:
        world.tell("x", "u1", State.READY, version="")
        await gateway.until_seen("x", "u1")
        agent.version = "0.0.1"
        for _ in range(2):
            with pytest.raises(FailedPreconditionError, match=r"0\.0\.1"):
                await gateway.agents.find("t", "x")
        agent.version = "0.1.0"
        for _ in range(3):
            await gateway.agents.find("t", "x")
        assert agent.asked == 3


async def test_what_is_not_known_is_missing_only_while_the_watcher_tells(tmp_path: Path) -> None:
    async with world_and_gateway(tmp_path) as (_world, gateway, server):
        with pytest.raises(NotFoundError):
            await gateway.agents.find("t", "x")
        await server.stop(None)
        with pytest.raises(UnavailableError):
            await gateway.agents.find("t", "x")


async def test_nothing_goes_to_a_sandbox_whose_delete_was_accepted(tmp_path: Path) -> None:
    """The watcher may be slow to tell; who deleted it need not wait for that."""
    async with world_and_gateway(tmp_path) as (world, gateway, _server):
        await gateway.server.start(f"unix:{tmp_path}/gateway")
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/gateway") as channel:
            delete = sandbox_service_pb2_grpc.SandboxServiceStub(channel).DeleteSandbox
            request = sandbox_service_pb2.DeleteSandboxRequest(sandbox_id="x")
            world.tell("x", "u1", State.READY)
            await gateway.until_seen("x", "u1")
            with pytest.raises(grpc.aio.AioRpcError):
                await delete(request, timeout=BACKSTOP)
            assert (await gateway.agents.find("t", "x")).uid == "u1"
            world.records["x"] = sandbox_pb2.Sandbox(sandbox_id="x", uid="u1", state=sandbox_pb2.SANDBOX_STATE_DELETING)
            assert (await delete(request, timeout=BACKSTOP)).sandbox == world.records["x"]
            with pytest.raises(FailedPreconditionError, match="REQUESTED") as caught:
                await gateway.agents.find("t", "x")
            assert (caught.value.reason, caught.value.metadata["state"]) == ("SANDBOX_LOST", "DELETING")
            # Whoever has the id next is another.
            world.tell("x", "u1", State.DELETED)
            world.tell("x", "u2", State.READY)
            await gateway.until_seen("x", "u2")
            assert (await gateway.agents.find("t", "x")).uid == "u2"
        await gateway.server.stop(wake=gateway.proxy.end_streams)


async def test_use_that_could_not_be_reported_is_reported_later(tmp_path: Path) -> None:
    async with world_and_gateway(tmp_path) as (world, gateway, _server), agent_at(world, "u1"), TaskGroup() as tasks:
        world.tell("x", "u1", State.READY)
        await gateway.until_seen("x", "u1")
        agent = await gateway.agents.find("t", "x")
        gateway.agents.begin(agent)
        gateway.agents.end(agent)
        world.refuse_reports = 2
        tasks.start("report", ActivityReporter(gateway.agents, gateway.scheduler, every_seconds=0.01).run())
        assert await asyncio.wait_for(world.reports.get(), BACKSTOP) == ["u1"]
        assert world.refuse_reports == 0


async def test_a_stop_ends_streams_with_a_reason_and_a_time_to_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None of them is waited for until its end.
    monkeypatch.setattr("services.common.server.STREAM_GRACE_SECONDS", 3600.0)
    async with (
        asyncio.timeout(BACKSTOP),
        world_and_gateway(tmp_path) as (world, gateway, _server),
        agent_at(world, "u1"),
    ):
        world.tell("x", "u1", State.READY)
        await gateway.until_seen("x", "u1")
        await gateway.server.start(f"unix:{tmp_path}/gateway")
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/gateway") as channel:
            stub = exec_service_pb2_grpc.ExecServiceStub(channel)
            call = stub.Exec(exec_service_pb2.ExecRequest(sandbox_id="x"))
            await call.read()
            stop = asyncio.ensure_future(gateway.server.stop(wake=gateway.proxy.end_streams))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            await stop
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        status = status_pb2.Status.FromString(dict(caught.value.trailing_metadata())["grpc-status-details-bin"])
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(info)
        assert status.details[1].Unpack(retry)
        assert info.reason == "SERVER_STOPPING"
