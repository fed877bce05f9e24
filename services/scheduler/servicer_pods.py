"""SandboxSpec at the edge: what a Pod has of it."""

from __future__ import annotations

from typing import Final

from orchard.sandbox.v1 import sandbox_pb2

from services.scheduler.pod_manifest import PodTerms

_NETWORKS: Final = {
    sandbox_pb2.NETWORK_MODE_NONE: "none",
    sandbox_pb2.NETWORK_MODE_DNS_ONLY: "dns-only",
    sandbox_pb2.NETWORK_MODE_ALLOW_LIST: "allow-list",
    sandbox_pb2.NETWORK_MODE_OPEN: "open",
    sandbox_pb2.NETWORK_MODE_HOST: "host",
}


def pod_terms_of(spec: bytes) -> PodTerms:
    """Reads a serialised spec, defaults filled in."""
    parsed = sandbox_pb2.SandboxSpec.FromString(spec)
    resources = parsed.resources
    return PodTerms(
        image=parsed.image,
        cpu=resources.cpu,
        memory_bytes=resources.memory_bytes,
        disk_bytes=resources.disk_bytes,
        shm_bytes=resources.shm_bytes,
        pids=resources.pids,
        gpu=resources.gpu,
        network=_NETWORKS.get(parsed.network.mode, "unknown"),
        allow_list=parsed.network.allow_list,
        user=parsed.user,
        image_pull_secret=parsed.image_pull_secret,
        node_selector=dict(parsed.node_selector),
        runtime_class=parsed.runtime_class,
    )
