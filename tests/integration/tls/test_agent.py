"""The way to an agent over TCP, in the clear and with TLS: the watcher's probe and the gateway's commands."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from orchard.exec.v1 import exec_pb2, exec_service_pb2, exec_service_pb2_grpc
from orchard.watch.v1 import watch_service_pb2_grpc

from services.common.health import Health
from services.common.interceptor import CallInterceptor
from services.common.server import Server
from services.common.states import State
from services.common.tasks import TaskGroup
from services.common.tls import ClientTls, TlsFiles
from services.common.tokens import Signer, generate_key, public_pem
from services.common.watch_cache import WatchCache
from services.exec_agent.settings import VERSION
from services.gateway.agents_client import Agents
from services.gateway.proxy import AgentProxy
from services.watcher.agent_client import AgentProber
from tests.integration.gateway.world import Caller, World
from tests.support.certificates import Authority, MountedSecret
from tests.support.ports import free_port

ROOT = Path(__file__).parents[3]
UID = "uid-of-an-agent"
NAME = "orchard-agent"
BACKSTOP = 110
EXEC = exec_service_pb2.DESCRIPTOR.services_by_name["ExecService"]


def environment_of(folder: Path, endpoint: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "clients/python/src")]),
        "ORCHARD_UID": UID,
        "ORCHARD_SANDBOX_ID": "x",
        "ORCHARD_LISTEN": endpoint,
        "ORCHARD_PUBLIC_KEYS_FILE": str(folder / "public.pem"),
        "ORCHARD_STATE_DIRECTORY": str(folder / "state"),
        "ORCHARD_WORKING_DIRECTORY": str(folder / "work"),
        "ORCHARD_ENV": json.dumps({"PATH": os.environ["PATH"]}),
    }


class TcpAgent:
    """An agent as a process of its own, on a port."""

    def __init__(self, folder: Path, secret: MountedSecret | None) -> None:
        key = generate_key()
        self.signer = Signer(key)
        self.endpoint = f"127.0.0.1:{free_port()}"
        (folder / "public.pem").write_bytes(public_pem(key))
        for name in ("state", "work"):
            (folder / name).mkdir()
        environment = environment_of(folder, self.endpoint)
        if secret is not None:
            environment |= {"ORCHARD_TLS_CERT_FILE": str(secret.cert), "ORCHARD_TLS_KEY_FILE": str(secret.key)}
        self.process = subprocess.Popen([sys.executable, "-m", "services.exec_agent"], env=environment, cwd=folder)


@pytest.fixture
def authority() -> Authority:
    return Authority("agents")


@pytest.fixture
def secret(authority: Authority, tmp_path: Path) -> MountedSecret:
    return MountedSecret(tmp_path / "secret", authority.issue(NAME), authority.pem)


@pytest.fixture(params=["in the clear", "with TLS"])
def agent(request: pytest.FixtureRequest, secret: MountedSecret, tmp_path: Path) -> Iterator[TcpAgent]:
    agent = TcpAgent(tmp_path, secret if request.param == "with TLS" else None)
    try:
        yield agent
    finally:
        agent.process.terminate()
        agent.process.wait(BACKSTOP)


def callers_tls(request: pytest.FixtureRequest, secret: MountedSecret, **more) -> ClientTls | None:
    if request.node.callspec.params["agent"] == "in the clear":
        return None
    return ClientTls(TlsFiles(ca=secret.ca), server_name=NAME, **more)


async def until_answers(agent: TcpAgent, tls: ClientTls | None) -> str:
    async with asyncio.timeout(BACKSTOP):
        while (version := await AgentProber(tls).answers(agent.endpoint, UID)) is None:
            assert agent.process.poll() is None
            await asyncio.sleep(0.02)
    return version


@asynccontextmanager
async def gateway(folder: Path, agent: TcpAgent, tls: ClientTls | None) -> AsyncIterator[grpc.aio.Channel]:
    """The gateway's way to agents, with a watcher that tells of this one."""
    world = World(folder)
    world.tell("x", UID, State.READY, endpoint=agent.endpoint)
    watcher = grpc.aio.server()
    watch_service_pb2_grpc.add_WatchServiceServicer_to_server(world, watcher)
    watcher.add_insecure_port(f"unix:{folder}/world")
    await watcher.start()
    server = Server(interceptor=CallInterceptor(authenticator=Caller()), health=Health(), service_names=[])
    async with TaskGroup() as tasks:
        cache = WatchCache(f"unix:{folder}/world", Health(), include_spec=False)
        agents = Agents(cache, agent.signer, tasks, tls)
        server.grpc_server.add_generic_rpc_handlers((AgentProxy(agents, None, EXEC),))
        tasks.start("follow the watcher", cache.run())
        await server.start(f"unix:{folder}/gateway")
        async with grpc.aio.insecure_channel(f"unix:{folder}/gateway") as channel:
            yield channel
        await server.stop()
        await tasks.close()
        await agents.close()
    await watcher.stop(None)


