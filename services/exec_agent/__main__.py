"""The agent as a process of its own, set up by its environment or, in a Pod, by a folder (settings.AgentConfig)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

# structlog would load it, where it is installed, for coloured tracebacks: 4 MB in every sandbox.
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]

from services.common import logs, pods  # noqa: E402
from services.exec_agent.app import preload, run  # noqa: E402
from services.exec_agent.launcher import LauncherMissingError  # noqa: E402
from services.exec_agent.settings import AgentConfig, SettingsError  # noqa: E402

_CONFIGURATION_ERROR: Final = 78
"""Tells the Pod's init (launcher/pod.c) that no restart will help."""


def main() -> int:
    """Run until SIGTERM; returns the exit code."""
    logs.configure("agent", json_format=os.environ.get("ORCHARD_LOG_FORMAT") == "json")
    try:
        config = AgentConfig.from_environment()
    except SettingsError as error:
        print(f"orchard agent: {error}", file=sys.stderr)  # noqa: T201
        return 2
    preload()
    return run(config)


def main_in_pod(arguments: list[str]) -> int:
    """Run in a Pod until SIGTERM; returns the exit code. An address to listen on may be given."""
    logs.configure("agent", json_format=True)
    listen = arguments[0] if arguments else f"[::]:{pods.AGENT_PORT}"
    try:
        config = AgentConfig.from_directory(Path(pods.CONFIG_FOLDER), listen=listen)
    except (SettingsError, LauncherMissingError) as error:
        print(f"orchard agent: {error}", file=sys.stderr)  # noqa: T201
        return _CONFIGURATION_ERROR
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
