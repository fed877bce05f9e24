"""Secret environments whose gateway or agent is killed."""

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Iterator

import orchard
import pytest
import redis.asyncio as redis

from tests.support.platform import PlatformProcess, running_platform


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("lost-secret")) as platform:
        yield platform


async def test_the_client_hands_it_over_again(platform: PlatformProcess) -> None:
    secret = secrets.token_hex(8)
    async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client:
        platform.kill_service("node", signal.SIGSTOP)
        try:
            sandbox = await client.create(secret_env={"TOKEN": secret}, wait=False)
            killed = platform.kill_service("gateway")
            platform.wait_ready("gateway", not_pid=killed)
        finally:
            platform.kill_service("node", signal.SIGCONT)
        await sandbox.wait_ready()
        result = await sandbox.exec("printf %s $TOKEN")
        assert result.stdout == secret


async def kill_the_agent(sandbox: orchard.AsyncSandbox) -> None:
    with contextlib.suppress(orchard.CommandInterrupted):
        await sandbox.exec("kill -9 -1; sleep 60")


async def test_a_fresh_agent_gets_it_from_the_gateway(platform: PlatformProcess) -> None:
    """Other clients do not have it, and the one that made the sandbox may be gone."""
    secret = secrets.token_hex(8)
    connection = {"endpoint": platform.endpoint, "api_key": platform.api_key}
    async with orchard.AsyncSandboxClient(**connection) as first, orchard.AsyncSandboxClient(**connection) as other:
        made = await first.create(secret_env={"TOKEN": secret}, detach=True)
        await first.close()
        sandbox = await other.get(made.sandbox_id)
        for _ in range(2):
            assert (await sandbox.exec("printf %s $TOKEN")).stdout == secret
            await kill_the_agent(sandbox)
        assert (await sandbox.exec("printf %s $TOKEN")).stdout == secret
        await sandbox.delete()


async def test_a_command_that_waits_gets_it_under_a_fresh_agent(platform: PlatformProcess) -> None:
    """No other call than that which waits for its end tells the gateway that the agent has none."""
    secret = secrets.token_hex(8)
    async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client:
        sandbox = await client.create(secret_env={"TOKEN": secret})
        await sandbox.start("sleep 600", concurrent=False)
        waiting = await sandbox.start("printf %s $TOKEN", concurrent=False)
        result = asyncio.ensure_future(waiting.wait())
        killer = await sandbox.start("kill -9 -1; sleep 60")
        assert (await result).stdout == secret
        with pytest.raises(orchard.CommandInterrupted):
            await killer.wait()
        await sandbox.delete()


@pytest.mark.parametrize("detach", [False, True])
async def test_its_creator_hands_it_in_again_also_where_the_request_id_is_forgotten(
    platform: PlatformProcess, detach: bool
) -> None:
    secret = secrets.token_hex(8)
    async with orchard.AsyncSandboxClient(endpoint=platform.endpoint, api_key=platform.api_key) as client:
        sandbox = await client.create(secret_env={"TOKEN": secret}, detach=detach)
        # As after 24 h.
        async with redis.Redis.from_url(f"unix://{platform.run}/valkey.sock") as store:
            (key,) = [key async for key in store.scan_iter(f"orchard:request:*:{sandbox.info.request_id}")]
            await store.delete(key)
        killed = platform.kill_service("gateway")
        platform.wait_ready("gateway", not_pid=killed)
        await kill_the_agent(sandbox)
        assert (await sandbox.exec("printf %s $TOKEN")).stdout == secret
        await sandbox.delete()
