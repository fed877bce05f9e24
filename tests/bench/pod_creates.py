"""Creates of sandboxes that are Pods: how many are admitted, and how many become Pods, beside bare POSTs of those."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import grpc.aio
import redis.asyncio as redis
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from orchard.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc

from services.common.kubernetes import KubernetesClient
from services.common.states import State
from services.common.tokens import PRINCIPAL_KEY, Principal, Signer
from services.scheduler.injection import Delivery, injection_of
from services.scheduler.pod_api import PodApi
from services.scheduler.pod_manifest import PodBuilder, PodProfile, PodTerms
from services.scheduler.records import Record
from services.scheduler.throttle import Throttle
from tests.bench.measure import Figures
from tests.cluster.conftest import AGENT, BUSYBOX
from tests.support.pod_platform import TENANT, PodPlatform, ValkeyProcess
from tests.support.services import ServiceProcess, running
from tests.support.testbed import NAMESPACE
from tests.support.wire import Wire, seconds, wire_to

_IN_FLIGHT: Final = 32  # of two schedulers
_CLIENTS: Final = 64
_PATIENCE_SECONDS: Final = 600.0
_TICK_MS: Final = 1000 / os.sysconf("SC_CLK_TCK")
_OF_THE_CLUSTER: Final = ("kube-apiserver", "etcd")


class _Processors:
    """Processor time by stage from its making on: this process (the client), each service, Valkey, the API server."""

    def __init__(self, services: Mapping[int, str]) -> None:
        self._services = services
        self._before = self._read()

    def each(self, operations: int) -> Figures:
        """Milliseconds for each of so many operations."""
        spent = self._read()
        spent.subtract(self._before)
        return {stage: round(value / operations, 2) for stage, value in sorted(spent.items())}

    def _read(self) -> Counter[str]:
        spent: Counter[str] = Counter()
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                name, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
                name, fields = name.partition("(")[2], rest.split()
                stage = self._services.get(int(folder.name)) or (name if name in _OF_THE_CLUSTER else "")
                stage = "client" if int(folder.name) == os.getpid() else stage
                if stage:
                    spent[stage] += (int(fields[11]) + int(fields[12])) * _TICK_MS  # type: ignore[assignment]
        return spent


# Admission


def admission(platform: PodPlatform, count: int) -> Figures:
    """Creates a second that one scheduler carries to the very POST: checked, queued, recorded, leased, taken in turn
    and within the quota, their Pod made and the record of what it became written. With many clients, a Valkey of its
    own, and the platform's other services at rest.
    """
    with tempfile.TemporaryDirectory(prefix="admission-") as name:
        folder = Path(name)
        valkey = ValkeyProcess(folder)
        try:
            asyncio.run(valkey.start())
            settings = {
                "RUNTIME": "kubernetes",
                "KUBECONFIG": str(platform.testbed.kubeconfig),
                "REDIS_URL": valkey.url,
                "WATCHER_ADDRESS": platform.watchers[0].address,
                "PUBLIC_KEYS_FILE": str(platform.folder / "public-keys.pem"),
                "PAYLOAD_IMAGE": AGENT,
                "PAYLOAD_DELIVERY": "image-volume",
                # Nobody has a Pod here.
                "GRACE_SECONDS": "3600",
            }
            module = "tests.bench.scheduler_without_posts"
            scheduler = ServiceProcess(module, folder / "scheduler.sock", settings)
            with running(scheduler):
                return asyncio.run(_admission(platform, scheduler, valkey, count))
        finally:
            valkey.kill()


async def _admission(platform: PodPlatform, scheduler: ServiceProcess, valkey: ValkeyProcess, count: int) -> Figures:
    await scheduler.serving()
    key = load_pem_private_key((platform.folder / "signing-key.pem").read_bytes(), None)
    assert isinstance(key, Ed25519PrivateKey)
    token = Signer(key).principal_token(Principal(TENANT, "bench", frozenset({"user"})))
    async with (
        grpc.aio.insecure_channel(scheduler.address) as channel,
        redis.Redis.from_url(valkey.url) as store,
        asyncio.timeout(_PATIENCE_SECONDS),
    ):
        create: Any = sandbox_service_pb2_grpc.SandboxServiceStub(channel).CreateSandbox
        spec = sandbox_pb2.SandboxSpec(image=BUSYBOX, start_timeout=seconds(3600))
        request = sandbox_service_pb2.CreateSandboxRequest(spec=spec)

        async def admitted(number: int) -> float:
            """So many; returns how many a second."""
            left = iter(range(number))

            async def client() -> None:
                for _ in left:
                    await create(request, metadata=((PRINCIPAL_KEY, token),))

            started = time.perf_counter()
            await asyncio.gather(*(client() for _ in range(_CLIENTS)))
            while await store.zcard(f"orchard:queue:{TENANT}") or await store.zcard("orchard:claimed"):
                await asyncio.sleep(0.005)
            return number / (time.perf_counter() - started)

        await admitted(200)
        processors = _Processors({scheduler.pid: "scheduler", valkey.pid: "valkey"})
        rate = await admitted(count)
        spent = processors.each(count)
    return {
        "admission_per_second": round(rate, 1),
        "admission_cpu_each": {stage: spent[stage] for stage in ("client", "scheduler", "valkey")},
    }


# To Pods


async def end_to_end(platform: PodPlatform, count: int) -> Figures:
    """From the first call to the last Pod object, beside as many bare POSTs of the same Pods in the same run.

    First with all of it on the same cores, then with the API server and etcd on one of their own, as they have machines
    of their own wherever it matters (`apart_`): there what we do takes nothing from them.
    """
    shared = await _beside_posts(platform, count)
    with _cluster_apart(_named(platform)):
        apart = await _beside_posts(platform, count)
    return shared | {f"apart_{name}": value for name, value in apart.items() if not name.endswith("_cpu_each")}


def _named(platform: PodPlatform) -> dict[int, str]:
    return {
        platform.gateway.pid: "gateway",
        platform.valkey.pid: "valkey",
        **dict.fromkeys([service.pid for service in platform.schedulers], "schedulers"),
        **dict.fromkeys([service.pid for service in platform.watchers], "watchers"),
    }


@contextlib.contextmanager
def _cluster_apart(services: Mapping[int, str]) -> Iterator[None]:
    """For the time of the context API server and etcd have one core, and this process and the services the others."""
    cores = os.sched_getaffinity(0)
    theirs = {min(cores)}
    cluster = [int(folder.name) for folder in Path("/proc").iterdir() if _name_of(folder) in _OF_THE_CLUSTER]
    try:
        for pid in cluster:
            _pin(pid, theirs)
        for pid in (os.getpid(), *services):
            _pin(pid, cores - theirs or cores)
        yield
    finally:
        for pid in (os.getpid(), *services, *cluster):
            _pin(pid, cores)


def _name_of(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return (folder / "comm").read_text().strip()
    return ""


def _pin(pid: int, cores: set[int]) -> None:
    """All threads; those that begin later are where the one is that begins them."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


