"""Sandboxes that are Pods, on the testbed of tests/cluster: our services beside a real API server and a real node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import orchard
from orchard.sandbox.v1 import sandbox_service_pb2

from services.common.kubernetes import KubernetesClient
from services.scheduler.pod_api import PodApi
from tests.bench import pod_creates
from tests.bench.measure import Figures, percentile
from tests.bench.pod_creates import raw_api, request
from tests.cluster.conftest import AGENT, BUSYBOX
from tests.support.payload import built_payload
from tests.support.pod_platform import PodPlatform, running_pod_platform
from tests.support.testbed import Testbed, busybox_root, running_testbed, write_image
from tests.support.wire import seconds, wire_to

_AT_ONCE: Final = 50
_HEARTBEAT_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 600.0
# The paper's four commands, for an image that has nothing but busybox; the last is in a login shell.
_COMMANDS: Final[tuple[tuple[str | tuple[str, ...], bool], ...]] = (
    (("busybox",), False),
    (("ls", "/"), False),
    (("head", "-n", "3", "/etc/passwd"), False),
    ("head -n 3 /etc/passwd", True),
)


def measure(*, full: bool) -> Figures:
    """The platform's overhead over a bare Pod, and how fast creates are admitted and heartbeats renewed."""
    figures: Figures = {}
    with running_testbed(node=False) as testbed, _platform(testbed, {"PAYLOAD_DELIVERY": "image-volume"}) as platform:
        figures |= pod_creates.admission(platform, 4000 if full else 2000)
        figures |= asyncio.run(pod_creates.end_to_end(platform, 1000 if full else 300))
        figures |= asyncio.run(_heartbeats(platform, 1000 if full else 200))
    with running_testbed(node=True) as testbed:
        _give_images(testbed)
        with _platform(testbed, {}) as platform:
            figures |= asyncio.run(_overhead(platform, 30 if full else 8))
            figures["at_once"] = asyncio.run(_lives(platform, _AT_ONCE))
    return figures


@contextlib.contextmanager
def _platform(testbed: Testbed, settings: dict[str, str]) -> Iterator[PodPlatform]:
    with (
        contextlib.redirect_stdout(sys.stderr),  # the services' logs, at its end
        tempfile.TemporaryDirectory(prefix="pods-") as folder,
        running_pod_platform(testbed, Path(folder), AGENT, settings) as platform,
    ):
        yield platform


def _give_images(testbed: Testbed) -> None:
    with tempfile.TemporaryDirectory(prefix="images-") as name:
        folder = Path(name)
        testbed.import_image(write_image(folder / "busybox.tar", BUSYBOX, busybox_root(folder / "root")))
        testbed.import_image(write_image(folder / "agent.tar", AGENT, built_payload(), entrypoint=["/init"]))


# On a control plane


async def _heartbeats(platform: PodPlatform, count: int) -> Figures:
    """Ids a second, so many in each call and four calls in flight."""
    async with wire_to(platform.endpoint, platform.api_key, image=BUSYBOX) as wire:
        spec = {"start_timeout": seconds(3600), "heartbeat_timeout": seconds(600)}
        made = await asyncio.gather(*(wire.create(**spec) for _ in range(count)))
        request = sandbox_service_pb2.HeartbeatRequest(sandbox_ids=[one.sandbox_id for one in made])
        renewed = 0
        ends = time.perf_counter() + _HEARTBEAT_SECONDS

        async def beat() -> None:
            nonlocal renewed
            while time.perf_counter() < ends:
                answer = await wire.call(wire.sandboxes.Heartbeat, request)
                renewed += len(made) - len(answer.missing_sandbox_ids)

        started = time.perf_counter()
        await asyncio.gather(*(beat() for _ in range(4)))
        taken = time.perf_counter() - started
    return {"heartbeat_ids_per_second": round(renewed / taken)}


# On a node


async def _overhead(platform: PodPlatform, count: int) -> Figures:
    """From create to READY, in turn with a Pod of the same image that nobody manages, from POST to Ready."""
    ours, bare = [], []
    async with raw_api(platform) as (client, api), _client(platform) as sandboxes:
        for number in range(count + 1):
            started = time.perf_counter()
            sandbox = await sandboxes.create(BUSYBOX)
            mine = time.perf_counter() - started
            await sandbox.delete()
            await sandbox.wait_ended(_PATIENCE_SECONDS)
            theirs = await _bare(client, api, f"bare-{number}")
            if number:  # the first is for warming up
                ours.append(mine * 1e3)
                bare.append(theirs * 1e3)
    ready, floor = percentile(ours, 0.5), percentile(bare, 0.5)
    return {"ready_p50": ready, "bare_pod_p50": floor, "overhead_p50": round(ready - floor, 2)}


async def _bare(client: KubernetesClient, api: PodApi, name: str) -> float:
    """Seconds until the API server says that it is ready."""
    container = {"name": "one", "image": BUSYBOX, "imagePullPolicy": "Never", "command": ["sleep", "1000"]}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    query = {"watch": "true", "fieldSelector": f"metadata.name={name}", "timeoutSeconds": "120"}
    async with asyncio.timeout(_PATIENCE_SECONDS), await request(client, query) as events:
        started = time.perf_counter()
        made = await api.create(pod)
        assert made is not None
        while not _is_ready(json.loads(await events.content.readline())["object"]):
            pass
        taken = time.perf_counter() - started
        await api.delete(name, grace_seconds=0, uid=made["metadata"]["uid"])
    return taken


def _is_ready(pod: Any) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


@contextlib.asynccontextmanager
async def _client(platform: PodPlatform) -> AsyncIterator[orchard.AsyncSandboxClient]:
    async with orchard.AsyncSandboxClient(platform.endpoint, api_key=platform.api_key) as client:
        yield client


async def _lives(platform: PodPlatform, count: int) -> Figures:
    """So many sandboxes at once, each create, four commands, delete."""
    creates: list[float] = []
    execs: list[float] = []
    failures: list[str] = []
    async with _client(platform) as client:

        async def life() -> None:
            try:
                started = time.perf_counter()
                sandbox = await client.create(BUSYBOX, timeout=_PATIENCE_SECONDS, start_timeout=_PATIENCE_SECONDS)
                creates.append((time.perf_counter() - started) * 1e3)
                for command, login in _COMMANDS:
                    started = time.perf_counter()
                    (await sandbox.exec(command, login_shell=login)).check()
                    execs.append((time.perf_counter() - started) * 1e3)
                await sandbox.delete()
            except orchard.OrchardError as error:
                failures.append(f"{type(error).__name__}: {error}")

        started = time.perf_counter()
        await asyncio.gather(*(life() for _ in range(count)))
        taken = time.perf_counter() - started
    for failure in failures[:3]:
        print(f"kubernetes failure: {failure}", file=sys.stderr)
    return {
        "count": count,
        "seconds": round(taken, 2),
        "create_mean": round(sum(creates) / max(1, len(creates)), 1),
        "exec_mean": round(sum(execs) / max(1, len(execs)), 1),
        "failures": len(failures),
    }
