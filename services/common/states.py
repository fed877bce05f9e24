"""States and reasons of a sandbox, numbered as in orchard.sandbox.v1 (a unit test compares them)."""

from __future__ import annotations

from enum import IntEnum


class State(IntEnum):
    """See orchard.sandbox.v1.SandboxState."""

    UNSPECIFIED = 0
    QUEUED = 1
    STARTING = 2
    READY = 3
    DELETING = 4
    DELETED = 5
    FAILED = 6

    @property
    def terminal(self) -> bool:
        """Whether nothing follows."""
        return self in (State.DELETED, State.FAILED)


class Reason(IntEnum):
    """See orchard.sandbox.v1.SandboxReason."""

    UNSPECIFIED = 0
    REQUESTED = 1
    EXPIRED = 2
    IMAGE_PULL = 3
    UNSCHEDULABLE = 4
    QUOTA = 5
    AGENT_START = 6
    EVICTED = 7
    OOM = 8
    NODE_LOST = 9
    HOST_RESTART = 10
    QUEUE_LOST = 11
    DELETED_EXTERNALLY = 12
