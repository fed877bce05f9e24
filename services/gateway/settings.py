"""Settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.common.settings import AgentCallerSettings, DatabaseSettings


class GatewaySettings(AgentCallerSettings, DatabaseSettings):
    """Read from ORCHARD_* environment variables."""

    signing_key_file: Path = Field(description="PEM file with the Ed25519 key that signs tokens.")
    scheduler_address: str = Field(description="gRPC address of the scheduler.")
    watcher_address: str = Field(description="gRPC address of the watcher.")
    trajectories_address: str = Field(
        default="",
        description="gRPC address of the trajectory service. Empty: there is none, its calls are UNIMPLEMENTED.",
    )
    judge_address: str = Field(
        default="", description="gRPC address of the judge service. Empty: there is none, its calls are UNIMPLEMENTED."
    )
    node_address: str = Field(default="", description="gRPC address of the node daemon, where images are imported.")
    database_connections: int = Field(
        default=5, ge=2, le=100, description="Connections to PostgreSQL at most. All replicas' fit max_connections."
    )
    runtime: Literal["process", "docker", "kubernetes"] = "process"
    key_refresh_seconds: float = Field(
        default=3.0, gt=0, le=60, description="How often revoked and changed keys are read again."
    )
    audit_commands: bool = Field(
        default=False, description="Whether commands and uses of files have entries in the audit log too."
    )
    audit_flush_seconds: float = Field(
        default=1.0, gt=0, le=60, description="How long entries are gathered; a gateway that is killed loses these."
    )
    audit_retention_days: int = Field(default=90, ge=1, le=3650, description="Older entries are deleted.")
    activity_seconds: float = Field(default=5.0, gt=0, le=60, description="How often use of sandboxes is reported.")
