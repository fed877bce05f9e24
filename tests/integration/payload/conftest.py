from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from services.common.server import CHANNEL_OPTIONS
from tests.integration.exec_agent.conftest import Client
from tests.support.payload import BUILD_SECONDS, SANDBOX, UID, Container, built_payload, running_container
from tests.support.testbed import busybox_root

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first may have to build the payload."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(BUILD_SECONDS))


@pytest.fixture(scope="session")
def payload() -> Path:
    return built_payload()


@pytest.fixture
def busybox(tmp_path: Path) -> Path:
    return busybox_root(tmp_path / "root")


@pytest.fixture
def run_in(payload: Path) -> Iterator[Callable[..., Container]]:
    """Starts a container on a root file system; it ends with the test."""
    with contextlib.ExitStack() as stack:

        def run(root: Path, **options: Any) -> Container:
            return stack.enter_context(running_container(options.pop("payload", payload), root, **options))

        yield run


@contextlib.asynccontextmanager
async def client_of(container: Container) -> AsyncIterator[Client]:
    """Calls to the agent, once it answers."""
    await container.healthy()
    async with grpc.aio.insecure_channel(container.address, options=CHANNEL_OPTIONS) as channel:
        yield Client(channel, container.signer.agent_token(UID), SANDBOX)
