"""Real clusters for the tests of this folder: see README.md."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machine import snapshot
from tests.support.payload import built_payload
from tests.support.testbed import Testbed, busybox_root, running_testbed, write_image

HERE = Path(__file__).parent
BUSYBOX = "orchard.test/busybox:1"
AGENT = "orchard.test/agent:1"
"""The agent's payload; fixture agent_image."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fixtures have ends of their own: one of them waits for a node that another run may have."""
    for item in items:
        if item.path.is_relative_to(HERE):
            if item.get_closest_marker("timeout") is None:  # a module's would come after one that is added here
                item.add_marker(pytest.mark.timeout(func_only=True))
            if "node" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.node)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Testbed]:
    """A control plane without a node: Pods are objects that never run. Shared: a test clears what it made."""
    with running_testbed(node=False) as testbed:
        yield testbed


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """A cluster whose one node runs Pods, with the image BUSYBOX. Shared: a test clears what it made."""
    if os.geteuid() != 0:
        pytest.skip("a node needs root: run the suite as root")
    before = snapshot()
    with running_testbed(node=True) as testbed:
        folder = tmp_path_factory.mktemp("busybox")
        testbed.import_image(write_image(folder / "image.tar", BUSYBOX, busybox_root(folder / "root")))
        yield testbed
    left = {line for line in snapshot() - before if not line.startswith("link") or "orchard" in line}
    assert left == set(), "the node left something on the machine"


@pytest.fixture(scope="session")
def agent_image(node: Testbed, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of the payload's image, which the node has."""
    archive = tmp_path_factory.mktemp("agent") / "image.tar"
    node.import_image(write_image(archive, AGENT, built_payload(), entrypoint=["/init"]))
    archive.unlink()
    return AGENT
