"""A gateway that is killed while it holds a secret environment."""

import secrets
import signal
from collections.abc import Iterator

import orchard
import pytest

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
