"""Settings of the gateway."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

from pydantic import Field, field_validator

from services.common.settings import AgentCallerSettings, DatabaseSettings

_ENDPOINT: Final = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9-]{0,62})=(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})\Z"
)


class Endpoint(NamedTuple):
    """Where an endpoint of the platform is."""

    host: str
    port: int


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
    gateway_endpoints: str = Field(
        default="",
        description="Endpoints that sandboxes may be shown, as name=host:port[,name=host:port]. Empty: there are none.",
    )
    activity_seconds: float = Field(default=5.0, gt=0, le=60, description="How often use of sandboxes is reported.")

    @field_validator("gateway_endpoints")
    @classmethod
    def _endpoints_can_be_read(cls, value: str) -> str:
        parse_endpoints(value)
        return value

    def endpoints(self) -> Mapping[str, Endpoint]:
        """Endpoints that sandboxes may be shown, by name."""
        return parse_endpoints(self.gateway_endpoints)


def parse_endpoints(text: str) -> Mapping[str, Endpoint]:
    """Endpoints of "name=host:port[,name=host:port]"; a host may be [IPv6].

    Raises:
        ValueError: an entry is none; the message names it.
    """
    found: dict[str, Endpoint] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = _ENDPOINT.match(entry)
        if match is None or not 1 <= int(match["port"]) <= 65_535:
            raise ValueError(f"{entry!r} is no name=host:port; names have 1 to 63 of a-z, 0-9 and '-'")
        if match["name"] in found:
            raise ValueError(f"{match['name']!r} is there twice")
        found[match["name"]] = Endpoint(match["host"].strip("[]"), int(match["port"]))
    return found
