from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.platform import PlatformProcess, running_platform
from tests.support.wire import Wire, wire_to


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    """One platform for the tests that leave it as it was; at the end nothing of it may be left."""
    with running_platform(tmp_path_factory.mktemp("platform")) as platform:
        yield platform


@pytest.fixture
async def wire(platform: PlatformProcess) -> AsyncIterator[Wire]:
    async with wire_to(platform.endpoint, platform.api_key) as wire:
        yield wire
