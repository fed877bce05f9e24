import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from orchard.sandbox.v1 import sandbox_pb2

from tests.support.engine import BUSYBOX, TestEngine, running_engine
from tests.support.payload import BUILD_SECONDS, built_payload
from tests.support.platform import PlatformProcess, running_platform
from tests.support.ports import HOST, free_port
from tests.support.runtime_suite import Subject
from tests.support.wire import wire_to

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first starts a platform, and may have to build the payload."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(BUILD_SECONDS))


@dataclass(frozen=True)
class OneMachine:
    """`orchard up` with one runtime; `engine` with docker alone; `offered` is the port of the endpoint "echo"."""

    platform: PlatformProcess
    engine: TestEngine | None
    offered: int

    async def restart_owner(self) -> None:
        pid = self.platform.kill_service("node")
        await asyncio.to_thread(self.platform.wait_ready, "node", not_pid=pid)

    async def remove_behind(self, sandbox: sandbox_pb2.Sandbox) -> None:
        if self.engine is not None:
            await asyncio.to_thread(self.engine.docker, "rm", "--force", self.container_of(sandbox))
            return
        record = self.platform.data / "node" / "sandboxes" / sandbox.uid / "processes.json"
        os.kill(json.loads(record.read_text())["init"]["pid"], signal.SIGKILL)

    def seen_outside(self, sandbox: sandbox_pb2.Sandbox) -> Iterator[bytes]:
        # Not rglob: sandboxes that are made ahead come and go meanwhile.
        for folder, _, names in os.walk(self.platform.data):
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file() and not path.is_symlink():
                        yield path.read_bytes()
        yield self.platform.output().encode()
        if self.engine is not None:
            container = self.container_of(sandbox)
            yield json.dumps(self.engine.inspect(container)).encode()
            said = self.engine.docker("logs", container)
            yield (said.stdout + said.stderr).encode()

    def container_of(self, sandbox: sandbox_pb2.Sandbox) -> str:
        assert self.engine is not None
        (found,) = self.engine.containers(f"label=dev.orchard.uid={sandbox.uid}")
        return found


@pytest.fixture(scope="package", params=["process", "docker"])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneMachine]:
    """Each runtime of one machine in turn; at the end nothing of it may be left."""
    folder, offered = tmp_path_factory.mktemp(request.param), free_port()
    endpoints = {"ORCHARD_GATEWAY_ENDPOINTS": f"echo={HOST}:{offered}"}
    if request.param == "process":
        with running_platform(folder, environment=endpoints) as platform:
            yield OneMachine(platform, None, offered)
        return
    if os.geteuid() != 0:
        pytest.skip("an engine needs root: run the suite as root")
    built_payload()
    with running_engine() as engine:
        environment = {**engine.environment, "ORCHARD_RUNTIME": "docker", **endpoints}
        with running_platform(folder, environment=environment) as platform:
            yield OneMachine(platform, engine, offered)
        assert engine.containers() == []


@pytest.fixture
async def subject(machine: OneMachine) -> AsyncIterator[Subject]:
    async with wire_to(machine.platform.endpoint, machine.platform.api_key) as wire:
        docker = machine.engine is not None
        yield Subject(
            wire=wire,
            endpoint=machine.platform.endpoint,
            api_key=machine.platform.api_key,
            image=BUSYBOX if docker else "",
            # Nothing listens there: what an engine lacks it would pull.
            missing_image="127.0.0.1:9/none:1" if docker else "none:1",
            refuses_missing=not docker,
            restart_owner=machine.restart_owner,
            remove_behind=machine.remove_behind,
            seen_outside=machine.seen_outside,
            offered=machine.offered,
        )
