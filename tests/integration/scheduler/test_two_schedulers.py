"""Two real schedulers beside one Valkey, watcher and node daemon, killed again and again."""

import asyncio
import random
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import redis.asyncio as redis
from orchard.node.v1 import node_service_pb2, node_service_pb2_grpc
from orchard.sandbox.v1 import sandbox_pb2

from services.common.quota import Quota
from services.common.tokens import Signer, generate_key, public_pem
from tests.support.schedulers import TENANT, Schedulers, kill_again_and_again
from tests.support.services import ServiceProcess, running

BACKSTOP = 120
KEY = generate_key()
LIMITED = sandbox_pb2.SandboxSpec(resources={"cpu": 1.0})


class Machine:
    """One machine's sandboxes, and the schedulers that make them."""

    def __init__(self, schedulers: list[ServiceProcess], node: ServiceProcess) -> None:
        self.calls = Schedulers(schedulers, Signer(KEY), LIMITED)
        self._node = node

    async def there(self) -> dict[str, str]:
        """Uids of the node's sandboxes, by id."""
        found: dict[str, str] = {}
        async with grpc.aio.insecure_channel(self._node.address) as channel:
            stub = node_service_pb2_grpc.NodeServiceStub(channel)
            call = stub.WatchSandboxes(node_service_pb2.WatchSandboxesRequest(), timeout=BACKSTOP)
            async for response in call:
                if response.WhichOneof("event") == "synced":
                    call.cancel()
                    return found
                if response.WhichOneof("event") == "sandbox":
                    assert response.sandbox.sandbox_id not in found, "a double"
                    found[response.sandbox.sandbox_id] = response.sandbox.uid
        raise AssertionError("the node's stream ended")


@pytest.fixture
async def machine(valkey: redis.Redis, valkey_url: str) -> AsyncIterator[Machine]:
    folder = Path(tempfile.mkdtemp(prefix="two-"))
    try:
        keys, run = folder / "keys.pem", folder / "run"
        keys.write_bytes(public_pem(KEY))
        (folder / "data").mkdir(mode=0o700)
        run.mkdir(mode=0o700)
        node = ServiceProcess(
            "services.local.node",
            folder / "node",
            {"DATA_DIRECTORY": str(folder / "data"), "RUN_DIRECTORY": str(run), "PUBLIC_KEYS_FILE": str(keys)},
        )
        watcher = ServiceProcess("services.watcher", folder / "watcher", {"NODE_ADDRESS": node.address})
        settings = {
            "REDIS_URL": valkey_url,
            "WATCHER_ADDRESS": watcher.address,
            "NODE_ADDRESS": node.address,
            "PUBLIC_KEYS_FILE": str(keys),
            "CLAIM_SECONDS": "3",
        }
        schedulers = [ServiceProcess("services.scheduler", folder / f"s{n}", settings) for n in range(2)]
        with running(node, watcher, *schedulers):
            for service in (node, watcher, *schedulers):
                await service.serving()
            yield Machine(schedulers, node)
            assert node.stop() == 0
    finally:
        shutil.rmtree(folder)


@pytest.mark.timeout(600)
async def test_kills_make_no_double_and_lose_nothing(machine: Machine, valkey: redis.Redis) -> None:
    names = [f"s{number}" for number in range(30)]
    chosen = random.Random(11)
    machine.calls.quota = Quota(1, cpu=20)

    async def life(name: str) -> None:
        await asyncio.sleep(chosen.uniform(0, 6))
        await machine.calls.create(name)
        await machine.calls.ready(name)
        if chosen.random() < 0.5:
            await machine.calls.delete(name)
            await machine.calls.until(name, sandbox_pb2.SANDBOX_STATE_DELETED)
        else:
            kept.add(name)

    kept: set[str] = set()
    killing = asyncio.ensure_future(kill_again_and_again(machine.calls.services, chosen))
    try:
        await asyncio.gather(*(life(name) for name in names))
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
    there = await machine.there()
    assert there == {name: (await machine.calls.get(name)).uid for name in kept}
    used = await valkey.hgetall(f"orchard:tenant:{TENANT}")
    assert int(used[b"used_sandboxes"]) == len(kept)
    assert int(used[b"used_cpu_milli"]) == 1000 * len(kept)


@pytest.mark.timeout(600)
async def test_an_emptied_store_does_not_forget_what_counts(machine: Machine, valkey: redis.Redis) -> None:
    machine.calls.quota = Quota(1, sandboxes=2)
    for name in ("a", "b"):
        await machine.calls.create(name)
        await machine.calls.ready(name)
    await valkey.flushall()
    await machine.calls.create("c")
    async with asyncio.timeout(BACKSTOP):
        while int(await valkey.hget(f"orchard:tenant:{TENANT}", "used_sandboxes") or 0) < 2:
            await asyncio.sleep(0.05)
    await machine.calls.delete("a")
    await machine.calls.ready("c")
    async with asyncio.timeout(BACKSTOP):
        while set(await machine.there()) != {"b", "c"}:
            await asyncio.sleep(0.05)
