"""What the watcher's stream says of a sandbox, as a value, and its form on the wire."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchard.watch.v1 import watch_service_pb2

from services.common.states import Reason, State
from services.common.times import to_ms, to_timestamp


@dataclass(frozen=True, slots=True)
class Observed:
    """A sandbox as the runtime has it. Times in milliseconds since 1970; 0: unset."""

    tenant: str
    sandbox_id: str
    uid: str
    revision: int
    state: State
    reason: Reason = Reason.UNSPECIFIED
    message: str = ""
    endpoint: str = ""
    create_ms: int = 0
    ready_ms: int = 0
    expire_ms: int = 0
    request_id: str = ""
    spec_hash: str = ""
    spec: bytes = field(default=b"", repr=False)
    """The spec as serialised orchard.sandbox.v1.SandboxSpec; empty where it was not asked for."""
    agent_version: str = ""


def to_proto(observed: Observed, *, include_spec: bool) -> watch_service_pb2.SandboxStatus:
    """The wire form."""
    status = watch_service_pb2.SandboxStatus(
        tenant=observed.tenant,
        sandbox_id=observed.sandbox_id,
        uid=observed.uid,
        revision=observed.revision,
        state=observed.state.value,  # type: ignore[arg-type]  # the numbers are the proto's
        reason=observed.reason.value,  # type: ignore[arg-type]
        message=observed.message,
        endpoint=observed.endpoint,
        create_time=to_timestamp(observed.create_ms),
        ready_time=to_timestamp(observed.ready_ms),
        expire_time=to_timestamp(observed.expire_ms),
        request_id=observed.request_id,
        spec_hash=observed.spec_hash,
        agent_version=observed.agent_version,
    )
    if include_spec:
        status.spec.MergeFromString(observed.spec)
    return status


def from_proto(status: watch_service_pb2.SandboxStatus) -> Observed:
    """The value."""
    return Observed(
        tenant=status.tenant,
        sandbox_id=status.sandbox_id,
        uid=status.uid,
        revision=status.revision,
        state=State(status.state),
        reason=Reason(status.reason),
        message=status.message,
        endpoint=status.endpoint,
        create_ms=to_ms(status.create_time),
        ready_ms=to_ms(status.ready_time),
        expire_ms=to_ms(status.expire_time),
        request_id=status.request_id,
        spec_hash=status.spec_hash,
        spec=status.spec.SerializeToString(deterministic=True) if status.HasField("spec") else b"",
        agent_version=status.agent_version,
    )
