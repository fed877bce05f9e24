"""Settings of the watcher."""

from __future__ import annotations

from pydantic import Field

from services.common.runtime_settings import RuntimeSettings
from services.common.settings import AgentCallerSettings


class WatcherSettings(RuntimeSettings, AgentCallerSettings):
    """Read from ORCHARD_* environment variables."""

    probe_interval_seconds: float = Field(
        default=0.02, gt=0, le=1, description="Longest time between two probes of a new agent."
    )
