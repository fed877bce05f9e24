"""Public keys on running Pods, kept in step with the scheduler's rights on a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.common import pods
from services.common.errors import FailedPreconditionError
from services.common.kubernetes import KubernetesClient
from services.common.tokens import PublicKeysFile, generate_key, public_pem
from services.scheduler import pod_api
from services.scheduler.pod_api import PodApi
from services.scheduler.pod_keys import PodKeys
from services.scheduler.throttle import Throttle
from tests.cluster.watcher.pods import Truth
from tests.support.testbed import NAMESPACE, Testbed

PEM = public_pem(generate_key()).decode()


@pytest.fixture
async def api(control_plane: Testbed) -> AsyncIterator[PodApi]:
    api = PodApi(await KubernetesClient.connect(control_plane.kubeconfig), NAMESPACE, Throttle(1000, 1000))
    yield api
    await api.close()


@pytest.fixture
def keys(api: PodApi, tmp_path: Path) -> PodKeys:
    file = tmp_path / "keys.pem"
    file.write_text(PEM)
    return PodKeys(PublicKeysFile(file), api, lambda _pem: None)


async def shown(truth: Truth, name: str) -> str | None:
    annotations: dict[str, str] = (await truth.call("GET", f"/{name}"))["metadata"]["annotations"]
    return annotations.get(pods.PUBLIC_KEYS)


async def test_without_pods_nothing_is_shown(truth: Truth, keys: PodKeys) -> None:
    assert await keys.show(PEM) == 0


async def test_one_that_is_refused_keeps_no_other_from_it(control_plane: Testbed, truth: Truth, keys: PodKeys) -> None:
    names = [f"p{number}" for number in range(4)]
    for name in names:
        await truth.create(name)
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["pods"]}
    policy: dict[str, Any] = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": "keep-p1"},
        "spec": {
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [{"expression": "object.metadata.name != 'p1'", "message": "p1 stays as it is"}],
        },
    }
    binding = {
        **policy,
        "kind": "ValidatingAdmissionPolicyBinding",
        "spec": {"policyName": "keep-p1", "validationActions": ["Deny"]},
    }
    patch = ("-n", NAMESPACE, "patch", "pod", "p1", "--type=merge", "-p", '{"metadata":{"annotations":{"a":"b"}}}')
    control_plane.apply(policy, binding)
    try:
        async with asyncio.timeout(110):  # it takes a moment to be in force
            while control_plane.kubectl(*patch, "--dry-run=server", check=False):
                await asyncio.sleep(0.1)
        with pytest.raises(FailedPreconditionError, match="p1 stays as it is"):
            await keys.show(PEM)
    finally:
        for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
            control_plane.kubectl("delete", kind, "keep-p1")
        async with asyncio.timeout(110):  # and to be out of it
            while not control_plane.kubectl(*patch, "--dry-run=server", check=False):
                await asyncio.sleep(0.1)
    assert [await shown(truth, name) for name in names] == [PEM, None, PEM, PEM]


async def test_every_sandboxs_pod_shows_the_keys_page_by_page(
    truth: Truth, keys: PodKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_api, "_PAGE", "2")
    names = [f"p{number}" for number in range(5)]
    for name in names:
        await truth.create(name)
    assert await keys.show(PEM) == 5
    assert {await shown(truth, name) for name in names} == {PEM}
    # Who has them is left alone.
    assert await keys.show(PEM) == 0
    await truth.call("PATCH", "/p3", {"metadata": {"annotations": {pods.PUBLIC_KEYS: "older"}}})
    assert await keys.show(PEM) == 1
    assert await shown(truth, "p3") == PEM
