from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cluster.watcher.pods import Truth, Watched, watching
from tests.support.api_proxy import ApiProxy
from tests.support.testbed import Testbed


@pytest.fixture
async def truth(control_plane: Testbed) -> AsyncIterator[Truth]:
    async with Truth.of(control_plane.admin_kubeconfig) as truth:
        yield truth


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    """Leads to the proxy."""
    return tmp_path / "kubeconfig"


@pytest.fixture
async def proxy(control_plane: Testbed, kubeconfig: Path) -> AsyncIterator[ApiProxy]:
    proxy = ApiProxy(control_plane.watcher_kubeconfig)
    async with proxy.running(kubeconfig):
        yield proxy


@pytest.fixture
async def watched(truth: Truth, proxy: ApiProxy, kubeconfig: Path) -> AsyncIterator[Watched]:
    """A watcher behind the proxy that has synced with three Pods: a, b and c."""
    for name in "abc":
        await truth.create(name)
    async with watching(kubeconfig) as watched:
        await watched.agrees(truth)
        yield watched
