"""The gateway's way to agents over real gRPC: a watcher, a scheduler and agents that do what the test says."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from orchard.exec.v1 import agent_service_pb2, agent_service_pb2_grpc, exec_service_pb2, exec_service_pb2_grpc
from orchard.sandbox.v1 import (
    lease_service_pb2,
    lease_service_pb2_grpc,
    sandbox_pb2,
    sandbox_service_pb2,
    sandbox_service_pb2_grpc,
)
from orchard.watch.v1 import watch_service_pb2, watch_service_pb2_grpc

from services.common.errors import (
    STATUS_DETAILS_KEY,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.health import Health
from services.common.hub import Hub
from services.common.interceptor import CallInterceptor
from services.common.observed import Observed, to_proto
from services.common.server import Server
from services.common.states import State
from services.common.tasks import TaskGroup
from services.common.tokens import Principal, Signer, generate_key
from services.common.watch_cache import WatchCache
from services.gateway.agents_client import Agents
from services.gateway.couriers import ActivityReporter, SecretCourier
from services.gateway.proxy import AgentProxy
from services.gateway.scheduler_client import SchedulerClient

BACKSTOP = 110
WHO = Principal("t", "k", frozenset({"user"}))


class World(
    watch_service_pb2_grpc.WatchServiceServicer,
    sandbox_service_pb2_grpc.SandboxServiceServicer,
    lease_service_pb2_grpc.LeaseServiceServicer,
):
    """The watcher and the scheduler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hub: Hub[str, Observed] = Hub()
        self.sandboxes: dict[str, Observed] = {}
        self.records: dict[str, sandbox_pb2.Sandbox] = {}
        self.asked = asyncio.Event()
        self.reports: asyncio.Queue[list[str]] = asyncio.Queue()
        self.refuse_reports = 0
        self.revision = 0
        self.before_answer: Callable[[], None] = lambda: None

    async def WatchSandboxes(self, request, context):
        with self.hub.subscribe([(one.uid, one) for one in self.sandboxes.values()]) as changes:
            if self.sandboxes:
                for one in await changes.next(BACKSTOP):
                    yield watch_service_pb2.WatchSandboxesResponse(sandbox=to_proto(one, include_spec=False))
            complete = max((one.revision for one in self.sandboxes.values()), default=0)
            yield watch_service_pb2.WatchSandboxesResponse(
                synced=watch_service_pb2.Synced(), complete_revision=complete
            )
            while True:
                for one in await changes.next(BACKSTOP):
                    yield watch_service_pb2.WatchSandboxesResponse(sandbox=to_proto(one, include_spec=False))

    async def GetSandbox(self, request, context):
        self.asked.set()
        found = request.sandbox_id in self.records
        self.before_answer()
        if not found:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no")
        return sandbox_service_pb2.GetSandboxResponse(sandbox=self.records[request.sandbox_id])

    async def ReportActivity(self, request, context):
        if self.refuse_reports:
            self.refuse_reports -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no")
        self.reports.put_nowait([one.uid for one in request.activities])
        return lease_service_pb2.ReportActivityResponse()

    def tell(
        self,
        sandbox_id: str,
        uid: str,
        state: State,
        request_id: str = "r",
        *,
        version: str = "0.1.0",
        endpoint: str = "",
    ) -> None:
        self.revision += 1
        endpoint = endpoint or f"unix:{self.folder}/{uid}"
        more = {"endpoint": endpoint, "request_id": request_id, "agent_version": version}
        seen = Observed("t", sandbox_id, uid, self.revision, state, **more)
        self.sandboxes[uid] = seen
        self.hub.publish(uid, seen)