async def run(channel: grpc.aio.Channel, shell: str) -> bytes:
    request = exec_service_pb2.StartExecRequest(
        sandbox_id="x", exec_id=f"e-{os.urandom(6).hex()}", spec=exec_pb2.ExecSpec(shell=shell)
    )
    request.wait.FromSeconds(30)
    answer = await exec_service_pb2_grpc.ExecServiceStub(channel).StartExec(request, timeout=BACKSTOP)
    return b"".join(chunk.data for chunk in answer.output)


async def test_an_agent_is_probed_and_used(
    request: pytest.FixtureRequest, agent: TcpAgent, secret: MountedSecret, tmp_path: Path
) -> None:
    tls = callers_tls(request, secret)
    assert await until_answers(agent, tls) == VERSION
    async with gateway(tmp_path, agent, tls) as channel:
        assert await run(channel, "echo hello") == b"hello\n"


@pytest.mark.parametrize("agent", ["with TLS"], indirect=True)
async def test_an_agent_with_tls_is_nobody_without_it_or_under_another_name_or_authority(
    request: pytest.FixtureRequest, agent: TcpAgent, secret: MountedSecret, tmp_path: Path
) -> None:
    await until_answers(agent, callers_tls(request, secret))
    other = MountedSecret(tmp_path / "other", ca=Authority().pem)
    for wrong in (
        None,
        ClientTls(TlsFiles(ca=secret.ca), server_name="another"),
        ClientTls(TlsFiles(ca=other.ca), server_name=NAME),
    ):
        assert await AgentProber(wrong).answers(agent.endpoint, UID) is None


@pytest.mark.parametrize("agent", ["with TLS"], indirect=True)
async def test_certificates_of_agents_are_replaced_without_a_restart(
    request: pytest.FixtureRequest, agent: TcpAgent, secret: MountedSecret, tmp_path: Path
) -> None:
    now = [0.0]
    tls = callers_tls(request, secret, clock=lambda: now[0])
    await until_answers(agent, tls)
    async with gateway(tmp_path, agent, tls) as channel:
        stub = exec_service_pb2_grpc.ExecServiceStub(channel)
        request_ = exec_service_pb2.ExecRequest(
            sandbox_id="x", exec_id="long", spec=exec_pb2.ExecSpec(shell="mkfifo p; echo begun; cat p", concurrent=True)
        )
        stream = stub.Exec(request_)
        while not (await stream.read()).HasField("chunk"):
            pass
        following = Authority("following")
        secret.replace(following.issue(NAME), following.pem)
        now[0] += 10
        assert await run(channel, "echo more > p; echo done") == b"done\n"
        assert (await stream.read()).chunk.data == b"more\n"
        stream.cancel()


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ({"ORCHARD_TLS_CERT_FILE": "/x"}, "ORCHARD_TLS_CERT_FILE and ORCHARD_TLS_KEY_FILE go together: set both"),
        ({"ORCHARD_TLS_CERT_FILE": "/x", "ORCHARD_TLS_KEY_FILE": "/x"}, "cannot read /x: No such file or directory"),
    ],
)
def test_an_agent_whose_files_are_wrong_says_so(tmp_path: Path, setting: dict[str, str], fault: str) -> None:
    (tmp_path / "public.pem").write_bytes(public_pem(generate_key()))
    (tmp_path / "state").mkdir()
    environment = environment_of(tmp_path, f"127.0.0.1:{free_port()}") | setting
    command = [sys.executable, "-m", "services.exec_agent"]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=BACKSTOP)
    assert ended.returncode == 2
    assert fault in ended.stderr