async def _beside_posts(platform: PodPlatform, count: int) -> Figures:
    named = _named(platform)
    await _posts(platform, 50, named)
    raw, raw_spent = await _posts(platform, count, named)
    async with wire_to(platform.endpoint, platform.api_key, image=BUSYBOX) as wire:
        await _creates(platform, wire, 50, named)
        made, spent = await _creates(platform, wire, count, named)
    return {
        "creates_per_second": round(made, 1),
        "raw_per_second": round(raw, 1),
        "create_share_of_raw": round(made / raw, 3),
        "create_cpu_each": spent,
        "raw_cpu_each": {stage: raw_spent[stage] for stage in ("client", *_OF_THE_CLUSTER)},
    }


async def _posts(platform: PodPlatform, count: int, named: Mapping[int, str]) -> tuple[float, Figures]:
    """Pods a second, and the processor time of each."""
    pods = list(_bare_pods(count))
    slots = asyncio.Semaphore(_IN_FLIGHT)
    async with raw_api(platform) as (_client, api):

        async def post(pod: Any) -> None:
            async with slots:
                await api.create(pod)

        processors = _Processors(named)
        started = time.perf_counter()
        await asyncio.gather(*(post(pod) for pod in pods))
        taken = time.perf_counter() - started
        spent = processors.each(count)
    await asyncio.to_thread(_remove, platform, "bench=raw")
    return count / taken, spent


def _bare_pods(count: int) -> Iterator[dict[str, Any]]:
    profile = PodProfile(public_keys_pem="PEM", lifetime_ms=3_600_000, cpu_request_share=0.01)
    builder = PodBuilder(profile, injection_of(Delivery.IMAGE_VOLUME, AGENT, "Never"))
    terms = PodTerms(image=BUSYBOX, cpu=1.0, memory_bytes=1 << 28, disk_bytes=1 << 30, shm_bytes=64 << 20)
    spec = sandbox_pb2.SandboxSpec(image=BUSYBOX).SerializeToString()
    run = secrets.token_hex(4)
    for number in range(count):
        name = f"{run}-{number}"
        record = Record("raw", name, "r", "h", spec, State.STARTING, create_ms=1, expire_ms=1 << 50)
        pod = builder.pod(record, terms)
        # No label of ours, so that nobody has work with them but the API server.
        pod["metadata"]["labels"] = {"bench": "raw"}
        yield pod


def _remove(platform: PodPlatform, selector: str) -> None:
    """By one request: kubectl would send one for each of them, in turn."""
    query = urlencode({"labelSelector": selector, "gracePeriodSeconds": 0})
    platform.testbed.kubectl("delete", "--raw", f"/api/v1/namespaces/{NAMESPACE}/pods?{query}")


async def _creates(platform: PodPlatform, wire: Wire, count: int, named: Mapping[int, str]) -> tuple[float, Figures]:
    """Creates a second, through gateway, queue and scheduler, and the processor time of each."""
    processors = _Processors(named)
    started = time.perf_counter()
    made = await asyncio.gather(*(wire.create(start_timeout=seconds(3600)) for _ in range(count)))
    async with raw_api(platform) as (client, _api), asyncio.timeout(_PATIENCE_SECONDS):
        while await _pods(client) < count:
            await asyncio.sleep(0.02)
        taken = time.perf_counter() - started
        spent = processors.each(count)
        await asyncio.gather(*(wire.delete(one.sandbox_id) for one in made))
        while await _pods(client):
            await asyncio.sleep(0.1)
    return count / taken, spent


# The API server


@contextlib.asynccontextmanager
async def raw_api(platform: PodPlatform) -> AsyncIterator[tuple[KubernetesClient, PodApi]]:
    """With the scheduler's rights, and without its throttle."""
    client = await KubernetesClient.connect(platform.testbed.kubeconfig)
    try:
        yield client, PodApi(client, NAMESPACE, Throttle(1e6, 1_000_000))
    finally:
        await client.close()


async def request(client: KubernetesClient, query: Mapping[str, str]) -> Any:
    """A GET of the Pods."""
    headers = {"Accept": "application/json"}
    return await client.send("GET", f"/api/v1/namespaces/{NAMESPACE}/pods", query=query, headers=headers)


async def _pods(client: KubernetesClient) -> int:
    """How many there are, without reading them."""
    async with await request(client, {"limit": "1"}) as response:
        listed = json.loads(await response.read())
    return len(listed["items"]) + int(listed["metadata"].get("remainingItemCount", 0))
