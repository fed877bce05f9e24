"""The whole platform as Pods: `kubectl apply -k` of the dev overlay, its images being here instead of in a registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from orchard import AsyncSandboxClient

from tests.cluster.conftest import BUSYBOX
from tests.support.store_images import POSTGRES, VALKEY, import_store_images
from tests.support.testbed import NAMESPACE, ROOT, SERVICES, Testbed
from tests.support.wire import Wire, wire_to

BUILD_SECONDS = 900
START_SECONDS = 420
PORT = 7411


@dataclass(frozen=True)
class Platform:
    """What the tests of tests/e2e, too, know of a platform: where it is, and a key of an administrator."""

    testbed: Testbed
    endpoint: str
    api_key: str

    def kubectl(self, *arguments: str) -> str:
        """In the namespace of the services."""
        return self.testbed.kubectl("-n", SERVICES, *arguments)


@pytest.fixture(scope="module")
def platform(node: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("platform")
    built = [sys.executable, ROOT / "scripts/build-images"]
    archive = subprocess.run(built, check=True, stdout=subprocess.PIPE, text=True, timeout=BUILD_SECONDS).stdout.strip()
    node.import_image(Path(archive))
    import_store_images(node, folder)
    overlay = overlay_of_this_testbed(folder / "kustomize")
    try:
        node.kubectl("apply", "-k", str(overlay))
        wait_available(node)
        made = node.kubectl(
            *("-n", SERVICES, "exec", "deployment/gateway", "-c", "gateway", "--"),
            *(
                "python3",
                "-m",
                "services.gateway",
                "create-key",
                "--tenant",
                "team",
                "--role",
                "user",
                "--role",
                "admin",
            ),
        )
        address = node.get("-n", SERVICES, "service/gateway")["spec"]["clusterIP"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ORCHARD_INSECURE", "1")  # the way to a Service of this machine is in the clear
            yield Platform(node, f"{address}:{PORT}", json.loads(made)["secret"])
    finally:
        kinds = "deployments,statefulsets,services,secrets,configmaps"
        node.kubectl("-n", SERVICES, "delete", kinds, "-l", "app.kubernetes.io/part-of=orchard")
        for namespace in (SERVICES, NAMESPACE):
            node.clear(namespace)


def overlay_of_this_testbed(kustomize: Path) -> Path:
    """The dev overlay with the stores' images that are here, the resolver outside, and room for Pods on one machine."""
    shutil.copytree(ROOT / "deploy/kustomize", kustomize, ignore=shutil.ignore_patterns("secrets"))
    subprocess.run([kustomize / "overlays/dev/make-secrets"], check=True, env={**os.environ, "HOME": str(kustomize)})
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "orchard-sandboxes", "namespace": SERVICES},
        "data": {"ORCHARD_POD_NAMESERVERS": '["203.0.113.53"]', "ORCHARD_POD_CPU_REQUEST_SHARE": "0.01"},
    }
    resolver = [{"op": "replace", "path": "/spec/egress/0/to", "value": [{"ipBlock": {"cidr": "203.0.113.53/32"}}]}]
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../dev"],
        "images": [
            {"name": public, "newName": here.partition(":")[0], "newTag": here.partition(":")[2]}
            for public, here in (("postgres", POSTGRES), ("valkey/valkey", VALKEY))
        ],
        "patches": [
            {"patch": json.dumps(settings)},
            {"target": {"kind": "NetworkPolicy", "name": "names"}, "patch": json.dumps(resolver)},
        ],
    }
    folder = kustomize / "overlays/testbed"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(json.dumps(overlay))  # JSON is YAML
    return folder


def wait_available(node: Testbed) -> None:
    """Until every service and store is; what they say if that takes too long."""
    deadline = time.monotonic() + START_SECONDS
    names = node.kubectl("-n", SERVICES, "get", "statefulset,deployment", "-o", "name").split()
    for name in names:
        while True:
            try:
                node.kubectl("-n", SERVICES, "rollout", "status", name, "--timeout=110s")
                break
            except AssertionError as error:
                if time.monotonic() > deadline:
                    raise AssertionError(f"{name}: {error}\n{what_they_say(node)}") from error


def what_they_say(node: Testbed) -> str:
    selected = ("-l", "app.kubernetes.io/part-of=orchard", "--all-containers", "--prefix", "--tail=20")
    pods = node.kubectl("-n", SERVICES, "get", "pods", check=False)
    return pods + node.kubectl("-n", SERVICES, "logs", *selected, check=False)


@pytest.fixture
async def wire(platform: Platform) -> AsyncIterator[Wire]:
    async with wire_to(platform.endpoint, platform.api_key, image=BUSYBOX) as wire:
        yield wire


@pytest.fixture
async def client(platform: Platform) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient(platform.endpoint, api_key=platform.api_key, retry_timeout=300) as client:
        yield client
