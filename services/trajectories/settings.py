"""Settings of the trajectory service."""

from __future__ import annotations

from pydantic import Field

from services.common.settings import DatabaseSettings, InternalServiceSettings


class TrajectoriesSettings(InternalServiceSettings, DatabaseSettings):
    """Read from ORCHARD_* environment variables."""

    object_store_url: str = Field(
        pattern=r"^(file|s3|gs|az)://",
        description="Where packed trajectories and bodies go: file:///folder, s3://bucket, gs://bucket or az://container.",
    )
    database_connections: int = Field(
        default=12,
        ge=4,  # one follows changes; appends, whole trajectories and packing take turns on the others
        le=100,
        description="Connections to PostgreSQL at most. All replicas' fit max_connections.",
    )
    blob_grace_seconds: float = Field(
        default=86_400.0, ge=0, description="How long a body that nothing refers to is kept."
    )
