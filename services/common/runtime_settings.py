"""Settings of services that talk to what runs the sandboxes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from services.common.settings import ServiceSettings


class RuntimeSettings(ServiceSettings):
    """Which runtime, and how to reach it. Read from ORCHARD_* environment variables."""

    runtime: Literal["process", "docker", "kubernetes"] = Field(
        default="process",
        description="What runs the sandboxes: a node daemon on this machine, as processes or as containers of a Docker "
        "engine, or a Kubernetes cluster.",
    )
    node_address: str = Field(
        default="",
        validate_default=True,
        description="gRPC address of the node daemon: unix:/path. With the process and docker runtimes, which need it.",
    )
    namespace: str = Field(
        default="orchard-sandboxes",
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
        description="Namespace of the sandboxes' Pods. With the kubernetes runtime.",
    )
    kubeconfig: Path | None = Field(
        default=None,
        description="kubeconfig file of the cluster; unset: the service account of the Pod that the service runs in.",
    )

    @field_validator("node_address")
    @classmethod
    def _with_process(cls, value: str, info: ValidationInfo) -> str:
        runtime = info.data.get("runtime")
        if not value and runtime in ("process", "docker"):
            raise ValueError(f"is needed with ORCHARD_RUNTIME={runtime}: the node daemon's address, unix:/path")
        return value