class AgentServer(agent_service_pb2_grpc.AgentServiceServicer, exec_service_pb2_grpc.ExecServiceServicer):
    """An agent: keeps its secret, and a command of it never ends."""

    def __init__(self) -> None:
        self.secrets: list[dict[str, str]] = []
        self.delivered = asyncio.Event()
        self.takes = asyncio.Event()
        self.takes.set()
        self.version = "0.1.0"
        self.asked = 0

    async def GetAgent(self, request, context):
        self.asked += 1
        return agent_service_pb2.GetAgentResponse(version=self.version)

    async def SetSecretEnv(self, request, context):
        self.secrets.append(dict(request.secret_env))
        self.delivered.set()
        await self.takes.wait()
        return agent_service_pb2.SetSecretEnvResponse()

    async def StartExec(self, request, context):
        if not self.secrets:
            pending = UnavailableError("it waits", reason="SECRET_ENV_PENDING")
            details = ((STATUS_DETAILS_KEY, pending.to_status().SerializeToString()),)
            await context.abort(pending.code, pending.message, details)
        return exec_service_pb2.StartExecResponse()

    async def Exec(self, request, context):
        yield exec_service_pb2.ExecResponse()
        await asyncio.Event().wait()


class Caller:
    async def authenticate(self, method: str, metadata) -> Principal:
        return WHO


class Gateway:
    """The parts of the gateway that these tests need, wired as in app.py."""

    def __init__(self, world: World, address: str, tasks: TaskGroup) -> None:
        signer = Signer(generate_key())
        self.cache = WatchCache(
            address,
            Health(),
            include_spec=False,
            on_change=lambda seen: self.ended(seen) if seen.state.terminal else None,
        )
        self.agents = Agents(self.cache, signer, tasks)
        self.scheduler = SchedulerClient(address, signer)
        self.courier = SecretCourier(self.cache, self.agents, self.scheduler, tasks, look_seconds=0.05)
        self.proxy = AgentProxy(
            self.agents,
            None,
            exec_service_pb2.DESCRIPTOR.services_by_name["ExecService"],
            on_secret_pending=self.courier.deliver_again,
        )
        self.server = Server(
            interceptor=CallInterceptor(authenticator=Caller()), health=Health(), service_names=[], reflection=False
        )
        self.server.grpc_server.add_generic_rpc_handlers((self.proxy,))

    def ended(self, seen: Observed) -> None:
        self.agents.forget(seen.uid)
        self.courier.forget(seen)

    async def until_seen(self, sandbox_id: str, uid: str) -> None:
        assert await self.cache.wait("t", sandbox_id, lambda now: now.uid == uid, BACKSTOP)

    async def until_nothing_is_held(self) -> None:
        await self.until(lambda: not self.courier.held)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(BACKSTOP):
            while not holds():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def agent_at(world: World, uid: str) -> AsyncIterator[AgentServer]:
    agent = AgentServer()
    server = grpc.aio.server()
    agent_service_pb2_grpc.add_AgentServiceServicer_to_server(agent, server)
    exec_service_pb2_grpc.add_ExecServiceServicer_to_server(agent, server)
    server.add_insecure_port(f"unix:{world.folder}/{uid}")
    await server.start()
    try:
        yield agent
    finally:
        await server.stop(None)


@asynccontextmanager
async def world_and_gateway(folder: Path) -> AsyncIterator[tuple[World, Gateway, grpc.aio.Server]]:
    world = World(folder)
    server = grpc.aio.server()
    watch_service_pb2_grpc.add_WatchServiceServicer_to_server(world, server)
    sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(world, server)
    lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(world, server)
    address = f"unix:{folder}/world"
    server.add_insecure_port(address)
    await server.start()
    async with TaskGroup() as tasks:
        gateway = Gateway(world, address, tasks)
        tasks.start("follow the watcher", gateway.cache.run())
        async with asyncio.timeout(BACKSTOP):
            while not gateway.cache.live:
                await asyncio.sleep(0.005)
        try:
            yield world, gateway, server
        finally:
            await tasks.close()
            await gateway.agents.close()
            await gateway.scheduler.close()
            await server.stop(None)


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


async def start_exec(folder: Path, sandbox_id: str) -> None:
    async with grpc.aio.insecure_channel(f"unix:{folder}/gateway") as channel:
        stub = exec_service_pb2_grpc.ExecServiceStub(channel)
        await stub.StartExec(exec_service_pb2.StartExecRequest(sandbox_id=sandbox_id), timeout=BACKSTOP)


@asynccontextmanager
async def serving(gateway: Gateway, folder: Path) -> AsyncIterator[None]:
    gateway.server.grpc_server.add_insecure_port(f"unix:{folder}/gateway")
    await gateway.server.grpc_server.start()
    yield
    await gateway.server.grpc_server.stop(None)


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
