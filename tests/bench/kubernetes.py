"""Sandboxes that are Pods, on the testbed of tests/cluster: our services beside a real API server and a real node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import orchard
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2

from services.common.kubernetes import KubernetesClient
from services.common.states import State
from services.scheduler.injection import Delivery, injection_of
from services.scheduler.pod_api import PodApi
from services.scheduler.pod_manifest import PodBuilder, PodProfile, PodTerms
from services.scheduler.records import Record
from services.scheduler.throttle import Throttle
from tests.bench.measure import Figures, percentile
from tests.cluster.conftest import AGENT, BUSYBOX
from tests.support.payload import built_payload
from tests.support.pod_platform import PodPlatform, running_pod_platform
from tests.support.testbed import NAMESPACE, Testbed, busybox_root, running_testbed, write_image
from tests.support.wire import Wire, seconds, wire_to

_IN_FLIGHT: Final = 32  # of two schedulers
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
        figures |= asyncio.run(_admission(platform, 1000 if full else 200))
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


@contextlib.asynccontextmanager
async def _raw(platform: PodPlatform) -> AsyncIterator[tuple[KubernetesClient, PodApi]]:
    """The API server with the scheduler's rights, and without its throttle."""
    client = await KubernetesClient.connect(platform.testbed.kubeconfig)
    try:
        yield client, PodApi(client, NAMESPACE, Throttle(1e6, 1_000_000))
    finally:
        await client.close()


# Admission


async def _admission(platform: PodPlatform, count: int) -> Figures:
    """From the first call to the last Pod object, beside as many bare POSTs of the same Pods in the same run."""
    await _raw_posts(platform, 50)
    raw = await _raw_posts(platform, count)
    async with wire_to(platform.endpoint, platform.api_key, image=BUSYBOX) as wire:
        await _end_to_end(platform, wire, 50)
        admitted = await _end_to_end(platform, wire, count)
    return {
        "admission_per_second": round(admitted, 1),
        "raw_per_second": round(raw, 1),
        "create_share_of_raw": round(admitted / raw, 3),
    }


async def _raw_posts(platform: PodPlatform, count: int) -> float:
    """Pods a second."""
    profile = PodProfile(public_keys_pem="PEM", lifetime_ms=3_600_000, cpu_request_share=0.01)
    builder = PodBuilder(profile, injection_of(Delivery.IMAGE_VOLUME, AGENT, "Never"))
    terms = PodTerms(image=BUSYBOX, cpu=1.0, memory_bytes=1 << 28, disk_bytes=1 << 30, shm_bytes=64 << 20)
    spec = sandbox_pb2.SandboxSpec(image=BUSYBOX).SerializeToString()
    run = secrets.token_hex(4)
    records = [
        Record("raw", f"{run}-{n}", "r", "h", spec, State.STARTING, create_ms=1, expire_ms=1 << 50)
        for n in range(count)
    ]
    made = [builder.pod(record, terms) for record in records]
    for pod in made:
        # No label of ours, so that nobody has work with them but the API server.
        pod["metadata"]["labels"] = {"bench": "raw"}
    slots = asyncio.Semaphore(_IN_FLIGHT)
    async with _raw(platform) as (_client, api):

        async def post(pod: Any) -> None:
            async with slots:
                await api.create(pod)

        started = time.perf_counter()
        await asyncio.gather(*(post(pod) for pod in made))
        taken = time.perf_counter() - started
    await asyncio.to_thread(_remove, platform, "bench=raw")
    return count / taken


def _remove(platform: PodPlatform, selector: str) -> None:
    platform.testbed.kubectl("-n", NAMESPACE, "delete", "pods", "-l", selector, "--force", "--grace-period=0")


async def _end_to_end(platform: PodPlatform, wire: Wire, count: int) -> float:
    """Creates a second, through gateway, queue and scheduler."""
    started = time.perf_counter()
    made = await asyncio.gather(*(wire.create(start_timeout=seconds(3600)) for _ in range(count)))
    async with _raw(platform) as (client, _api), asyncio.timeout(_PATIENCE_SECONDS):
        while await _pods(client) < count:
            await asyncio.sleep(0.02)
    taken = time.perf_counter() - started
    await asyncio.gather(*(wire.delete(one.sandbox_id) for one in made))
    async with _raw(platform) as (client, _api), asyncio.timeout(_PATIENCE_SECONDS):
        while await _pods(client):
            await asyncio.sleep(0.1)
    return count / taken


async def _pods(client: KubernetesClient) -> int:
    """How many there are, without reading them."""
    listed = json.loads(await _get(client, {"limit": "1"}))
    return len(listed["items"]) + int(listed["metadata"].get("remainingItemCount", 0))


async def _get(client: KubernetesClient, query: dict[str, str]) -> bytes:
    async with await _request(client, query) as response:
        body: bytes = await response.read()
        return body


async def _request(client: KubernetesClient, query: dict[str, str]) -> Any:
    api = client.api
    headers = {"Accept": "application/json", "User-Agent": api.user_agent}
    await api.update_params_for_auth(headers, [], ["BearerToken"])
    return await api.rest_client.request(
        "GET",
        f"{api.configuration.host}/api/v1/namespaces/{NAMESPACE}/pods",
        query_params=query,
        headers=headers,
        _preload_content=False,
    )


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
    async with _raw(platform) as (client, api), _client(platform) as sandboxes:
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
    async with asyncio.timeout(_PATIENCE_SECONDS), await _request(client, query) as events:
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
