"""The build before this one on a cluster: Pods with its agent under today's services, and its services, upgraded."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orchard
import pytest

from services.common import pods
from tests.cluster.conftest import BUSYBOX
from tests.cluster.pods.load import Load
from tests.support.history import PREVIOUS, ROOT, earlier_build
from tests.support.payload import built_payload
from tests.support.pod_platform import PodPlatform, running_pod_platform
from tests.support.testbed import Testbed, write_image

EARLIER_AGENT = "orchard.test/agent:previous"
MIB = 1 << 20
PATCH = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-old\n+new\n"


@pytest.fixture(scope="module")
def earlier() -> Path:
    return earlier_build(PREVIOUS)


@pytest.fixture(scope="module")
def earlier_image(node: Testbed, earlier: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of the earlier payload's image, which the node has."""
    archive = tmp_path_factory.mktemp("earlier") / "image.tar"
    node.import_image(write_image(archive, EARLIER_AGENT, built_payload(tree=earlier), entrypoint=["/init"]))
    archive.unlink()
    return EARLIER_AGENT


@contextmanager
def running(node: Testbed, agent_image: str, tree: Path) -> Iterator[PodPlatform]:
    # Short: paths of sockets have 107 bytes at most.
    with (
        tempfile.TemporaryDirectory(prefix="skew-") as folder,
        running_pod_platform(node, Path(folder), agent_image, tree=tree) as platform,
    ):
        yield platform


@pytest.fixture
def todays(node: Testbed, earlier_image: str) -> Iterator[PodPlatform]:
    """Services of this build, with the payload of the earlier one."""
    with running(node, earlier_image, ROOT) as platform:
        yield platform


@pytest.fixture
def before(node: Testbed, earlier_image: str, earlier: Path) -> Iterator[PodPlatform]:
    """All of the earlier build."""
    with running(node, earlier_image, earlier) as platform:
        yield platform


def client_of(platform: PodPlatform) -> orchard.AsyncSandboxClient:
    return orchard.AsyncSandboxClient(platform.endpoint, api_key=platform.api_key, retry_timeout=300)


async def agent_in(sandbox: orchard.AsyncSandbox) -> str:
    """A digest of the code of its agent."""
    code = f"cd {pods.PAYLOAD_FOLDER}/runtime/app; find services orchard -name '*.py' | sort | xargs cat | sha256sum"
    return (await sandbox.exec(code, concurrent=True, check=True)).stdout.split()[0]


def agent_of(tree: Path) -> str:
    """The same of a tree's payload."""
    app = built_payload(tree=tree) / "runtime/app"
    files = [path for top in ("services", "orchard") for path in (app / top).rglob("*.py")]
    in_order = sorted(files, key=lambda path: str(path.relative_to(app)))
    return hashlib.sha256(b"".join(path.read_bytes() for path in in_order)).hexdigest()


async def test_a_sandbox_with_the_earlier_agent_is_as_any_other(todays: PodPlatform, earlier: Path) -> None:
    async with client_of(todays) as client:
        sandbox = await client.create(BUSYBOX, detach=True)
        assert await agent_in(sandbox) == agent_of(earlier)
        await _streams(sandbox)
        await _keeps_files(sandbox)
        process = await sandbox.start("echo began; cat; exit 6", stdin=True)
        await process.write("one ")
    async with client_of(todays) as client:
        again = client.attach(sandbox.sandbox_id)
        process = again.process(process.exec_id)
        await process.write("two")
        await process.close_stdin()
        result = await process.wait(110)
        assert (result.exit_code, result.stdout) == (6, "began\none two")
        assert b"".join([chunk.data async for chunk in process.output(6)]) == b"one two"
        await again.delete()
        ended = await again.wait_ended(110)
        assert (ended.state, ended.reason) == (orchard.SandboxState.DELETED, "REQUESTED")
        assert await asyncio.to_thread(todays.pods) == {}


async def _streams(sandbox: orchard.AsyncSandbox) -> None:
    """Output is there while its command runs, and all of it."""
    stream = sandbox.exec_stream(
        "echo one; until test -e /tmp/go; do sleep 0.02; done; echo two >&2; seq 100000; exit 4", concurrent=True
    )
    chunks = []
    async for chunk in stream:
        if not chunks:
            assert chunk.text == "one\n"
            await sandbox.write_file("/tmp/go", b"")
        chunks.append(chunk)
    out = b"".join(chunk.data for chunk in chunks if chunk.stream == "stdout")
    assert out == b"one\n" + b"".join(b"%d\n" % number for number in range(1, 100_001))
    assert [chunk.data for chunk in chunks if chunk.stream == "stderr"] == [b"two\n"]
    assert stream.result.exit_code == 4


async def _keeps_files(sandbox: orchard.AsyncSandbox) -> None:
    content = bytes(range(256)) * (3 * MIB // 256)
    await sandbox.write_file("/tmp/d/large", content)
    assert await sandbox.read_file("/tmp/d/large") == content
    await sandbox.write_file("/tmp/d/f", "old\n")
    assert (await sandbox.apply_patch(PATCH, path="/tmp/d")).applied
    await sandbox.move("/tmp/d/f", "/tmp/d/g")
    assert (await sandbox.exec("cat /tmp/d/g; wc -c </tmp/d/large")).stdout == f"new\n{3 * MIB}\n"
    assert sorted(info.name for info in await sandbox.list_directory("/tmp/d")) == ["g", "large"]
    await sandbox.remove("/tmp/d", recursive=True)
    assert not await sandbox.exists("/tmp/d")


async def test_services_are_upgraded_step_by_step_under_load(
    before: PodPlatform, agent_image: str, earlier: Path
) -> None:
    """Sandboxes, commands and records of the earlier build go on in this one, and both builds serve side by side."""
    steps = [
        (before.watchers[0], before.schedulers[0]),
        (before.gateway,),
        (before.watchers[1], before.schedulers[1]),
    ]
    assert code_of(before) == {earlier}
    async with client_of(before) as client:
        load = Load(before, client)
        before.migrate(ROOT)  # as the first new Pod does, while the old ones go on
        for services in steps:
            await load.begin()
            for service in services:
                service.stop()
            load.go_on()
            for service in services:
                service.become(ROOT, PAYLOAD_IMAGE=agent_image)
                service.start()
            await before.serving()
            await load.ends_well()
        assert code_of(before) == {ROOT}
        for name in load.steady:
            assert await agent_in(client.attach(name)) == agent_of(earlier), "they keep the agent they began with"
        async with await load.create() as made:
            assert await agent_in(made) == agent_of(ROOT)
        await load.close()


def code_of(platform: PodPlatform) -> set[Path]:
    """Where the services that run have their code from."""
    return {Path(f"/proc/{service.pid}/cwd").readlink() for service in platform.services}
