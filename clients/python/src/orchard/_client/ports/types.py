"""Values of port forwarding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from orchard._client.errors import OrchardError


@dataclass(frozen=True)
class Address:
    """Where something listens."""

    host: str
    """An IP address."""
    port: int
    """The port."""

    @property
    def url(self) -> str:
        """It as the base of HTTP URLs, like "http://127.0.0.1:8080"."""
        return f"http://{self}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ForwardState(StrEnum):
    """What happened to a connection."""

    OPENED = "opened"
    """The server inside the sandbox has it."""
    ENDED = "ended"
    """Both sides have ended it."""
    BROKEN = "broken"
    """It was reset, or never reached the server; `error` says why, unless the local program broke it."""


@dataclass(frozen=True)
class ForwardEvent:
    """Something that happened to one connection."""

    number: int
    """Of the connection, from 1 on."""
    port: int
    """The port inside the sandbox."""
    state: ForwardState
    """What happened."""
    sent: int = 0
    """Bytes that went into the sandbox by then."""
    received: int = 0
    """Bytes that came out of it by then."""
    error: OrchardError | None = None
    """Why it was broken."""


OnForward = Callable[[ForwardEvent], None]
"""Is told of connections. Of the synchronous client it is called on another thread; it must not block or raise."""
