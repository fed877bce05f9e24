"""The agent as a process of its own, set up by its environment (settings.AgentConfig.from_environment)."""

from __future__ import annotations

import os
import sys

from services.common import logs
from services.exec_agent.app import preload, run
from services.exec_agent.launcher import LauncherMissingError
from services.exec_agent.settings import AgentConfig, SettingsError


def main() -> int:
    """Run until SIGTERM; returns the exit code."""
    logs.configure("agent", json_format=os.environ.get("ORCHARD_LOG_FORMAT") == "json")
    try:
        config = AgentConfig.from_environment()
    except (SettingsError, LauncherMissingError) as error:
        print(f"orchard agent: {error}", file=sys.stderr)  # noqa: T201
        return 2
    preload()
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
