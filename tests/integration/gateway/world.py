"""A watcher, a scheduler and agents that do what the test says, and the part of the gateway that deals with them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
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
from services.gateway.couriers import SecretCourier
from services.gateway.proxy import AgentProxy, PrincipalProxy
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.servicer import SandboxServicer

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

    async def DeleteSandbox(self, request, context):
        if request.sandbox_id not in self.records:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no")
        return sandbox_service_pb2.DeleteSandboxResponse(sandbox=self.records[request.sandbox_id])

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
        service = sandbox_service_pb2.DESCRIPTOR.services_by_name["SandboxService"]
        sandboxes = PrincipalProxy(self.scheduler.channel, signer, None, service)
        servicer = SandboxServicer(self.scheduler, self.courier, self.agents, sandboxes.metadata)
        sandboxes.override(servicer.handlers())
        self.server.grpc_server.add_generic_rpc_handlers((self.proxy, sandboxes))

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
