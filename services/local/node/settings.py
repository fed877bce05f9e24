"""Settings of the node daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.common.settings import InternalServiceSettings


class NodeSettings(InternalServiceSettings):
    """Read from environment variables that begin with ORCHARD_."""

    data_directory: Path = Field(description="Where sandboxes and images are kept, below node/.")
    run_directory: Path = Field(description="Folder of mode 0700 for sockets; its path must be short.")
    concurrent_starts: int = Field(default=8, ge=1, le=256, description="Sandboxes that are started at the same time.")
    spare_sandboxes: int = Field(
        default=2, ge=0, le=64, description="Sandboxes on the host's root that are made ahead of creates; 0: none."
    )
    agent_module: str = Field(
        default="services.exec_agent.app", description="Module of the agent: preload, run and AgentConfig."
    )
    launcher_file: Path | None = Field(
        default=None,
        description="The launcher, if not build/launcher. Where there is none, Python processes do its work.",
    )
    runtime: Literal["process", "docker"] = Field(
        default="process", description="What sandboxes are: processes in namespaces of their own, or containers."
    )
    payload_folder: Path | None = Field(
        default=None, description="The agent's payload for containers, if not build/payload/ARCH. With docker."
    )
    docker_pull: Literal["missing", "never"] = Field(
        default="missing", description="Whether images that the engine lacks are pulled. With docker."
    )
