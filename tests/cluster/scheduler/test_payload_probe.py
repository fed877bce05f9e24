"""How the payload comes into Pods is found out by one that tries. The tests play its node, but for the last."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.common.kubernetes import KubernetesClient
from services.scheduler.injection import Delivery
from services.scheduler.payload_probe import find_delivery
from services.scheduler.pod_api import PodApi
from services.scheduler.throttle import Throttle
from tests.cluster.watcher.pods import Truth
from tests.support.testbed import NAMESPACE, Testbed

BACKSTOP = 110


@pytest.fixture
async def api(control_plane: Testbed, truth: Truth) -> AsyncIterator[PodApi]:
    api = PodApi(await KubernetesClient.connect(control_plane.kubeconfig), NAMESPACE, Throttle(1000, 1000))
    yield api
    await api.close()


async def the_probe(truth: Truth) -> dict[str, Any]:
    async with asyncio.timeout(BACKSTOP):
        while not (found := (await truth.call("GET"))["items"]):
            await asyncio.sleep(0.02)
    (pod,) = found
    return dict(pod)


async def answer(truth: Truth, api: PodApi, status: dict[str, Any], **options: Any) -> Delivery:
    finding = asyncio.ensure_future(find_delivery(api, "orchard.test/payload:1", "Never", {}, **options))
    try:
        pod = await the_probe(truth)
        await truth.status(pod["metadata"]["name"], **status)
        found = await asyncio.wait_for(finding, BACKSTOP)
    finally:
        finding.cancel()
        await asyncio.gather(finding, return_exceptions=True)
    assert (await truth.call("GET"))["items"] == []
    return found


def waiting(reason: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": "m"}}
    container = {"name": "orchard-agent", "state": state, "image": "", "imageID": "", "ready": False, "restartCount": 0}
    return {"phase": "Pending", "containerStatuses": [container]}


@pytest.mark.parametrize(
    ("status", "delivery"),
    [
        ({"phase": "Succeeded"}, Delivery.IMAGE_VOLUME),
        ({"phase": "Failed", "message": "m"}, Delivery.COPY),
        (waiting("CreateContainerError"), Delivery.COPY),
    ],
)
async def test_the_pods_end_says(truth: Truth, api: PodApi, status: dict[str, Any], delivery: Delivery) -> None:
    assert await answer(truth, api, status) is delivery


async def test_what_never_ends_does_not_work(truth: Truth, api: PodApi) -> None:
    assert await answer(truth, api, waiting("ContainerCreating"), try_seconds=15) is Delivery.COPY


async def test_it_is_tried_where_sandboxes_run(truth: Truth, api: PodApi) -> None:
    finding = asyncio.ensure_future(find_delivery(api, "p:1", "Never", {"nodeSelector": {"pool": "sandboxes"}}))
    pod = await the_probe(truth)
    assert pod["spec"]["nodeSelector"] == {"pool": "sandboxes"}
    # One that is removed by somebody else says nothing: another one is tried.
    await truth.delete(pod["metadata"]["name"])
    other = await the_probe(truth)
    assert other["metadata"]["uid"] != pod["metadata"]["uid"]
    await truth.status(other["metadata"]["name"], phase="Succeeded")
    assert await asyncio.wait_for(finding, BACKSTOP) is Delivery.IMAGE_VOLUME


async def test_one_that_is_stopped_leaves_nothing(truth: Truth, api: PodApi) -> None:
    finding = asyncio.ensure_future(find_delivery(api, "p:1", "Never", {}))
    await the_probe(truth)
    finding.cancel()
    await asyncio.gather(finding, return_exceptions=True)
    assert (await truth.call("GET"))["items"] == []


async def test_what_a_killed_scheduler_left_goes_once_it_has_ended(truth: Truth, api: PodApi) -> None:
    left, living = "payload-probe-left", "payload-probe-living"
    labels = {"app.kubernetes.io/managed-by": "orchard", "app.kubernetes.io/component": "payload-probe"}
    for name in (left, living):
        await truth.create(name)
        await truth.call("PATCH", f"/{name}", {"metadata": {"labels": labels}})
    await truth.create("sandbox")
    await truth.status("sandbox", phase="Succeeded")
    await truth.status(left, phase="Succeeded")
    finding = asyncio.ensure_future(find_delivery(api, "p:1", "Never", {}))
    known = {left, living, "sandbox"}
    async with asyncio.timeout(BACKSTOP):
        while not (made := [pod for pod in (await truth.call("GET"))["items"] if pod["metadata"]["name"] not in known]):
            await asyncio.sleep(0.02)
    # One that nobody waits for ends by itself, and the next scheduler's start finds it.
    assert made[0]["spec"]["activeDeadlineSeconds"] == 240
    await truth.status(made[0]["metadata"]["name"], phase="Succeeded")
    await asyncio.wait_for(finding, BACKSTOP)
    assert {pod["metadata"]["name"] for pod in (await truth.call("GET"))["items"]} == {living, "sandbox"}


async def test_a_cluster_without_image_volumes(truth: Truth, api: PodApi) -> None:
    """It refuses what it does not know, and says so at once."""
    placement = {"noSuchField": True}  # as `image` of a volume is to an older API server
    assert await asyncio.wait_for(find_delivery(api, "p:1", "Never", placement), BACKSTOP) is Delivery.COPY


async def test_on_a_real_node(node: Testbed, agent_image: str) -> None:
    api = PodApi(await KubernetesClient.connect(node.kubeconfig), NAMESPACE, Throttle(1000, 1000))
    try:
        assert await find_delivery(api, agent_image, "Never", {}) is Delivery.IMAGE_VOLUME
    finally:
        await api.close()
