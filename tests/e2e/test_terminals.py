"""A gateway that is killed under terminals and long inputs: not a byte is lost, and none comes twice."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import orchard
import pytest

from tests.support.local_terminal import LocalTerminal
from tests.support.platform import PlatformProcess, running_platform

ORCHARD = str(Path(sys.executable).with_name("orchard"))
LINES = 300
# Slow enough to be in the middle when the gateway is killed.
SLOW_READER = """
import hashlib, sys, time
digest = hashlib.sha256()
while data := sys.stdin.buffer.read(1 << 18):
    digest.update(data)
    time.sleep(0.05)
print(digest.hexdigest())
"""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("terminals")) as platform:
        yield platform


def kill_gateway(platform: PlatformProcess) -> None:
    killed = platform.kill_service("gateway")
    platform.wait_ready("gateway", not_pid=killed)


def test_a_shell_outlives_the_gateway(platform: PlatformProcess) -> None:
    client = orchard.SandboxClient(platform.endpoint, api_key=platform.api_key)
    with client, client.create() as sandbox:
        script = f"for i in $(seq {LINES}); do echo line-$i.; sleep 0.01; done; read x; echo got-$x; exit 6"
        arguments = (ORCHARD, "exec", "-it", sandbox.sandbox_id, script)
        with LocalTerminal(*arguments, environment=platform.client_environment()) as window:
            window.until(b"line-40.")
            kill_gateway(platform)
            at = window.until(b"line-%d.\r\n" % LINES)
            kill_gateway(platform)
            window.type(b"typed\r")
            window.until(b"got-typed", at)
            assert window.exit() == 6
            assert window.is_as_before
            shown = re.sub(rb"\x1b\[2[23];2t|\x1b\]2;[^\x07]*\x07", b"", window.seen)  # the window's title
        assert re.findall(rb"line-(\d+)\.\r\n", shown) == [b"%d" % number for number in range(1, LINES + 1)]


async def test_input_outlives_the_gateway(platform: PlatformProcess) -> None:
    data = os.urandom(8 << 20)
    client = orchard.AsyncSandboxClient(platform.endpoint, api_key=platform.api_key)
    async with client, await client.create() as sandbox:
        process = await sandbox.start(["python3", "-c", SLOW_READER], stdin=True)
        writing = asyncio.ensure_future(process.write(data))
        await asyncio.to_thread(kill_gateway, platform)
        await writing
        await process.close_stdin()
        assert (await process.wait()).stdout.split()[0] == hashlib.sha256(data).hexdigest()
