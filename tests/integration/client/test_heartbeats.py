"""Background heartbeats against a gRPC server that notes each call."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import pytest
from orchard import AsyncSandboxClient
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc


class Lessor(sandbox_service_pb2_grpc.SandboxServiceServicer):
    def __init__(self) -> None:
        self.beats: Counter[str] = Counter()
        self.calls = 0
        self.failing = False
        self.dead: list[str] = []
        self.deleted: list[str] = []
        self.living: dict[str, sandbox_pb2.Sandbox] = {}
        self.called = asyncio.Condition()

    async def Heartbeat(self, request, context):
        async with self.called:
            self.calls += 1
            self.called.notify_all()
            if self.failing:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not now")
            self.beats.update(request.sandbox_ids)
        return sandbox_service_pb2.HeartbeatResponse(
            missing_sandbox_ids=[name for name in request.sandbox_ids if name in self.dead]
        )

    async def CreateSandbox(self, request, context):
        self.living[request.sandbox_id] = sandbox_pb2.Sandbox(
            sandbox_id=request.sandbox_id, request_id=request.request_id, uid=f"of {request.request_id}"
        )
        return sandbox_service_pb2.CreateSandboxResponse(sandbox=self.living[request.sandbox_id])

    async def DeleteSandbox(self, request, context):
        sandbox = self.living[request.sandbox_id]
        if request.uid not in ("", sandbox.uid):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation")
        self.deleted.append(request.sandbox_id)
        return sandbox_service_pb2.DeleteSandboxResponse(sandbox=sandbox)

    async def WaitSandbox(self, request, context):
        """While it is dead, it is lost in the queue as soon as a heartbeat was told; it comes alive at once."""
        sandbox = sandbox_pb2.Sandbox(state=sandbox_pb2.SANDBOX_STATE_READY)
        sandbox.MergeFrom(self.living[request.sandbox_id])
        if request.sandbox_id in self.dead:
            await self.until(lambda: self.beats[request.sandbox_id] >= 1)
            self.dead.remove(request.sandbox_id)
            sandbox.state = sandbox_pb2.SANDBOX_STATE_FAILED
            sandbox.reason = sandbox_pb2.SANDBOX_REASON_QUEUE_LOST
        yield sandbox_service_pb2.WaitSandboxResponse(sandbox=sandbox)

    async def until(self, holds) -> None:
        async with asyncio.timeout(110), self.called:
            await self.called.wait_for(holds)


@pytest.fixture
async def lessor() -> AsyncIterator[Lessor]:
    servicer = Lessor()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(servicer, server)
    servicer.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer
    await server.stop(None)


@pytest.fixture
async def client(lessor: Lessor) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient(f"127.0.0.1:{lessor.port}", api_key="test") as client:
        yield client


async def test_a_burst_is_renewed_once_each(lessor: Lessor, client: AsyncSandboxClient) -> None:
    names = [f"sandbox-{number}" for number in range(300)]
    for name in names:
        client.keep_alive(client.attach(name), heartbeat_timeout=3600)
        await asyncio.sleep(0)
    await lessor.until(lambda: len(lessor.beats) == len(names))
    assert set(lessor.beats.values()) == {1}


async def test_each_is_renewed_again_and_again(lessor: Lessor, client: AsyncSandboxClient) -> None:
    client.keep_alive(client.attach("one"), heartbeat_timeout=0.4)
    client.keep_alive(client.attach("two"), heartbeat_timeout=3600)
    await lessor.until(lambda: min(lessor.beats["one"], lessor.beats["two"]) >= 3)


async def test_a_shorter_timeout_shortens_the_round_that_runs(lessor: Lessor, client: AsyncSandboxClient) -> None:
    client.keep_alive(client.attach("slow"), heartbeat_timeout=3600)
    await lessor.until(lambda: lessor.beats["slow"] == 1)
    client.keep_alive(client.attach("fast"), heartbeat_timeout=0.4)
    await lessor.until(lambda: lessor.beats["slow"] >= 2)


async def test_a_failed_renewal_is_repeated(lessor: Lessor, client: AsyncSandboxClient) -> None:
    lessor.failing = True
    client.keep_alive(client.attach("one"), heartbeat_timeout=0.4)
    await lessor.until(lambda: lessor.calls >= 2)
    lessor.failing = False
    await lessor.until(lambda: lessor.beats["one"] >= 1)


async def test_one_that_is_dead_is_renewed_no_more(lessor: Lessor, client: AsyncSandboxClient) -> None:
    lessor.dead.append("dead")
    client.keep_alive(client.attach("dead"), heartbeat_timeout=0.4)
    client.keep_alive(client.attach("alive"), heartbeat_timeout=0.4)
    await lessor.until(lambda: lessor.beats["alive"] >= 5)
    assert lessor.beats["dead"] <= 2


async def test_one_that_was_lost_in_the_queue_is_renewed_again(lessor: Lessor, client: AsyncSandboxClient) -> None:
    lessor.dead.append("one")
    await client.create(sandbox_id="one", keep_alive=True, heartbeat_timeout=5)
    before = lessor.beats["one"]
    await lessor.until(lambda: lessor.beats["one"] >= before + 2)


async def test_the_end_of_an_old_one_leaves_its_successor_its_heartbeats(
    lessor: Lessor, client: AsyncSandboxClient
) -> None:
    old = await client.create(sandbox_id="one", keep_alive=True, heartbeat_timeout=5)
    await client.create(sandbox_id="one", keep_alive=True, heartbeat_timeout=5)
    await old.delete()
    before = lessor.beats["one"]
    await lessor.until(lambda: lessor.beats["one"] >= before + 3)


@pytest.mark.parametrize("detached", ["at once", "later", "and kept again"])
async def test_what_is_detached_is_renewed_until_the_client_is_closed(
    lessor: Lessor, client: AsyncSandboxClient, detached: str
) -> None:
    async with AsyncSandboxClient(f"127.0.0.1:{lessor.port}", api_key="test") as other:
        sandbox = await client.create(
            sandbox_id="one", keep_alive=True, heartbeat_timeout=5, secret_env={"A": "1"}, detach=detached == "at once"
        )
        sandbox.detach()
        if detached == "and kept again":
            client.keep_alive(sandbox, heartbeat_timeout=5)
        before = lessor.beats["one"]
        await lessor.until(lambda: lessor.beats["one"] >= before + 3)
        # So is its secret, should the platform lose it.
        assert client._session.transport.secret_creates["one"].secret_env == {"A": "1"}
        await client.close()
        beats = lessor.beats["one"]
        other.keep_alive(other.attach("two"), heartbeat_timeout=4)
        await lessor.until(lambda: lessor.beats["two"] >= 3)
    assert lessor.beats["one"] <= beats + 1  # one may have been under way
    assert "one" not in lessor.deleted


async def test_what_is_detached_and_ends_is_renewed_no_more(lessor: Lessor, client: AsyncSandboxClient) -> None:
    sandbox = await client.create(sandbox_id="one", keep_alive=True, heartbeat_timeout=5, detach=True)
    await sandbox.delete()
    beats = lessor.beats["one"]
    client.keep_alive(client.attach("two"), heartbeat_timeout=5)
    await lessor.until(lambda: lessor.beats["two"] >= 3)
    assert lessor.beats["one"] <= beats + 1  # one may have been under way
