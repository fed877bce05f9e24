import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.local_node.harness import Account, NodeProcess
from tests.support.engine import TestEngine, running_engine
from tests.support.payload import BUILD_SECONDS, built_payload

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first starts the engine, and may have to build the payload."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(BUILD_SECONDS))


@pytest.fixture(scope="session")
def one_engine() -> Iterator[TestEngine]:
    if os.geteuid() != 0:
        pytest.skip("an engine needs root: run the suite as root")
    built_payload()
    with running_engine() as engine:
        yield engine


@pytest.fixture
def engine(one_engine: TestEngine) -> Iterator[TestEngine]:
    """The engine; one that a test stopped runs again afterwards."""
    yield one_engine
    if not one_engine.runs:
        one_engine.start()


@pytest.fixture
async def make_node(engine: TestEngine) -> AsyncIterator[Callable[..., NodeProcess]]:
    """Makes daemons; stops them, and checks that no container is left."""
    before = engine.containers()
    async with AsyncExitStack() as stack:

        def make(*, user: int = 0, **settings: str) -> NodeProcess:
            node = NodeProcess(Account(user, user), {"ORCHARD_RUNTIME": "docker", **engine.environment, **settings})
            stack.push_async_callback(node.close)
            return node

        yield make
    left = engine.containers()
    if left:
        engine.docker("rm", "--force", "--volumes", *left)
    assert left == before


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(one_engine: TestEngine) -> AsyncIterator[NodeProcess]:
    """A daemon for the tests of a module that leave it as it was."""
    node = NodeProcess(Account(0, 0), {"ORCHARD_RUNTIME": "docker", **one_engine.environment})
    try:
        await node.start()
        yield node
    finally:
        await node.close()
    assert one_engine.containers() == []


@pytest.fixture
async def node(make_node: Callable[..., NodeProcess]) -> NodeProcess:
    node = make_node()
    await node.start()
    return node
