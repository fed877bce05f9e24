"""Platforms for the tests of this folder."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.platform import PlatformProcess, running_platform


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a platform has been once, to be copied: the first start takes longest."""
    folder = tmp_path_factory.mktemp("made")
    with running_platform(folder):
        pass
    return folder


@pytest.fixture(scope="session")
def shared(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    """A running platform for tests that leave it running."""
    with running_platform(copy(made, tmp_path_factory.mktemp("shared"))) as platform:
        yield platform


@pytest.fixture
def stopped(made: Path, tmp_path: Path) -> Iterator[PlatformProcess]:
    """A platform that has been made and does not run."""
    platform = PlatformProcess(copy(made, tmp_path))
    yield platform
    platform.close()
    platform.wait_no_process_left()


def copy(made: Path, folder: Path) -> Path:
    for name in ("data", "config"):
        subprocess.run(["cp", "-a", str(made / name), str(folder / name)], check=True)
    return folder
