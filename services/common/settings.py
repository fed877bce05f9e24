"""Settings that every service has. Each service's settings.py extends this; names carry their units."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ServiceSettings(BaseSettings):
    """Read from environment variables that begin with ORCHARD_."""

    model_config = SettingsConfigDict(env_prefix="ORCHARD_", frozen=True, extra="ignore")

    listen: str = Field(description="Address to serve on: host:port or unix:/path.")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    lifeline_fd: int | None = Field(
        default=None,
        description="Read end of a pipe; the service stops when the other end closes.",
    )
    stop_notice_seconds: float = Field(
        default=0.0,
        ge=0,
        le=60,
        description="Time from NOT_SERVING to the end of streams, for balancers to notice.",
    )


class InternalServiceSettings(ServiceSettings):
    """Settings of services that accept calls from gateways alone."""

    public_keys_file: Path = Field(
        description="PEM file with the gateway's public keys, two at most during a rotation."
    )
