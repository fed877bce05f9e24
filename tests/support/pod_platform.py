"""The whole platform with sandboxes that are Pods, its services and stores being processes here.

Two watchers and two schedulers, with the rights of the manifests. Each has an address of its own in 127.0.0.0/8, which
its callers know beside its twin's, as a Service would give them: who is killed comes back where it was.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.common import pods
from services.common.tokens import generate_key, private_pem, public_pem
from services.local.stores.valkey import Valkey
from tests.support.history import ROOT, import_path
from tests.support.ports import HOST, free_port
from tests.support.services import ServiceProcess, running
from tests.support.stores import running_postgres
from tests.support.testbed import NAMESPACE, Testbed

TENANT = "team"
COMMAND_SECONDS = 120
PORT = 7411


class ValkeyProcess:
    """A Valkey that is killed and started again with what its file has."""

    def __init__(self, folder: Path) -> None:
        self._valkey = Valkey(folder / "valkey", folder / "valkey.sock")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self._valkey.url

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until it answers."""
        self._valkey.prepare()
        command = self._valkey.command(dict(os.environ))
        self._process = subprocess.Popen(command.argv, env=command.environment, stdout=subprocess.DEVNULL)
        async with asyncio.timeout(COMMAND_SECONDS):
            await self._valkey.wait_ready()

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class PodPlatform:
    """Use `running_pod_platform`. `offered` is the port of the endpoint "echo"."""

    def __init__(
        self,
        testbed: Testbed,
        folder: Path,
        database: str,
        agent_image: str,
        *,
        settings: Mapping[str, str],
        tree: Path,
    ) -> None:
        self.testbed = testbed
        self.offered = free_port()
        self.folder = folder
        self._tree = tree
        self.valkey = ValkeyProcess(folder)
        self._database = database
        keys, signing = folder / "public-keys.pem", folder / "signing-key.pem"
        key = generate_key()
        keys.write_bytes(public_pem(key))
        signing.write_bytes(private_pem(key))
        # Nobody else's: a pid is of one process at a time.
        net = f"127.{64 + (os.getpid() >> 16 & 63)}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
        addresses = [f"{net}:{PORT + number}" for number in range(4)]
        self.watchers = [
            self._service("watcher", number, {"LISTEN": address, "KUBECONFIG": str(testbed.watcher_kubeconfig)})
            for number, address in enumerate(addresses[:2])
        ]
        watchers = f"ipv4:{','.join(addresses[:2])}"
        scheduler = {
            "KUBECONFIG": str(testbed.kubeconfig),
            "REDIS_URL": self.valkey.url,
            "WATCHER_ADDRESS": watchers,
            "PUBLIC_KEYS_FILE": str(keys),
            "PAYLOAD_IMAGE": agent_image,
            "PAYLOAD_PULL_POLICY": "Never",
            # Many on one machine.
            "POD_CPU_REQUEST_SHARE": "0.01",
            "POD_MEMORY_REQUEST_SHARE": "0.05",
            **settings,
        }
        self.schedulers = [
            self._service("scheduler", number, {**scheduler, "LISTEN": address})
            for number, address in enumerate(addresses[2:])
        ]
        gateway = {
            "DATABASE_URL": database,
            "SIGNING_KEY_FILE": str(signing),
            "SCHEDULER_ADDRESS": f"ipv4:{','.join(addresses[2:])}",
            "WATCHER_ADDRESS": watchers,
            "GATEWAY_ENDPOINTS": f"echo={HOST}:{self.offered}",
        }
        self.gateway = self._service("gateway", 0, gateway)
        self.services = (*self.watchers, *self.schedulers, self.gateway)
        self.api_key = ""

    def _service(self, name: str, number: int, settings: Mapping[str, str]) -> ServiceProcess:
        socket = self.folder / f"{name}{number}.sock"
        return ServiceProcess(f"services.{name}", socket, {"RUNTIME": "kubernetes", **settings}, self._tree)

    @property
    def endpoint(self) -> str:
        return self.gateway.address

    def prepare(self) -> None:
        """What comes before the services: Valkey, the gateway's tables, a key."""
        asyncio.run(self.valkey.start())
        self.migrate(self._tree)
        made = self._command("create-key", "--tenant", TENANT, "--role", "user", "--role", "admin")
        self.api_key = json.loads(made)["secret"]

    def migrate(self, tree: Path) -> None:
        """Give the gateway the tables that it has in a tree."""
        self._command("migrate", tree=tree)

    def _command(self, *arguments: str, tree: Path | None = None) -> str:
        tree = tree or self._tree
        return subprocess.run(
            [sys.executable, "-m", "services.gateway", *arguments],
            cwd=tree,
            env={**os.environ, **import_path(tree), "ORCHARD_DATABASE_URL": self._database},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=COMMAND_SECONDS,
        ).stdout

    async def serving(self) -> None:
        """Wait until every service serves."""
        await asyncio.gather(*(service.serving() for service in self.services))

    def pods(self) -> dict[str, Any]:
        """Every Pod of the namespace, by name, whoever made it."""
        return {pod["metadata"]["name"]: pod for pod in self.testbed.get("-n", NAMESPACE, "pods")["items"]}

    def sandbox_pods(self) -> list[tuple[str, dict[str, Any]]]:
        """All Pods, with the sandbox's id, or with the Pod's name where it is none."""
        return [
            ((pod["metadata"].get("annotations") or {}).get(pods.SANDBOX_ID, name), pod)
            for name, pod in self.pods().items()
        ]

    def sandboxes(self) -> dict[str, str]:
        """Uids of all Pods, by the same."""
        return {name: pod["metadata"]["uid"] for name, pod in self.sandbox_pods()}

    def logs(self) -> str:
        """All that the services wrote."""
        return "".join(service.log.read_text() for service in self.services)


@contextmanager
def running_pod_platform(
    testbed: Testbed, folder: Path, agent_image: str, settings: Mapping[str, str] | None = None, tree: Path = ROOT
) -> Iterator[PodPlatform]:
    """A platform that serves. It takes every sandbox of the cluster for its own, so that there can be no other.

    `settings` of the schedulers, without their prefix ORCHARD_; `tree` has the code of all services.
    """
    with running_postgres() as database:
        platform = PodPlatform(testbed, folder, database, agent_image, settings=settings or {}, tree=tree)
        try:
            platform.prepare()
            with running(*platform.services):
                asyncio.run(platform.serving())
                yield platform
        finally:
            platform.valkey.kill()
            testbed.clear()
