"""What the node daemon keeps of a sandbox."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from services.local.runtime.model import Reason, Request


class Phase(enum.Enum):
    """Steps of a sandbox's life; names of orchard.node.v1.NodeSandboxPhase."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    FAILED = "FAILED"
    GONE = "GONE"


@dataclass(frozen=True, slots=True)
class Record:
    """One sandbox.

    Attributes:
        tenant: whose it is.
        request_id: of its create.
        spec_hash: of its spec.
        spec: the spec as it came, serialised.
        request: what the runtime is asked for.
        phase: where it is in its life.
        reason: why, with FAILED.
        message: a sentence for people.
        endpoint: gRPC address of its agent.
        create_time: seconds since the epoch.
        expire_time: likewise; zero: never.
        revision: grows with every change on this node.
    """

    tenant: str
    request_id: str
    spec_hash: str
    spec: bytes
    request: Request
    phase: Phase
    reason: Reason | None
    message: str
    endpoint: str
    create_time: float
    expire_time: float
    revision: int

    @property
    def uid(self) -> str:
        """Its incarnation."""
        return self.request.uid

    @property
    def key(self) -> tuple[str, str]:
        """What is unique among sandboxes that are there."""
        return self.tenant, self.request.sandbox_id


@dataclass(frozen=True, slots=True)
class Creation:
    """A create call; `request` has the name of the image where Request has its digest."""

    tenant: str
    request_id: str
    spec_hash: str
    spec: bytes
    request: Request
    expire_time: float
    create_time: float = 0.0
    """When it was accepted; 0: now."""
