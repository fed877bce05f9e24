"""The client's suite runs against the real platform: `orchard up` in a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from orchard import AsyncSandbox, AsyncSandboxClient, Sandbox, SandboxClient

from tests.integration.client.cli import Cli
from tests.integration.client.proxy import Proxy
from tests.support.platform import PlatformProcess, running_platform
from tests.support.programs import programs


@pytest.fixture(scope="session")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("platform")) as platform:
        yield platform


@pytest.fixture(scope="session")
def client(platform: PlatformProcess) -> Iterator[SandboxClient]:
    with SandboxClient(platform.endpoint, api_key=platform.api_key) as client:
        yield client


@pytest.fixture(scope="session")
def sandbox(client: SandboxClient) -> Iterator[Sandbox]:
    """A sandbox for tests that leave it as it was, and use names of their own in it."""
    with client.create() as sandbox:
        yield sandbox


@pytest.fixture
async def aclient(platform: PlatformProcess) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient(platform.endpoint, api_key=platform.api_key) as client:
        yield client


@pytest.fixture
async def asandbox(aclient: AsyncSandboxClient, sandbox: Sandbox) -> AsyncSandbox:
    """The shared sandbox, for asynchronous tests."""
    return aclient.attach(sandbox.sandbox_id)


@pytest.fixture(scope="session")
def cli(platform: PlatformProcess) -> Cli:
    return Cli(platform)


@pytest.fixture
def proxy(platform: PlatformProcess) -> Iterator[Proxy]:
    proxy = Proxy(platform.endpoint)
    yield proxy
    proxy.close()


@pytest.fixture
async def shaky(proxy: Proxy, platform: PlatformProcess) -> AsyncIterator[AsyncSandboxClient]:
    """A client whose connection can be cut."""
    async with AsyncSandboxClient(proxy.endpoint, api_key=platform.api_key) as client:
        yield client


@pytest.fixture
def program(platform: PlatformProcess, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a Python program that finds the platform by its profile."""
    with programs(platform.client_environment()) as start:

        def program(source: str, *arguments: str) -> subprocess.Popen[str]:
            path = tmp_path / "program.py"
            path.write_text(source)
            return start(str(path), *arguments)

        yield program
