"""Single services of the platform as processes of their own, for tests that need no supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from services.common.grpc_core import CORE_ENVIRONMENT
from tests.support.health import SERVING, wait_health
from tests.support.history import ROOT, import_path

STOP_SECONDS = 60


class ServiceProcess:
    """`python -m services.<name>`, serving on a Unix socket or where LISTEN says; its output is in a file."""

    def __init__(self, module: str, socket: Path, settings: Mapping[str, str], tree: Path = ROOT) -> None:
        """`settings` without their prefix ORCHARD_; `tree` has the code."""
        self.address = settings.get("LISTEN", f"unix:{socket}")
        self.log = socket.with_suffix(".log")
        self._tree = tree
        self._socket = socket
        self._module = module
        self._environment = {
            **CORE_ENVIRONMENT,
            **{name: value for name, value in os.environ.items() if not name.startswith("ORCHARD_")},
            "ORCHARD_LISTEN": self.address,
            **{f"ORCHARD_{name}": value for name, value in settings.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it; it may take a while to serve."""
        assert self._process is None
        self._socket.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                cwd=self._tree,
                env={**self._environment, **import_path(self._tree)},
                stdout=log,
                stderr=log,
            )

    async def serving(self) -> None:
        """Wait until it serves."""
        await wait_health(self.address, SERVING)

    def become(self, tree: Path, **settings: str) -> None:
        """Be of another build, and have other settings too, from the next start on."""
        self._tree = tree
        self._environment |= {f"ORCHARD_{name}": value for name, value in settings.items()}

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(STOP_SECONDS)
        self._process = None
        return code


@contextmanager
def running(*services: ServiceProcess) -> Iterator[None]:
    """Start them, and end them afterwards, whatever became of them; their logs are shown by a test that fails."""
    try:
        for service in services:
            service.start()
        yield
    finally:
        for service in services:
            service.kill()
            print(f"--- {service.address}\n{service.log.read_text()[-20_000:] if service.log.exists() else ''}")
