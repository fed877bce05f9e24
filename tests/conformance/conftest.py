from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance.adapters import Harness, install
from tests.support.platform import PlatformProcess, running_platform


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    """One platform for all harnesses; at the end nothing of it may be left."""
    with running_platform(tmp_path_factory.mktemp("platform")) as platform:
        yield platform


@pytest.fixture(scope="session")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client distribution, built and installed."""
    return install(tmp_path_factory.mktemp("distribution"))


@pytest.fixture
def harness(platform: PlatformProcess, distribution: Path, tmp_path: Path) -> Callable[[str], Harness]:
    """A harness by the name of its environment."""

    def named(name: str) -> Harness:
        return Harness(name, platform, distribution, tmp_path)

    return named
