"""Settings that every service has. Each service's settings.py extends this; names carry their units."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.common.tls import ClientTls, TlsFiles

REFUSED: Final = 2
"""The exit code of a service that cannot work with the settings that it was given."""


class SettingsError(Exception):
    """Settings that are well-formed and yet cannot work; the message says what to set."""


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
    health_listen: str = Field(
        default="", description="Address in the clear for grpc.health.v1 alone, for probes that cannot speak TLS."
    )
    tls_cert_file: Path | None = Field(default=None, description="Certificate to serve with. Needs tls_key_file.")
    tls_key_file: Path | None = Field(default=None, description="Its private key.")
    tls_client_ca_file: Path | None = Field(
        default=None, description="Authorities of which callers must show a certificate."
    )
    tls_ca_file: Path | None = Field(
        default=None, description="Authorities of the services that this one calls; calls over TCP then use TLS."
    )
    tls_client_cert_file: Path | None = Field(
        default=None, description="Certificate to show when calling services. Default: the one to serve with."
    )
    tls_client_key_file: Path | None = Field(default=None, description="Its private key.")

    @model_validator(mode="after")
    def _files_go_together(self) -> Self:
        for prefix in ("TLS", "TLS_CLIENT"):
            cert, key = (getattr(self, f"{prefix}_{part}_FILE".lower()) for part in ("CERT", "KEY"))
            if (cert is None) != (key is None):
                raise ValueError(f"ORCHARD_{prefix}_CERT_FILE and ORCHARD_{prefix}_KEY_FILE go together: set both")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("ORCHARD_TLS_CLIENT_CA_FILE needs ORCHARD_TLS_CERT_FILE and ORCHARD_TLS_KEY_FILE")
        return self

    def server_tls(self) -> TlsFiles | None:
        """What to serve TLS with; None in the clear."""
        if self.tls_cert_file is None:
            return None
        return TlsFiles(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)

    def client_tls(self) -> ClientTls | None:
        """Credentials of calls to other services; None in the clear.

        Raises:
            TlsError: a file cannot be used.
        """
        if self.tls_ca_file is None:
            return None
        own = self.tls_client_cert_file is not None
        cert = self.tls_client_cert_file if own else self.tls_cert_file
        key = self.tls_client_key_file if own else self.tls_key_file
        return ClientTls(TlsFiles(cert, key, self.tls_ca_file))


class DatabaseSettings(BaseSettings):
    """Settings of what uses PostgreSQL."""

    model_config = SettingsConfigDict(env_prefix="ORCHARD_", frozen=True, extra="ignore")

    database_url: SecretStr = Field(description="postgresql://... of the database; each service has its own schema.")
    database_ca_file: Path | None = Field(
        default=None, description="Authorities of the database server, whose certificate must then have the URL's host."
    )
    database_cert_file: Path | None = Field(default=None, description="Certificate to show to it.")
    database_key_file: Path | None = Field(
        default=None, description="Its private key; no other user may be able to read it (mode 0600, of root 0640)."
    )

    @model_validator(mode="after")
    def _database_files_go_together(self) -> Self:
        if (self.database_cert_file is None) != (self.database_key_file is None):
            raise ValueError("ORCHARD_DATABASE_CERT_FILE and ORCHARD_DATABASE_KEY_FILE go together: set both")
        if self.database_cert_file is not None and self.database_ca_file is None:
            raise ValueError("ORCHARD_DATABASE_CERT_FILE needs ORCHARD_DATABASE_CA_FILE")
        return self

    def database_tls(self) -> TlsFiles | None:
        """What to use TLS with; None: as the URL says."""
        if self.database_ca_file is None:
            return None
        return TlsFiles(self.database_cert_file, self.database_key_file, self.database_ca_file)


class AgentCallerSettings(ServiceSettings):
    """Settings of services that call the agents in sandboxes."""

    agent_tls_ca_file: Path | None = Field(
        default=None, description="Authorities of the agents' certificates; calls to agents over TCP then use TLS."
    )
    agent_tls_name: str = Field(
        default="orchard-agent",
        min_length=1,
        description="Name in the agents' certificates: their addresses come and go, so they share one.",
    )

    def agent_tls(self) -> ClientTls | None:
        """Credentials of calls to agents; None in the clear.

        Raises:
            TlsError: the file cannot be used.
        """
        if self.agent_tls_ca_file is None:
            return None
        return ClientTls(TlsFiles(ca=self.agent_tls_ca_file), server_name=self.agent_tls_name)


class InternalServiceSettings(ServiceSettings):
    """Settings of services that accept calls from gateways alone."""

    public_keys_file: Path = Field(
        description="PEM file with the gateway's public keys, two at most during a rotation."
    )
