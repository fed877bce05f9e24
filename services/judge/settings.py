"""Settings of the judge service."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.common.settings import DatabaseSettings, InternalServiceSettings


class JudgeServiceSettings(InternalServiceSettings, DatabaseSettings):
    """Read from ORCHARD_* environment variables."""

    object_store_url: str = Field(
        pattern=r"^(file|s3|gs|az)://",
        description="Where raw answers and images go: file:///folder, s3://bucket, gs://bucket or az://container.",
    )
    judges_file: Path = Field(
        description="JSON file with a list of judges (backends/settings.py); the first is the default."
    )
    database_connections: int = Field(
        default=12,
        ge=3,  # one has the locks, one the verdicts, one the rest
        le=100,
        description="Connections to PostgreSQL at most. All replicas' fit max_connections.",
    )
    most_judgements: int = Field(
        default=256,
        ge=1,
        le=10_000,
        description="Calls of Judge, JudgeWhole and JudgeBatch at once; each holds trajectories.",
    )
    most_held_bytes: int = Field(
        default=512 << 20,
        ge=128 << 20,
        description="Trajectories and images that all calls hold together; beyond it senders wait, then are refused.",
    )
