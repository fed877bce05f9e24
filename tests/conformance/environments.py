"""Environments of the packages that check ours: built by uv from pinned lists, in a cache outside of the checkout."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orchard-conformance"
UV = Path(sys.executable).parent / "uv"


def python_312() -> str:
    """An interpreter of Python 3.12: of the machine, or of pyenv."""
    versions = sorted(Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv").glob("versions/3.12*/bin/python"))
    for candidate in (os.environ.get("ORCHARD_PYTHON312"), *map(str, versions), shutil.which("python3.12")):
        if candidate and _is_312(candidate):
            return candidate
    raise SystemExit("conformance: needs Python 3.12; name one in ORCHARD_PYTHON312")


def _is_312(candidate: str) -> bool:
    code = "import sys; sys.exit(sys.version_info[:2] != (3, 12))"
    return subprocess.run([candidate, "-c", code], capture_output=True).returncode == 0


def python_of(name: str) -> Path:
    """The interpreter of an environment; builds it when it is not there. One that is half built is built anew."""
    requirements = HERE / "requirements" / f"{name}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    folder = CACHE / f"{name}-{digest}"
    python = folder / "bin" / "python"
    if not (folder / "complete").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([UV, "venv", "--quiet", "--python", python_312(), folder], check=True)
        # The lists are complete, so nothing is resolved.
        install = [UV, "pip", "install", "--quiet", "--no-deps", "--python", python, "-r", requirements]
        subprocess.run(install, check=True)
        (folder / "complete").touch()
    return python


def environment_of() -> dict[str, str]:
    """The variables of a program in an environment: nothing of this interpreter or run; no harness looks outside."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "PYTEST_", "VIRTUAL_ENV", "COV_", "ORCHARD_"))
    }
    return kept | {
        "HARBOR_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "2",
        "MSWEA_SILENT_STARTUP": "1",
    }


def run(name: str, script: str, *arguments: str | Path, timeout: float = 900) -> str:
    """Run a script of this folder in an environment; returns what it printed."""
    done = subprocess.run(
        [python_of(name), HERE / script, *arguments],
        env=environment_of(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{script}:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout
