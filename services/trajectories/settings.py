"""Settings of the trajectory service."""

from __future__ import annotations

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.common.settings import InternalServiceSettings


class DatabaseSettings(BaseSettings):
    """What `migrate` needs."""

    model_config = SettingsConfigDict(env_prefix="ORCHARD_", frozen=True, extra="ignore")

    database_url: SecretStr = Field(description="postgresql://... of the database with the service's schema.")


class TrajectoriesSettings(InternalServiceSettings):
    """Read from ORCHARD_* environment variables."""

    database_url: SecretStr = Field(description="postgresql://... of the database with the service's schema.")
    object_store_url: str = Field(
        pattern=r"^(file|s3|gs|az)://",
        description="Where packed trajectories and bodies go: file:///folder, s3://bucket, gs://bucket or az://container.",
    )
    blob_grace_seconds: float = Field(
        default=86_400.0, ge=0, description="How long a body that nothing refers to is kept."
    )
