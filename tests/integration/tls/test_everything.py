"""Every service as its own process, and TLS between all of them, to Redis, to PostgreSQL and to the client."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from orchard import AsyncSandboxClient, Judgement, Step

from services.common.channel import connect
from services.common.tls import ClientTls, TlsFiles
from services.common.tokens import private_pem
from tests.integration.local_node.harness import Account, NodeProcess
from tests.support.certificates import Authority, MountedSecret
from tests.support.health import SERVING, wait_health
from tests.support.ports import free_port
from tests.support.tls_stores import TlsServer, running_tls_postgres, running_tls_redis

ROOT = Path(__file__).parents[3]
HOST = "127.0.0.1"
BACKSTOP = 110
INSIDE = ("watcher", "scheduler", "trajectories", "judge")
SERVICES = (*INSIDE, "gateway")
WITH_TABLES = ("trajectories", "judge", "gateway")


class Deployment:
    """The services of one deployment; each has its certificate of the authority inside, the gateway one for clients."""

    def __init__(self, node: NodeProcess, postgres: TlsServer, redis: TlsServer) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tls-", dir="/tmp"))
        self.inside, self.front = Authority("inside"), Authority("front")
        self.secrets = {
            name: MountedSecret(self.folder / name, self.inside.issue(HOST, name), self.inside.pem) for name in SERVICES
        }
        self.public = MountedSecret(self.folder / "public", self.front.issue(HOST), self.front.pem)
        self.ports = {name: free_port() for name in SERVICES}
        (self.folder / "signing.pem").write_bytes(private_pem(node.signer_key))
        (self.folder / "judges.json").write_text('[{"name": "scripted", "kind": "scripted"}]')
        self.node, self.postgres, self.redis = node, postgres, redis
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def address(self, name: str) -> str:
        return f"{HOST}:{self.ports[name]}"

    def health(self, name: str) -> str:
        return f"unix:{self.folder}/{name}.health"

    def environment(self, name: str) -> dict[str, str]:
        secret = self.secrets[name]
        shown = self.public if name == "gateway" else secret
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "clients/python/src")]),
            "ORCHARD_LISTEN": self.address(name),
            "ORCHARD_HEALTH_LISTEN": self.health(name),
            "ORCHARD_TLS_CERT_FILE": str(shown.cert),
            "ORCHARD_TLS_KEY_FILE": str(shown.key),
            "ORCHARD_TLS_CA_FILE": str(secret.ca),
            "ORCHARD_NODE_ADDRESS": self.node.address,
            "ORCHARD_PUBLIC_KEYS_FILE": str(self.node.home / "keys.pem"),
            **(self._of_gateway(secret) if name == "gateway" else {"ORCHARD_TLS_CLIENT_CA_FILE": str(secret.ca)}),
            **({} if name == "watcher" else {"ORCHARD_WATCHER_ADDRESS": self.address("watcher")}),
            **(_files("REDIS", self.redis) if name == "scheduler" else {}),
            **(_files("DATABASE", self.postgres) if name in WITH_TABLES else {}),
            "ORCHARD_OBJECT_STORE_URL": (self.folder / f"{name}-objects").as_uri(),
            "ORCHARD_JUDGES_FILE": str(self.folder / "judges.json"),
        }

    def _of_gateway(self, secret: MountedSecret) -> dict[str, str]:
        return {
            "ORCHARD_TLS_CLIENT_CERT_FILE": str(secret.cert),
            "ORCHARD_TLS_CLIENT_KEY_FILE": str(secret.key),
            "ORCHARD_SCHEDULER_ADDRESS": self.address("scheduler"),
            "ORCHARD_TRAJECTORIES_ADDRESS": self.address("trajectories"),
            "ORCHARD_JUDGE_ADDRESS": self.address("judge"),
            "ORCHARD_SIGNING_KEY_FILE": str(self.folder / "signing.pem"),
        }

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", f"services.{name}"]
        self.processes[name] = subprocess.Popen(command, env=self.environment(name), cwd=self.folder)

    def command(self, name: str, *arguments: str) -> bytes:
        command = [sys.executable, "-m", f"services.{name}", *arguments]
        run = subprocess.run(
            command, env=self.environment(name), cwd=self.folder, stdout=subprocess.PIPE, timeout=BACKSTOP
        )
        assert run.returncode == 0
        return run.stdout

    def stop(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(BACKSTOP)
        shutil.rmtree(self.folder)

    def replace_all(self, authority: Authority, trusted: bytes) -> None:
        for name, secret in self.secrets.items():
            secret.replace(authority.issue(HOST, name), trusted)


def _files(name: str, server: TlsServer) -> dict[str, str]:
    return {
        f"ORCHARD_{name}_URL": server.url,
        f"ORCHARD_{name}_CA_FILE": str(server.caller.ca),
        f"ORCHARD_{name}_CERT_FILE": str(server.caller.cert),
        f"ORCHARD_{name}_KEY_FILE": str(server.caller.key),
    }


@pytest.fixture(scope="module")
def stores() -> Iterator[tuple[TlsServer, TlsServer]]:
    authority = Authority("stores")
    with running_tls_postgres(authority) as postgres, running_tls_redis(authority) as redis:
        yield postgres, redis


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(stores: tuple[TlsServer, TlsServer]) -> AsyncIterator[Deployment]:
    node = NodeProcess(Account(os.geteuid(), os.getegid()), {})
    await node.start()
    deployment = Deployment(node, *stores)
    try:
        for name in WITH_TABLES:
            deployment.command(name, "migrate")
        for name in SERVICES:
            deployment.start(name)
        for name in SERVICES:
            await wait_health(deployment.health(name), SERVING)
        yield deployment
    finally:
        deployment.stop()
        await node.close()


async def judged_and_kept(client: AsyncSandboxClient, number: int) -> None:
    """A trajectory is followed while it is written, and judged."""
    steps = (Step.user(f"Add the numbers, {number}."), Step.assistant("4"))
    trajectory = await client.trajectories.create()
    following = asyncio.ensure_future(_texts(client, trajectory.trajectory_id))
    await trajectory.append(*steps)
    await trajectory.seal()
    assert await asyncio.wait_for(following, BACKSTOP) == [f"Add the numbers, {number}.", "4"]
    verdict = await client.judge.run(Judgement("outcome", f"Add the numbers, {number}.", steps))
    assert verdict.value in (0.0, 1.0), verdict
    assert await client.judge.answer(verdict.votes[0].answers[0])


async def _texts(client: AsyncSandboxClient, trajectory_id: str) -> list[str]:
    return [step.text async for step in client.trajectories.follow(trajectory_id)]


async def test_everything_works_and_can_be_replaced_meanwhile(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = json.loads(deployment.command("gateway", "create-key", "--tenant", "acme", "--role", "user"))
    monkeypatch.setenv("ORCHARD_CA_FILE", str(deployment.public.ca))
    endpoint = f"https://{deployment.address('gateway')}"
    async with AsyncSandboxClient(endpoint, api_key=made["secret"]) as client, client.create() as sandbox:
        await sandbox.write_file("/tmp/f", b"over TLS")
        assert (await sandbox.exec("cat /tmp/f")).stdout == "over TLS"
        await judged_and_kept(client, 1)
        stream = sandbox.exec_stream("mkfifo /tmp/pipe; echo begun; cat /tmp/pipe", concurrent=True)
        parts = aiter(stream)
        assert (await anext(parts)).text == "begun\n"

        # As one does it: trust the new authority too, then issue by it, then trust it alone.
        following = Authority("following")
        deployment.replace_all(deployment.inside, deployment.inside.pem + following.pem)
        assert (await sandbox.exec("true")).ok
        deployment.replace_all(following, deployment.inside.pem + following.pem)
        assert (await sandbox.exec("true")).ok
        deployment.replace_all(following, following.pem)
        deployment.public.replace(deployment.front.issue(HOST), deployment.front.pem)

        # Whatever connected to these connects anew, with files that have nothing in common with the first.
        for name in INSIDE:
            deployment.processes[name].kill()
            deployment.processes[name].wait(BACKSTOP)
            deployment.start(name)
        for name in SERVICES:
            await wait_health(deployment.health(name), SERVING)
        async with client.create() as second:
            assert (await second.exec("echo new")).stdout == "new\n"
        await judged_and_kept(client, 2)
        await sandbox.exec("echo more > /tmp/pipe")
        assert (await anext(parts)).text == "more\n"


@pytest.mark.parametrize("service", INSIDE)
async def test_services_inside_let_in_only_who_has_a_certificate_of_the_authority_inside(
    deployment: Deployment, service: str, tmp_path: Path
) -> None:
    own = deployment.secrets["gateway"]
    foreign = MountedSecret(tmp_path, Authority().issue("gateway"))
    stub = "/grpc.health.v1.Health/Check"
    for wrong in (None, ClientTls(TlsFiles(ca=own.ca)), ClientTls(TlsFiles(foreign.cert, foreign.key, own.ca))):
        async with connect(deployment.address(service), wrong) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(stub)(b"", timeout=BACKSTOP)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    async with connect(deployment.address(service), ClientTls(TlsFiles(own.cert, own.key, own.ca))) as channel:
        await channel.unary_unary(stub)(b"", timeout=BACKSTOP)


async def test_a_service_whose_files_are_wrong_says_so_and_does_not_start(deployment: Deployment) -> None:
    broken = deployment.environment("watcher") | {
        "ORCHARD_TLS_KEY_FILE": str(deployment.secrets["gateway"].key),
        "ORCHARD_LISTEN": f"{HOST}:{free_port()}",
        "ORCHARD_HEALTH_LISTEN": "",
    }
    lonely = {key: value for key, value in broken.items() if key != "ORCHARD_TLS_KEY_FILE"}
    for environment, fault in (
        (broken, "is not that of the certificate"),
        (lonely, "ORCHARD_TLS_CERT_FILE and ORCHARD_TLS_KEY_FILE go together: set both"),
    ):
        run = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "services.watcher"],
            env=environment,
            cwd=deployment.folder,
            capture_output=True,
            text=True,
            timeout=BACKSTOP,
        )
        assert run.returncode == 2
        assert fault in run.stderr
