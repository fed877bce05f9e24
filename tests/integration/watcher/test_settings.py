"""What the watcher's process says of settings that cannot work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.platform import ROOT

PATIENCE = 110


def start(**settings: str) -> subprocess.CompletedProcess[str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith(("ORCHARD_", "KUBERNETES_"))}
    return subprocess.run(
        [sys.executable, "-m", "services.watcher"],
        cwd=ROOT,
        env={**own, "ORCHARD_LISTEN": "127.0.0.1:0", **settings},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_the_process_runtime_needs_the_nodes_address() -> None:
    done = start()
    assert done.returncode == 2
    assert "ORCHARD_NODE_ADDRESS" in done.stderr
    assert "unix:/path" in done.stderr


@pytest.mark.parametrize("setting", ["ORCHARD_RUNTIME=podman", "ORCHARD_NAMESPACE=No_Such"])
def test_each_setting_that_is_wrong_is_named(setting: str) -> None:
    name, _, value = setting.partition("=")
    done = start(**{"ORCHARD_NODE_ADDRESS": "unix:/n", name: value})
    assert done.returncode == 2
    assert name in done.stderr


def test_outside_of_a_cluster_a_kubeconfig_is_asked_for() -> None:
    done = start(ORCHARD_RUNTIME="kubernetes")
    assert done.returncode == 2
    assert "set ORCHARD_KUBECONFIG" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("", "cannot be used"),
        ("no: [yaml", "cannot be used"),
        ("apiVersion: v1\ncontexts: []\nclusters: []\nusers: []\ncurrent-context: nowhere\n", "nowhere"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    done = start(ORCHARD_RUNTIME="kubernetes", ORCHARD_KUBECONFIG=str(path))
    assert done.returncode == 2
    assert str(path) in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
