"""Settings of the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from services.common.settings import InternalServiceSettings
from services.common.tls import TlsFiles
from services.scheduler.kubernetes_settings import KubernetesSettings


class SchedulerSettings(KubernetesSettings, InternalServiceSettings):
    """Read from ORCHARD_* environment variables."""

    redis_url: SecretStr = Field(description="redis://host:port/db, rediss://..., or unix:///path.")
    redis_ca_file: Path | None = Field(
        default=None, description="Authorities of the Redis server, whose certificate must have the URL's host."
    )
    redis_cert_file: Path | None = Field(default=None, description="Certificate to show to it.")
    redis_key_file: Path | None = Field(default=None, description="Its private key.")
    watcher_address: str = Field(description="gRPC address of the watcher.")
    starts_in_flight: int = Field(
        default=16, ge=1, le=1000, description="Creates, and also deletes, sent to the runtime at once."
    )
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

    @model_validator(mode="after")
    def _redis_files_go_together(self) -> Self:
        if (self.redis_cert_file is None) != (self.redis_key_file is None):
            raise ValueError("ORCHARD_REDIS_CERT_FILE and ORCHARD_REDIS_KEY_FILE go together: set both")
        if self.redis_cert_file is not None and self.redis_ca_file is None:
            raise ValueError("ORCHARD_REDIS_CERT_FILE needs ORCHARD_REDIS_CA_FILE")
        if self.redis_ca_file is not None and not self.redis_url.get_secret_value().startswith("rediss://"):
            raise ValueError("ORCHARD_REDIS_CA_FILE needs an ORCHARD_REDIS_URL that begins with rediss://")
        return self

    def redis_tls(self) -> TlsFiles | None:
        """What to use TLS with; None: as the URL says."""
        if self.redis_ca_file is None:
            return None
        return TlsFiles(self.redis_cert_file, self.redis_key_file, self.redis_ca_file)
