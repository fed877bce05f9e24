"""The platform before real Pods, with services that can be killed: tests/support/pod_platform.py."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import orchard
import pytest

from tests.cluster.pods.faults import FULL
from tests.support.pod_platform import PodPlatform, running_pod_platform
from tests.support.testbed import Testbed


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make chaos` runs."""
    if not FULL and (left_out := [item for item in items if item.get_closest_marker("full")]):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="package")
def platform(node: Testbed, agent_image: str) -> Iterator[PodPlatform]:
    # Short: paths of sockets have 107 bytes at most.
    with (
        tempfile.TemporaryDirectory(prefix="pods-") as folder,
        running_pod_platform(node, Path(folder), agent_image) as platform,
    ):
        yield platform


@pytest.fixture
async def client(platform: PodPlatform) -> AsyncIterator[orchard.AsyncSandboxClient]:
    async with orchard.AsyncSandboxClient(platform.endpoint, api_key=platform.api_key, retry_timeout=300) as client:
        yield client
