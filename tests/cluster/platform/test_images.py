"""What `make images` packs: every service and the agent, small, and for nobody's root to run."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.platform.conftest import BUILD_SECONDS
from tests.support.testbed import ROOT

SERVICES = {"gateway", "scheduler", "watcher", "trajectories", "judge"}
MOST_BYTES = {"services": 80 << 20, "agent": 40 << 20}
"""Compressed, of all that a node of them pulls."""
pytestmark = pytest.mark.timeout(BUILD_SECONDS + 300)
NEVER = {"sh", "bash", "dash", "busybox", "apt", "apt-get", "dpkg", "pip", "pip3", "gcc", "cc", "ld"}


@pytest.fixture(scope="module")
def archive() -> Iterator[tarfile.TarFile]:
    built = [sys.executable, ROOT / "scripts/build-images"]
    path = subprocess.run(built, check=True, stdout=subprocess.PIPE, text=True, timeout=BUILD_SECONDS).stdout.strip()
    with tarfile.open(Path(path)) as archive:
        yield archive


def blob(archive: tarfile.TarFile, digest: str) -> bytes:
    file = archive.extractfile(f"blobs/{digest.replace(':', '/')}")
    assert file is not None
    return file.read()


def manifests(archive: tarfile.TarFile) -> dict[str, dict[str, Any]]:
    """By the last part of the image's name."""
    file = archive.extractfile("index.json")
    assert file is not None
    found = {}
    for one in json.load(file)["manifests"]:
        name = one["annotations"]["io.containerd.image.name"].rpartition("/")[2].partition(":")[0]
        found[name] = json.loads(blob(archive, one["digest"]))
    return found


def names_in(archive: tarfile.TarFile, layer: dict[str, Any]) -> set[str]:
    """Of every file of a layer."""
    data = blob(archive, layer["digest"])
    if layer["mediaType"].endswith("+gzip"):
        data = gzip.decompress(data)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {Path(member.name).name for member in tar if not member.isdir()}


def test_every_service_and_the_agent_have_a_small_image(archive: tarfile.TarFile) -> None:
    found = manifests(archive)
    assert found.keys() == SERVICES | {"agent"}
    layers = {layer["digest"]: layer["size"] for name in SERVICES for layer in found[name]["layers"]}
    assert len(layers) == 2, "services share what they are made of"
    assert sum(layers.values()) < MOST_BYTES["services"]
    assert sum(layer["size"] for layer in found["agent"]["layers"]) < MOST_BYTES["agent"]


def test_services_are_nobody_and_have_no_shell(archive: tarfile.TarFile) -> None:
    found = manifests(archive)
    for name in SERVICES:
        config = json.loads(blob(archive, found[name]["config"]["digest"]))["config"]
        assert config["User"].partition(":")[0] not in {"", "0", "root"}
        assert config["Entrypoint"][-2:] == ["-m", f"services.{name}"]
    for layer in found["gateway"]["layers"]:
        assert not names_in(archive, layer) & NEVER
