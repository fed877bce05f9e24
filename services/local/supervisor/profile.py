"""The connection profile that SDK and command line find by themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.local.supervisor.errors import PlatformError
from services.local.supervisor.files import write_private

_BACKUPS: Final = 100


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the platform is and what to say to it."""

    endpoint: str
    api_key: str

    def as_json(self) -> str:
        """The file's text."""
        return json.dumps({"endpoint": self.endpoint, "api_key": self.api_key}, indent=2) + "\n"


def profile_path(environment: Mapping[str, str]) -> Path:
    """Where SDK and command line look."""
    if chosen := environment.get("ORCHARD_CONFIG_DIR"):
        return Path(chosen).expanduser() / "profile.json"
    base = environment.get("XDG_CONFIG_HOME") or ""
    return (Path(base) if base.startswith("/") else Path.home() / ".config") / "orchard/profile.json"


def find_profile(environment: Mapping[str, str]) -> Profile:
    """What ORCHARD_ENDPOINT and ORCHARD_API_KEY say, and the profile for what they leave open.

    Raises:
        PlatformError: there is no profile, or it is damaged.
    """
    endpoint, key = environment.get("ORCHARD_ENDPOINT", ""), environment.get("ORCHARD_API_KEY", "")
    if endpoint and key:
        return Profile(endpoint, key)
    path = profile_path(environment)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Profile(endpoint or str(found["endpoint"]), key or str(found["api_key"]))
    except FileNotFoundError:
        raise PlatformError(
            f"there is no connection profile {path}: start `orchard up`, or set ORCHARD_ENDPOINT and ORCHARD_API_KEY"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise PlatformError(
            f"the connection profile {path} is damaged: remove it and start `orchard up` again"
        ) from None


def write_profile(path: Path, profile: Profile) -> str:
    """Write it, mode 0600, and return what a person should know about that ("" if nothing).

    A profile with another key is not ours, so it is kept beside the new one.

    Raises:
        PlatformError: the file cannot be written.
    """
    text = profile.as_json()
    try:
        path = path.resolve()
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == text:
            path.chmod(0o600)
            return ""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = _keep(path, old) if old and _key_of(old) != profile.api_key else None
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
