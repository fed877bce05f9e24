"""Every call of the platform with messages that nobody would send: each is answered, nothing dies, nothing stays open.

Some hundred calls of each kind by default, in an order that a seed gives; `make chaos` makes more of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import orchard
import pytest
from google.protobuf.descriptor import MethodDescriptor
from orchard.admin.v1 import (
    audit_service_pb2,
    image_service_pb2,
    key_service_pb2,
    tenant_service_pb2,
    usage_service_pb2,
    version_service_pb2,
)
from orchard.exec.v1 import endpoint_service_pb2, exec_service_pb2, file_service_pb2, port_service_pb2
from orchard.judge.v1 import judge_service_pb2
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2
from orchard.trajectory.v1 import group_service_pb2, trajectory_service_pb2, trajectory_service_pb2_grpc

from tests.support.fuzzing import AT_ONCE, Fuzzer, methods_of, name_of
from tests.support.platform import SERVICES, PlatformProcess, running_platform
from tests.support.random_messages import Known
from tests.support.wire import Wire, seconds, wire_to

pytestmark = pytest.mark.chaos

SEED = int(os.environ.get("ORCHARD_CHAOS_SEED", "1"))
CALLS = 12 * int(os.environ.get("ORCHARD_CHAOS_ROUNDS", "1"))
SLACK = 24  # connections and files that are kept for the next one
SANDBOX, TRAJECTORY, GROUP = "fuzzed", "fuzzed-trajectory", "fuzzed-group"
KNOWN: Known = {
    "sandbox_id": (SANDBOX,),
    "trajectory_id": (TRAJECTORY,),
    "group_id": (GROUP,),
    "exec_id": ("e1", "e2", "start"),
    "shell": ("true", "echo x", "sleep 1", "cat"),
    "path": ("/tmp/fuzz", "/tmp/fuzz/a", "relative"),
    "source_path": ("/tmp/fuzz",),
    "target_path": ("/tmp/fuzz2",),
    "tenant": ("fuzzed-tenant",),
}
MODULES = (
    audit_service_pb2,
    image_service_pb2,
    key_service_pb2,
    tenant_service_pb2,
    usage_service_pb2,
    version_service_pb2,
    exec_service_pb2,
    file_service_pb2,
    port_service_pb2,
    endpoint_service_pb2,
    judge_service_pb2,
    sandbox_service_pb2,
    group_service_pb2,
    trajectory_service_pb2,
)
# An import would read whatever folder of this machine comes up, the root among them.
METHODS = [method for method in methods_of(*MODULES) if name_of(method) != "ImageService.ImportImage"]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("fuzz")) as platform:
        yield platform


@pytest.fixture(scope="module")
def api_key(platform: PlatformProcess) -> str:
    """Of a tenant that no message names by chance: it could be left without room for the sandbox."""
    with orchard.SandboxClient(platform.endpoint, api_key=platform.api_key) as client:
        return client.keys.create("whose-sandbox-it-is", roles=["user", "admin"]).secret


@pytest.fixture
async def wire(platform: PlatformProcess, api_key: str) -> AsyncIterator[Wire]:
    async with wire_to(platform.endpoint, api_key) as wire:
        yield wire


def fuzzer_of(wire: Wire, method: MethodDescriptor, seed: str) -> Fuzzer:
    return Fuzzer(wire.channel, lambda: wire.metadata, method, random.Random(seed), KNOWN)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.parametrize("method", METHODS, ids=name_of)
async def test_each_call_is_answered(wire: Wire, method: MethodDescriptor) -> None:
    await targets(wire)
    fuzzer = fuzzer_of(wire, method, f"{SEED} {method.full_name}")
    await fuzzer.send_all(CALLS)
    assert fuzzer.wrong == []


async def test_nothing_has_died_and_nothing_is_left_open(platform: PlatformProcess, wire: Wire) -> None:
    """After all of the above."""
    await targets(wire)
    assert await wire.output(SANDBOX, "echo alive") == b"alive\n"
    starts = {name: service["starts"] for name, service in platform.status().items()}
    assert set(starts.values()) == {1}, starts
    assert "Traceback" not in platform.output()
    before = {name: descriptors(platform.service_pid(name)) for name in SERVICES}
    for method in METHODS:
        await fuzzer_of(wire, method, f"{SEED} again {method.full_name}").send_all(AT_ONCE)
    await targets(wire)
    async with asyncio.timeout(120):
        # What ended late is still being put away.
        while any(descriptors(platform.service_pid(name)) > before[name] + SLACK for name in SERVICES):
            await asyncio.sleep(0.2)


async def targets(wire: Wire) -> None:
    """What is fuzzed, made anew where a call took it away."""
    trajectories = trajectory_service_pb2_grpc.TrajectoryServiceStub(wire.channel)
    request = trajectory_service_pb2.CreateTrajectoryRequest(trajectory={"trajectory_id": TRAJECTORY})
    with contextlib.suppress(grpc.aio.AioRpcError):
        await wire.call(trajectories.CreateTrajectory, request)
    try:
        found = await wire.get(SANDBOX)
    except grpc.aio.AioRpcError as error:
        assert error.code() == grpc.StatusCode.NOT_FOUND, error.details()
    else:
        if found.state == sandbox_pb2.SANDBOX_STATE_READY:
            return
        await wire.wait(SANDBOX, until_terminal=True)
    await wire.ready(SANDBOX, ttl=seconds(3600))
