"""What a runtime tells the watcher, and what the watcher needs of it and of agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from services.common.observed import Observed
from services.common.states import Reason


@dataclass(frozen=True, slots=True)
class Restarted:
    """Everything that exists will come anew; what is not named before the next Synced is gone. No sign of life."""


@dataclass(frozen=True, slots=True)
class Synced:
    """The runtime has sent everything that existed when its stream began, or was Restarted."""

    complete_revision: int = 0
    """All changes up to this revision of the runtime have been told; 0: not stated. Here and below."""


@dataclass(frozen=True, slots=True)
class Bookmark:
    """A sign of life of the runtime's stream."""

    complete_revision: int = 0


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Nothing comes for now, and why; the stream will go on where it was. No sign of life."""

    why: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """When to give up on a sandbox that is still as it was seen, and with which reason and message."""

    at_ms: int
    """Milliseconds since 1970."""
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Seen:
    """A sandbox as the runtime has it. The revision is the runtime's own.

    STARTING with an endpoint means: ask there. A DELETED one may have nothing but uid and revision.
    """

    observed: Observed
    start_timeout_seconds: float
    """How long its agent may take to answer from when it runs."""
    running: bool = True
    """With an endpoint: whether its processes are known to run. Before that the start timeout does not count."""
    give_up: GiveUp | None = None
    complete_revision: int = 0


Event = Seen | Synced | Bookmark | Restarted | Interrupted


class Runtime(Protocol):
    """What the watcher needs of a runtime."""

    def watch(self) -> AsyncIterator[Event]:
        """One stream: all sandboxes, Synced, then changes, with a Bookmark now and then (see Watcher).

        Raises:
            UnavailableError: the stream cannot be had or broke.
        """


class Prober(Protocol):
    """Asks an agent whether it is there."""

    async def answers(self, endpoint: str, uid: str) -> str | None:
        """The version of the agent at `endpoint`, empty if it tells none; None unless it answers as sandbox `uid`. Ends
        within a second.
        """
