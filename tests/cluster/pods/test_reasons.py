"""Why a sandbox does not start, or ended, in the words of the cluster's own parts and within moments."""

from __future__ import annotations

import asyncio
import json

import orchard

from services.common import pods
from tests.cluster.conftest import BUSYBOX
from tests.support.pod_platform import TENANT, PodPlatform
from tests.support.testbed import NAMESPACE

BACKSTOP = 110
FAILED = orchard.SandboxState.FAILED


def node_of(platform: PodPlatform) -> str:
    (node,) = platform.testbed.get("nodes")["items"]
    return str(node["metadata"]["name"])


async def test_a_sandbox_that_fits_no_node_says_so_long_before_it_is_given_up(
    platform: PodPlatform, client: orchard.AsyncSandboxClient
) -> None:
    node = node_of(platform)
    platform.testbed.kubectl("cordon", node)
    try:
        # Longer than this test may take: what is told is told while it waits.
        waiting = await client.create(BUSYBOX, wait=False, start_timeout=3600)
        async with asyncio.timeout(BACKSTOP):
            while (info := await waiting.refresh()).reason != "UNSCHEDULABLE":
                await asyncio.sleep(0.1)
        assert info.state is orchard.SandboxState.STARTING
        assert "0/1 nodes are available: 1 node(s) were unschedulable." in info.message
        given_up = await client.create(BUSYBOX, wait=False, start_timeout=3)
        ended = await given_up.wait_ended(BACKSTOP)
        assert (ended.state, ended.reason) == (FAILED, "UNSCHEDULABLE")
        assert "were unschedulable" in ended.message
    finally:
        platform.testbed.kubectl("uncordon", node)
    # And it starts when there is room.
    assert (await waiting.wait_ready(BACKSTOP)).reason == ""
    await waiting.delete()


async def test_one_that_is_evicted_says_so(platform: PodPlatform, client: orchard.AsyncSandboxClient) -> None:
    """As `kubectl drain` and autoscalers do it; what ran there has no result."""
    sandbox = await client.create(BUSYBOX)
    running = asyncio.ensure_future(sandbox.exec("sleep 1000"))
    name = pods.pod_name(TENANT, sandbox.sandbox_id)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    platform.testbed.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    ended = await sandbox.wait_ended(BACKSTOP)
    assert (ended.state, ended.reason) == (FAILED, "EVICTED")
    (result,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(result, orchard.SandboxLost)


async def test_one_that_takes_more_disk_than_it_has_says_so(client: orchard.AsyncSandboxClient) -> None:
    """However its end is told: the kubelet has said why it ends a Pod before the Pod's own end, or not."""
    other, *greedy = await asyncio.gather(*(client.create(BUSYBOX, disk="32MiB") for _ in range(5)))
    written = await asyncio.gather(
        *(one.exec("head -c 100000000 /dev/zero >/root/large; sync", check=True) for one in greedy),
        return_exceptions=True,
    )
    # The kubelet may look while one still writes.
    assert {type(one) for one in written} <= {orchard.ExecResult, orchard.SandboxLost}, written
    for ended in await asyncio.gather(*(one.wait_ended(BACKSTOP) for one in greedy)):
        assert (ended.state, ended.reason) == (FAILED, "EVICTED"), ended.message
        assert "ephemeral local storage usage exceeds" in ended.message
    assert (await other.exec("echo alive")).stdout == "alive\n"
    await other.delete()


async def test_one_whose_node_is_taken_away_says_so(platform: PodPlatform, client: orchard.AsyncSandboxClient) -> None:
    sandbox = await client.create(BUSYBOX)
    taint = ("taint", "node", node_of(platform))
    platform.testbed.kubectl(*taint, "test/gone=yes:NoExecute")
    try:
        ended = await sandbox.wait_ended(BACKSTOP)
        assert (ended.state, ended.reason) == (FAILED, "NODE_LOST")
        assert ended.message
    finally:
        platform.testbed.kubectl(*taint, "test/gone:NoExecute-")
    async with await client.create(BUSYBOX) as after:
        assert (await after.exec("echo on")).stdout == "on\n"
