"""What a tenant may have: kept by the gateway, carried in its principals, heeded by the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds on what a tenant's sandboxes take together. None: not bounded."""

    revision: int = 0
    """Grows with each change; 0: it was never set. Of two, the higher holds."""
    sandboxes: int | None = None
    """How many there may be at once, queued ones apart."""
    cpu: float | None = None
    memory_bytes: int | None = None
    creates_per_second: float | None = None
    """How many leave the queue each second in the long run."""
    maximum_lifetime_ms: int | None = None
    """How long each may live, however often its end is moved."""

    def to_claims(self) -> dict[str, int | float]:
        """What a token carries of it: what is set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of_claims(cls, claims: Mapping[str, Any]) -> Quota:
        """The quota in a token. What a newer gateway adds is ignored."""
        known = cls.__dataclass_fields__
        return cls(**{name: value for name, value in claims.items() if name in known})


UNLIMITED = Quota()
"""Of a tenant whose quota was never set."""
