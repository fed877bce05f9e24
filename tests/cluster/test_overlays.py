"""The overlays before a real API server: it takes every object, and no service's Pod needs a right of the host."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.testbed import ROOT, Testbed, run

SERVICES = {"gateway", "scheduler", "watcher", "trajectories", "judge"}


@pytest.fixture
def kustomize(tmp_path: Path) -> Path:
    folder = shutil.copytree(
        ROOT / "deploy/kustomize", tmp_path / "kustomize", ignore=shutil.ignore_patterns("secrets")
    )
    subprocess.run([folder / "overlays/dev/make-secrets"], check=True)
    return folder


@pytest.mark.parametrize("overlay", ["dev", "production"])
def test_the_api_server_takes_every_object(control_plane: Testbed, kustomize: Path, overlay: str) -> None:
    options = ("--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts")
    done = run("kubectl", "apply", *options, "-k", str(kustomize / "overlays" / overlay), folder=control_plane.folder)
    assert done.returncode == 0, done.stderr
    # Pods that the namespace's admission would refuse are warned of here.
    assert "violate PodSecurity" not in done.stderr
    for name in SERVICES:
        assert f"deployment.apps/{name} serverside-applied" in done.stdout


@pytest.mark.parametrize("overlay", ["dev", "production"])
def test_network_policies_are_there_before_the_first_pod(control_plane: Testbed, kustomize: Path, overlay: str) -> None:
    """An apply that ends in the middle leaves nothing that runs without them."""
    kinds = [one["kind"] for one in rendered(control_plane, kustomize / "overlays" / overlay)]
    policies = [place for place, kind in enumerate(kinds) if kind == "NetworkPolicy"]
    assert len(policies) >= 8
    assert policies[-1] < min(kinds.index("Deployment"), kinds.index("Service"))
    assert kinds[0] == "Namespace"


def test_production_has_what_many_nodes_need(control_plane: Testbed, kustomize: Path) -> None:
    objects = rendered(control_plane, kustomize / "overlays/production")
    deployments = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "Deployment"}
    assert set(deployments) == SERVICES
    budgets = {o["metadata"]["name"] for o in objects if o["kind"] == "PodDisruptionBudget"}
    assert budgets == SERVICES | {"sandboxes"}
    scaled = {o["spec"]["scaleTargetRef"]["name"]: o["spec"] for o in objects if o["kind"] == "HorizontalPodAutoscaler"}
    for name, spec in deployments.items():
        assert (scaled[name]["minReplicas"] if name in scaled else spec["replicas"]) >= 2
        pod = spec["template"]["spec"]
        assert pod["priorityClassName"] == "orchard-services"
        assert {"nodeAffinity", "podAntiAffinity"} <= set(pod["affinity"])
    # One name, wherever it stands: of the agent's image the scheduler knows by its environment.
    text = json.dumps(objects)
    assert "orchard.local" not in text
    assert "registry.example/orchard/agent:" in text
    assert not [o for o in objects if o["kind"] in ("Secret", "StatefulSet")]


def test_nobody_has_a_right_that_it_does_not_use(control_plane: Testbed, kustomize: Path) -> None:
    for overlay in ("dev", "production"):
        objects = rendered(control_plane, kustomize / "overlays" / overlay)
        specs = {o["metadata"]["name"]: o["spec"]["template"]["spec"] for o in objects if o["kind"] == "Deployment"}
        mounting = {name for name, spec in specs.items() if spec["automountServiceAccountToken"]}
        assert mounting == {"scheduler", "watcher"}


def test_all_connections_fit_postgresqls_default(control_plane: Testbed, kustomize: Path) -> None:
    objects = rendered(control_plane, kustomize / "overlays/production")
    scaled = {o["spec"]["scaleTargetRef"]["name"]: o["spec"] for o in objects if o["kind"] == "HorizontalPodAutoscaler"}
    total = 0
    for deployment in (o for o in objects if o["kind"] == "Deployment"):
        name, spec = deployment["metadata"]["name"], deployment["spec"]
        env = {one["name"]: one.get("value") for one in spec["template"]["spec"]["containers"][0]["env"]}
        if "ORCHARD_DATABASE_URL" in env:
            most = scaled[name]["maxReplicas"] if name in scaled else spec["replicas"]
            surge = spec.get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", math.ceil(most / 4))
            total += (most + surge) * int(env["ORCHARD_DATABASE_CONNECTIONS"])
    assert 0 < total <= 97  # of 100, 3 are the administrator's
    assert f": {total}." in (kustomize / "overlays/production/autoscaling.yaml").read_text()


def rendered(testbed: Testbed, folder: Path) -> list[dict[str, Any]]:
    dry = testbed.kubectl("apply", "-k", str(folder), "--dry-run=client", "-o", "json")
    objects: list[dict[str, Any]] = json.loads(dry)["items"]
    return objects
