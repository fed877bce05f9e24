"""Images that the engine lacks come from a registry, or the reason why not is told."""

import asyncio
import json
import signal
from collections.abc import Callable, Iterator

import pytest
from orchard.sandbox.v1 import sandbox_pb2

from tests.integration.local_docker.test_lifecycle import failure
from tests.integration.local_node.harness import RUNNING, STARTING, NodeProcess
from tests.support.engine import CLOSED_REGISTRY, REGISTRY, TestEngine

IMAGE_PULL = sandbox_pb2.SANDBOX_REASON_IMAGE_PULL
pytestmark = pytest.mark.asyncio(loop_scope="module")
OPEN, CLOSED = f"{REGISTRY}/busybox:1", f"{CLOSED_REGISTRY}/busybox:1"


@pytest.fixture(scope="module")
def _registries(one_engine: TestEngine) -> Iterator[None]:
    one_engine.start_registries()
    yield
    one_engine.end_registries()


@pytest.fixture
def engine(engine: TestEngine, _registries: None) -> Iterator[TestEngine]:
    """An engine that has none of the registries' images."""
    yield engine
    for image in (OPEN, CLOSED):
        engine.docker("rmi", "--force", image, check=False)


async def why_not(shared: NodeProcess, **fields: object) -> str:
    sandbox = await shared.create(**fields)
    reason, message = await failure(shared, sandbox.uid)
    assert reason == IMAGE_PULL, message
    await shared.delete(sandbox.uid)
    return message


async def test_what_is_missing_is_pulled_once(shared: NodeProcess, engine: TestEngine) -> None:
    boxes = await asyncio.gather(*(shared.box(image=OPEN) for _ in range(3)))
    assert [(await box.ok("echo pulled")).strip() for box in boxes] == ["pulled"] * 3
    engine.docker("image", "inspect", OPEN)


async def test_a_bare_name_means_its_tag_latest(shared: NodeProcess, engine: TestEngine) -> None:
    message = await why_not(shared, image=f"{REGISTRY}/busybox")
    assert "not found" in message or "manifest unknown" in message
    assert engine.docker("image", "ls", "--quiet", f"{REGISTRY}/busybox").stdout == ""


@pytest.mark.parametrize(
    "image", [f"{REGISTRY}/none:1", f"{REGISTRY}/busybox:none", f"{REGISTRY}/busybox@sha256:{0:064}"]
)
async def test_there_is_no_such_image(shared: NodeProcess, engine: TestEngine, image: str) -> None:
    assert image in await why_not(shared, image=image)


async def test_a_registry_that_is_away_is_named(shared: NodeProcess, engine: TestEngine) -> None:
    assert "127.0.0.1:9" in await why_not(shared, image="127.0.0.1:9/busybox:1")


async def test_a_registry_that_wants_to_know_who_asks(shared: NodeProcess, engine: TestEngine) -> None:
    assert CLOSED in await why_not(shared, image=CLOSED)
    # What `docker login` writes where no program keeps passwords.
    engine.docker("login", "--username", "reader", "--password", "secret", CLOSED_REGISTRY)
    try:
        assert CLOSED_REGISTRY in json.loads((engine.folder / "client" / "config.json").read_text())["auths"]
        box = await shared.box(image=CLOSED)
        assert (await box.ok("echo mine")).strip() == "mine"
    finally:
        engine.docker("logout", CLOSED_REGISTRY)


async def test_an_image_by_its_id_is_never_asked_for(shared: NodeProcess, engine: TestEngine) -> None:
    (identifier,) = engine.docker("image", "inspect", "--format", "{{.Id}}", "orchard.test/busybox:1").stdout.split()
    box = await shared.box(image=identifier)
    assert (await box.ok("echo by id")).strip() == "by id"
    assert "no registry knows" in await why_not(shared, image=f"sha256:{1:064}")


@pytest.mark.asyncio(loop_scope="function")
async def test_a_platform_may_be_told_to_pull_nothing(
    make_node: Callable[..., NodeProcess], engine: TestEngine
) -> None:
    node = make_node(ORCHARD_DOCKER_PULL="never")
    await node.start()
    assert "docker pull" in await why_not(node, image=OPEN)


class TestSlowRegistry:
    @pytest.fixture(autouse=True)
    def _stands_still(self, engine: TestEngine) -> Iterator[None]:
        for registry in engine.registries:
            registry.send_signal(signal.SIGSTOP)
        yield
        for registry in engine.registries:
            registry.send_signal(signal.SIGCONT)

    async def test_a_pull_has_its_own_budget(self, shared: NodeProcess) -> None:
        message = await why_not(shared, image=OPEN, pull_timeout={"seconds": 1}, start_timeout={"seconds": 3600})
        assert "pull timeout of 1 s" in message

    async def test_a_pull_that_takes_its_time_costs_no_start(self, shared: NodeProcess, engine: TestEngine) -> None:
        sandbox = await shared.create(image=OPEN, start_timeout={"seconds": 60})
        other = await shared.box(image="orchard.test/busybox:1")
        assert (await other.ok("echo meanwhile")).strip() == "meanwhile"
        assert (await shared.snapshot())[sandbox.uid].phase == STARTING
        for registry in engine.registries:
            registry.send_signal(signal.SIGCONT)
        await shared.until(sandbox.uid, RUNNING)

    async def test_a_delete_cuts_a_pull_short(self, shared: NodeProcess) -> None:
        sandbox = await shared.create(image=OPEN, pull_timeout={"seconds": 3600})
        await shared.delete(sandbox.uid)
        assert sandbox.uid not in await shared.snapshot()
