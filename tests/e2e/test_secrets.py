"""Where a secret environment may be: in the memory of who passes it on, in its sandbox's commands, and nowhere else."""

import asyncio
import contextlib
import hashlib
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import orchard
import pytest
from orchard.admin.v1 import usage_service_pb2
from orchard.exec.v1 import exec_service_pb2
from orchard.sandbox.v1 import sandbox_service_pb2

from services.local.stores.binaries import postgres_folder
from tests.support.platform import PlatformProcess, descendants
from tests.support.wire import Wire


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    platform = PlatformProcess(tmp_path_factory.mktemp("secrets"))
    try:
        platform.start("--log-level", "debug")
        yield platform
        assert platform.stop() == 0, platform.output()
        platform.wait_nothing_left()
    finally:
        platform.close()


@pytest.fixture
async def client(platform: PlatformProcess) -> AsyncIterator[orchard.AsyncSandboxClient]:
    async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client:
        yield client


def everywhere(platform: PlatformProcess, text: str) -> set[str]:
    """Where the platform keeps this text: files, the database, and what its processes tell of themselves."""
    sought = text.encode()
    found = set()
    for place in (platform.folder, platform.run):
        # Not rglob: sandboxes that are made ahead come and go meanwhile, and so do files of the stores.
        for folder, _, names in os.walk(place):
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file() and sought in path.read_bytes():
                        found.add(str(path.relative_to(place)))
    dump = [postgres_folder() / "pg_dumpall", "--host", platform.run / "pg", "--username", "orchard"]
    if sought in subprocess.run([*dump, "--database", "postgres"], check=True, capture_output=True).stdout:
        found.add("database")
    for process in descendants(platform.pid):
        for name in ("cmdline", "environ"):
            try:
                told = Path(f"/proc/{process.pid}/{name}").read_bytes()
                program = Path(f"/proc/{process.pid}/comm").read_text().strip()
            except OSError:
                continue  # gone, or of a sandbox and not dumpable
            if sought in told:
                found.add(f"{name} of {program}")
    return found


async def everything_told(wire: Wire, sandbox_id: str) -> str:
    """Every answer about a sandbox."""
    answers = [await wire.get(sandbox_id), *await wire.wait(sandbox_id)]
    answers.append(
        await wire.call(wire.sandboxes.ListSandboxes, sandbox_service_pb2.ListSandboxesRequest(page_size=1000))
    )
    answers.append(await wire.call(wire.execs.ListExecs, exec_service_pb2.ListExecsRequest(sandbox_id=sandbox_id)))
    answers.append(await wire.call(wire.usage.GetUsage, usage_service_pb2.GetUsageRequest(group_by_label="mark")))
    return "".join(map(str, answers))


async def test_it_is_stored_and_told_nowhere(
    platform: PlatformProcess, client: orchard.AsyncSandboxClient, wire: Wire
) -> None:
    secret, public = secrets.token_hex(16), secrets.token_hex(16)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    show = 'printf %s "$TOKEN" | sha256sum | cut -d" " -f1; echo $PLAIN'
    env = {"TOKEN": "overridden", "PLAIN": public}
    # It is held while nothing can be made, and lost with the gateway that holds it.
    with platform.paused("node"):
        sandbox = await client.create(secret_env={"TOKEN": secret}, env=env, labels={"mark": public}, wait=False)
        killed = platform.kill_service("gateway")
        await asyncio.to_thread(platform.wait_ready, "gateway", not_pid=killed)
        assert everywhere(platform, secret) == set()
    await sandbox.wait_ready()
    assert (await sandbox.exec(show, check=True)).stdout == f"{digest}\n{public}\n"
    # The agent that had it dies, and the next one is given it again.
    with pytest.raises(orchard.CommandInterrupted):
        await sandbox.exec("kill -9 -1; sleep 60")
    running = asyncio.ensure_future(
        sandbox.exec(f"{show}; : > /root/waits; until [ -e /root/go ]; do sleep 0.05; done", concurrent=True)
    )
    # Behind the programs that show it, of which there is none any more.
    waits = "until [ -e /root/waits ]; do sleep 0.05; done"
    assert (await sandbox.exec(f"{waits}; {show} > /root/shown; cat /root/shown")).stdout.startswith(digest)
    # While a command has it, and what else is known is found in all the places where it would be too.
    assert everywhere(platform, secret) <= {"environ of sh", "environ of bash", "environ of sleep"}
    kept = everywhere(platform, public)
    assert any(path.startswith("data/node/journal") for path in kept), kept
    assert any(path.startswith("data/valkey") for path in kept), kept
    told = await everything_told(wire, sandbox.sandbox_id)
    assert secret not in told
    assert public in told
    await sandbox.exec("touch /root/go")
    assert (await running).stdout == f"{digest}\n{public}\n"
    async with asyncio.timeout(110):
        while "database" not in everywhere(platform, public):  # written behind the scenes, about once a second
            await asyncio.sleep(0.1)
    await sandbox.delete()
    await sandbox.wait_ended(110)
    assert everywhere(platform, secret) == set()


@pytest.mark.parametrize(
    "secret_env", [{"BAD NAME": "{}"}, {"GOOD": "{}\0"}, {"BIG": "{}" * 40_000}], ids=["name", "nul", "big"]
)
async def test_a_refusal_does_not_repeat_it(platform: PlatformProcess, wire: Wire, secret_env: dict[str, str]) -> None:
    secret = secrets.token_hex(16)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await wire.create(secret_env={name: value.replace("{}", secret) for name, value in secret_env.items()})
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert secret not in f"{caught.value.details()} {caught.value.trailing_metadata()}"
    assert everywhere(platform, secret) == set()


async def test_a_create_that_fails_does_not_keep_it(platform: PlatformProcess, wire: Wire) -> None:
    """The runtime, killed while it is asked, may have written down what it was doing."""
    secret = secrets.token_hex(16)
    with platform.paused("node"):
        created = await wire.create(secret_env={"TOKEN": secret})
        scheduler = platform.kill_service("scheduler", signal.SIGKILL)
    node = await asyncio.to_thread(platform.kill_service, "node")
    await asyncio.to_thread(platform.wait_ready, "scheduler", not_pid=scheduler)
    await asyncio.to_thread(platform.wait_ready, "node", not_pid=node)
    async with asyncio.timeout(110):
        while True:
            # The gateway may still find out that its scheduler is another one.
            with contextlib.suppress(grpc.aio.AioRpcError):
                await wire.wait(created.sandbox_id)
                break
    assert everywhere(platform, secret) == set()
    await wire.delete(created.sandbox_id)
