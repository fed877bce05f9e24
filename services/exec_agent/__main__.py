"""The agent as a process of its own, set up by its environment (settings.AgentConfig.from_environment)."""

from __future__ import annotations

import os
import sys

# structlog would load it, where it is installed, for coloured tracebacks: 4 MB in every sandbox.
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]

from services.common import logs  # noqa: E402
from services.exec_agent.app import preload, run  # noqa: E402
from services.exec_agent.launcher import LauncherMissingError  # noqa: E402
from services.exec_agent.settings import AgentConfig, SettingsError  # noqa: E402


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
