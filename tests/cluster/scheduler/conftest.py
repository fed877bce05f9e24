from collections.abc import AsyncIterator

import pytest

from tests.cluster.watcher.pods import Truth
from tests.support.testbed import Testbed


@pytest.fixture
async def truth(control_plane: Testbed) -> AsyncIterator[Truth]:
    async with Truth.of(control_plane.admin_kubeconfig) as truth:
        yield truth
