"""Settings of the watcher."""

from __future__ import annotations

from pydantic import Field

from services.common.settings import AgentCallerSettings


class WatcherSettings(AgentCallerSettings):
    """Read from ORCHARD_* environment variables."""

    node_address: str = Field(description="gRPC address of the node daemon: unix:/path.")
    probe_interval_seconds: float = Field(
        default=0.02, gt=0, le=1, description="Longest time between two probes of a new agent."
    )
