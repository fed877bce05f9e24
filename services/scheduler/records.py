"""The record of a sandbox, as it stands in Redis."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.common.errors import InvalidArgumentError
from services.common.states import Reason, State


class Incarnation(NamedTuple):
    """One sandbox that a runtime has or had: its name may be another's later, its uid never."""

    tenant: str
    sandbox_id: str
    uid: str


@dataclass(frozen=True, slots=True)
class Terms:
    """What the scheduler itself reads of a spec. Times in milliseconds; 0: off."""

    ttl_ms: int
    idle_timeout_ms: int = 0
    heartbeat_timeout_ms: int = 0
    start_timeout_ms: int = 60_000
    priority: int = 0
    cpu_milli: int = 0
    """Thousandths of a CPU that count against the tenant's quota."""
    memory_bytes: int = 0
    """Memory that counts against it."""


@dataclass(frozen=True, slots=True)
class Record:
    """One sandbox. Times in milliseconds since 1970; 0: unset."""

    tenant: str
    sandbox_id: str
    request_id: str
    spec_hash: str
    spec: bytes = field(repr=False)
    """Serialised orchard.sandbox.v1.SandboxSpec, defaults filled in."""
    state: State
    reason: Reason = Reason.UNSPECIFIED
    message: str = ""
    uid: str = ""
    create_ms: int = 0
    ready_ms: int = 0
    end_ms: int = 0
    expire_ms: int = 0
    lifetime_ms: int = 0
    """How long after `create_ms` it may live at most, however often its end is moved; 0: no bound known."""
    expects_secret_env: bool = False

    @property
    def incarnation(self) -> Incarnation:
        """What the runtime made of it; without a uid it has made nothing yet."""
        return Incarnation(self.tenant, self.sandbox_id, self.uid)

    @classmethod
    def from_hash(cls, fields: Mapping[bytes, bytes]) -> Record:
        """From what HGETALL returns."""

        def text(name: bytes) -> str:
            return fields[name].decode()

        return cls(
            tenant=text(b"tenant"),
            sandbox_id=text(b"sandbox_id"),
            request_id=text(b"request_id"),
            spec_hash=text(b"spec_hash"),
            spec=fields[b"spec"],
            state=State(int(fields[b"state"])),
            reason=Reason(int(fields[b"reason"])),
            message=text(b"message"),
            uid=text(b"uid"),
            create_ms=int(fields[b"create_ms"]),
            ready_ms=int(fields[b"ready_ms"]),
            end_ms=int(fields[b"end_ms"]),
            expire_ms=int(fields[b"expire_ms"]),
            lifetime_ms=int(fields.get(b"lifetime_ms", b"0")),
            expects_secret_env=fields[b"expects_secret_env"] == b"1",
        )


def beyond_lifetime(field: str, last_ms: int) -> InvalidArgumentError:
    """The refusal of an end after `last_ms`, in milliseconds since 1970, up to which a sandbox may live."""
    last = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last_ms / 1000))
    return InvalidArgumentError.of(
        field, f"reaches beyond the longest life of this sandbox, which ends at {last}; give less", last_ms=last_ms
    )
