"""What the checks of adapters share: the client distribution as it is installed, and programs that find a platform."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.environments import UV, environment_of, python_of
from tests.support.platform import ROOT, PlatformProcess


def install(folder: Path) -> Path:
    """Build the client distribution and install it, with its entry points, into a folder for PYTHONPATH."""
    command = [UV, "pip", "install", "--quiet", "--no-deps", "--target", folder, ROOT / "clients" / "python"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    return folder


@dataclass(frozen=True, slots=True)
class Harness:
    """A harness's environment, with the distribution, beside a platform."""

    name: str
    platform: PlatformProcess
    distribution: Path
    folder: Path
    """Where it runs, and keeps what it would keep in the user's home."""

    def run(
        self,
        *arguments: str | Path,
        exit_code: int = 0,
        timeout: float = 900,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python to its end."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        done = subprocess.run(
            [python_of(self.name), *arguments],
            cwd=self.folder,
            env={
                **environment_of(),
                "PATH": f"{python_of(self.name).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(self.distribution),
                "PYTHONDONTWRITEBYTECODE": "1",
                "HOME": str(home),
                "XDG_CONFIG_HOME": str(home),
                "XDG_CACHE_HOME": str(home),
                "XDG_DATA_HOME": str(home),
                "HF_HOME": str(home),
                "ORCHARD_ENDPOINT": self.platform.endpoint,
                "ORCHARD_API_KEY": self.platform.api_key,
                **(environment or {}),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        said = f"{done.stdout[-6000:]}\n{done.stderr[-8000:]}"
        assert done.returncode == exit_code, f"exit code {done.returncode}, not {exit_code}:\n{said}"
        return done
