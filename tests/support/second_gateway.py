"""Another gateway of a platform, beside the one that its supervisor keeps."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.health import SERVING, wait_health
from tests.support.platform import ROOT, PlatformProcess
from tests.support.ports import free_port


class SecondGateway:
    """Started with the settings of the first, on a port of its own."""

    def __init__(self, platform: PlatformProcess) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        variables = Path(f"/proc/{platform.service_pid('gateway')}/environ").read_text().split("\0")
        environment = dict(variable.split("=", 1) for variable in variables if "=" in variable)
        environment.pop("ORCHARD_LIFELINE_FD", None)
        self._environment = {**environment, "ORCHARD_LISTEN": self.endpoint}
        self._log = platform.folder / "second-gateway.txt"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it, and wait until it serves."""
        with self._log.open("ab") as log:
            command = (sys.executable, "-m", "services.gateway")
            self._process = subprocess.Popen(command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)
        await wait_health(self.endpoint, SERVING)

    async def kill(self) -> None:
        """kill -9, and another start."""
        self.close()
        await self.start()

    def close(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@asynccontextmanager
async def second_gateway(platform: PlatformProcess) -> AsyncIterator[SecondGateway]:
    gateway = SecondGateway(platform)
    try:
        await gateway.start()
        yield gateway
    finally:
        await asyncio.to_thread(gateway.close)
