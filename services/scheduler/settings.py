"""Settings of the scheduler."""

from __future__ import annotations

from pydantic import Field, SecretStr

from services.common.settings import InternalServiceSettings


class SchedulerSettings(InternalServiceSettings):
    """Read from ORCHARD_* environment variables."""

    redis_url: SecretStr = Field(description="redis://host:port/db, rediss://..., or unix:///path.")
    watcher_address: str = Field(description="gRPC address of the watcher.")
    node_address: str = Field(description="gRPC address of the node daemon.")
    starts_in_flight: int = Field(default=16, ge=1, le=1000, description="Creates sent to the runtime at once.")
    queue_limit_per_tenant: int = Field(default=10_000, ge=1, description="Queued creates a tenant may have.")
    claim_seconds: float = Field(
        default=30.0, gt=0, description="After this, a create that a scheduler took and did not finish is taken again."
    )
    grace_seconds: float = Field(
        default=20.0,
        gt=15,
        # Longer than a silent stream passes for a live one: what a stalled watcher cannot tell of must not be ended.
        description="How long a record may be without a sandbox of the runtime before it is ended.",
    )
