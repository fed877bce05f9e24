"""Sandboxes on a real node, made as the scheduler makes them and with its rights; their agents are called directly."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orchard.sandbox.v1 import sandbox_pb2

from services.common import pods
from services.common.server import CHANNEL_OPTIONS
from services.common.states import State
from services.common.tokens import Signer, generate_key, public_pem
from services.scheduler.injection import Delivery, injection_of
from services.scheduler.pod_manifest import PodBuilder, PodProfile, PodTerms
from services.scheduler.records import Record
from tests.cluster.conftest import AGENT, BUSYBOX
from tests.integration.exec_agent.conftest import BACKSTOP, Client, new_id
from tests.support.testbed import NAMESPACE, Testbed

TENANT = "team"
KEY = generate_key()
PROFILE = PodProfile(public_keys_pem=public_pem(KEY).decode(), lifetime_ms=3_600_000)
TERMS = PodTerms(image=BUSYBOX, cpu=1.0, memory_bytes=256 << 20, disk_bytes=1 << 30, shm_bytes=64 << 20)


@dataclass(frozen=True)
class Sandbox:
    """A Pod with its agent."""

    testbed: Testbed
    name: str
    uid: str
    address: str

    @contextlib.asynccontextmanager
    async def client(self, signer: Signer | None = None) -> AsyncIterator[Client]:
        """Calls to the agent, once it answers as this sandbox, with a token of its own."""
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            request = health_pb2.HealthCheckRequest(service=self.uid)
            deadline = time.monotonic() + BACKSTOP
            while True:
                try:
                    await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True, timeout=5)
                    break
                except grpc.aio.AioRpcError:
                    assert time.monotonic() < deadline, self.log()
            yield Client(channel, (signer or Signer(KEY)).agent_token(self.uid), self.name)

    def log(self) -> str:
        return self.testbed.kubectl("-n", NAMESPACE, "logs", self.pod, "-c", pods.CONTAINER, check=False)

    def container(self) -> Mapping[str, Any]:
        """Status of the sandbox's container."""
        (found,) = self.testbed.get("-n", NAMESPACE, "pod", self.pod)["status"]["containerStatuses"]
        status: Mapping[str, Any] = found
        return status

    @property
    def ip(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def pod(self) -> str:
        return pods.pod_name(TENANT, self.name)


def start(
    cluster: Testbed,
    delivery: Delivery = Delivery.IMAGE_VOLUME,
    image: str = BUSYBOX,
    *,
    profile: PodProfile = PROFILE,
    terms: PodTerms = TERMS,
    **fields: Any,
) -> Sandbox:
    """A sandbox of a spec with these fields, as the scheduler makes it and with the scheduler's rights."""
    wanted = sandbox_pb2.SandboxSpec(image=image, **fields)
    name = f"s{new_id()[:8]}"
    record = Record(TENANT, name, "r", "hash", wanted.SerializeToString(), State.STARTING, create_ms=1, expire_ms=2)
    builder = PodBuilder(profile, injection_of(delivery, AGENT, "Never"))
    pod = builder.pod(record, replace(terms, image=image, user=wanted.user))
    as_scheduler(cluster, "create", "--validate=false", "-f", "-", stdin=json.dumps(pod))
    created = pod["metadata"]["name"]
    as_scheduler(cluster, "wait", "--for=jsonpath={.status.podIP}", f"pod/{created}", "--timeout=110s")
    found = cluster.get("-n", NAMESPACE, "pod", created)
    return Sandbox(cluster, name, found["metadata"]["uid"], f"{found['status']['podIP']}:{pods.AGENT_PORT}")


def as_scheduler(cluster: Testbed, *arguments: str, stdin: str = "") -> str:
    return cluster.kubectl("--kubeconfig", str(cluster.kubeconfig), "-n", NAMESPACE, *arguments, stdin=stdin)
