"""What a runtime is asked for and what it tells."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.local.runtime.steps import StartError


def new_uid() -> str:
    """A name for an incarnation that no other has."""
    return uuid.uuid4().hex[:16]


class Reason(enum.Enum):
    """Why a sandbox failed; names of orchard.sandbox.v1.SandboxReason."""

    IMAGE_PULL = "IMAGE_PULL"
    AGENT_START = "AGENT_START"
    OOM = "OOM"
    HOST_RESTART = "HOST_RESTART"
    DELETED_EXTERNALLY = "DELETED_EXTERNALLY"


@dataclass(frozen=True, slots=True)
class Image:
    """An imported image.

    Attributes:
        name: its name.
        digest: SHA-256 of what it was imported from, hexadecimal.
        size: of its files, in bytes.
        import_time: seconds since the epoch.
        env: ENV of its configuration.
        working_directory: WORKDIR of its configuration.
        user: USER of its configuration.
    """

    name: str
    digest: str
    size: int
    import_time: float
    env: Mapping[str, str]
    working_directory: str
    user: str


@dataclass(frozen=True, slots=True)
class Resources:
    """Limits; zero is the default: not limited, apart from pids (4,096) and shm (64 MiB)."""

    cpu: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0
    shm_bytes: int = 0
    pids: int = 0
    gpu: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sandbox to make.

    Attributes:
        uid: its incarnation, 1 to 32 of a-z and 0-9.
        sandbox_id: its id.
        image: digest of an imported image, or empty for the host's root.
        env: environment of commands, over the image's.
        working_directory: where commands start; empty: the image's, else the home of root.
        user: who they run as; empty: the image's, else root.
        start_argv: command to run at the start.
        expects_secret_env: its agent waits for a secret environment.
        host_network: it shares the machine's network.
        resources: its limits.
        open_network: it has a network of its own that leads out.
        start_seconds: how long it may take, apart from pulling its image.
        pull_seconds: how long that may take.
        annotations: what its record is rebuilt from (services.common.pods), for runtimes that keep it on the sandbox.
    """

    uid: str
    sandbox_id: str
    image: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    working_directory: str = ""
    user: str = ""
    start_argv: tuple[str, ...] = ()
    expects_secret_env: bool = False
    host_network: bool = False
    resources: Resources = field(default_factory=Resources)
    open_network: bool = False
    start_seconds: float = 60.0
    pull_seconds: float = 900.0
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """A sandbox ended though nobody deleted it."""

    uid: str
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Abilities:
    """What this machine can do; see GetNodeResponse."""

    user_ids: str
    limits: str
    gaps: tuple[str, ...]


class PullError(StartError):
    """The sandbox's image cannot be had."""
