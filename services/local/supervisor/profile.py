"""The connection profile that SDK and command line find by themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from services.local.supervisor.errors import PlatformError
from services.local.supervisor.files import write_private

_BACKUPS: Final = 100


def write_profile(path: Path, *, endpoint: str, api_key: str, files: Mapping[str, str] | None = None) -> str:
    """Write it, mode 0600, and return what a person should know about that ("" if nothing).

    `files` are those of a client's TLS, by their names in the profile. A profile with another key is not ours, so it
    is kept beside the new one. `orchard.load_profile` reads it.

    Raises:
        PlatformError: the file cannot be written.
    """
    text = json.dumps({"endpoint": endpoint, "api_key": api_key, **(files or {})}, indent=2) + "\n"
    try:
        path = path.resolve()
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == text:
            path.chmod(0o600)
            return ""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = _keep(path, old) if old and _key_of(old) != api_key else None
        write_private(path, text.encode())
    except (OSError, UnicodeDecodeError) as error:
        raise PlatformError(
            f"cannot write the connection profile {path}: {error}. ORCHARD_CONFIG_DIR moves it"
        ) from None
    return f"your profile of another endpoint was kept as {kept}" if kept else ""


def _key_of(text: str) -> str | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return str(found.get("api_key")) if isinstance(found, dict) else None


def _keep(path: Path, text: str) -> Path:
    for number in range(1, _BACKUPS):
        backup = path.with_name(path.name + ".bak" + (f".{number}" if number > 1 else ""))
        if not os.path.lexists(backup) or backup.read_text(encoding="utf-8") == text:
            write_private(backup, text.encode())
            return backup
    raise PlatformError(f"there are {_BACKUPS} kept profiles beside {path}: remove those you do not need")
