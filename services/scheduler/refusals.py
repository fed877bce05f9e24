"""What the scheduler says when it cannot do what is asked, and of what is no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from services.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    NotFoundError,
    OrchardError,
    ResourceExhaustedError,
)
from services.common.states import Reason, State
from services.common.times import now_ms
from services.scheduler.records import Record
from services.scheduler.store import OverQuotaError

_QUOTA_FIELDS: Final = {"cpu": "spec.resources.cpu", "memory": "spec.resources.memory_bytes"}


def of_create(outcome: str, request_id: str, sandbox_id: str, queue_limit: int) -> OrchardError | None:
    """The refusal in an outcome of lua/create.lua; None where it is none."""
    if outcome == "request_conflict":
        return AlreadyExistsError(
            f"request id {request_id!r} was used for sandbox {sandbox_id!r} with another spec; use a new request id",
            reason="REQUEST_ID_REUSED",
            request_id=request_id,
            sandbox_id=sandbox_id,
        )
    if outcome == "request_ended":
        return AlreadyExistsError(
            f"request id {request_id!r} was used for sandbox {sandbox_id!r}, which has ended, and another request "
            "has that id now; use a new request id",
            reason="REQUEST_ENDED",
            request_id=request_id,
            sandbox_id=sandbox_id,
        )
    if outcome == "taken":
        return AlreadyExistsError(
            f"sandbox {sandbox_id!r} exists; choose another id or delete it first",
            reason="SANDBOX_EXISTS",
            sandbox_id=sandbox_id,
        )
    if outcome == "queue_full":
        return ResourceExhaustedError(
            f"{queue_limit} creates of this tenant are queued already; wait for some to start",
            reason="QUEUE_FULL",
            limit=queue_limit,
        )
    return None


def over_quota(error: OverQuotaError) -> ResourceExhaustedError:
    """A create that its tenant's quota never lets start."""
    bound = {"cpu": f"{error.bound / 1000:g} CPUs", "memory": f"{error.bound:,} bytes of memory"}.get(
        error.what, f"{error.bound:,} sandboxes"
    )
    field = _QUOTA_FIELDS.get(error.what, "spec")
    return ResourceExhaustedError(
        f"{field}: it alone is over the tenant's quota of {bound}; ask for less, or have the quota raised",
        reason="TENANT_QUOTA",
        field=field,
        bound=error.bound,
    )


def ended(sandbox_id: str) -> FailedPreconditionError:
    """What is asked for needs a sandbox that lives."""
    return FailedPreconditionError(f"sandbox {sandbox_id!r} has ended", reason="SANDBOX_ENDED", sandbox_id=sandbox_id)


def not_found(sandbox_id: str) -> NotFoundError:
    """There is no sandbox of this id in the caller's tenant."""
    return NotFoundError(f"there is no sandbox {sandbox_id!r}", reason="SANDBOX_NOT_FOUND", sandbox_id=sandbox_id)


def lost(last: Record) -> Record:
    """The end of one that neither the store nor the runtime has any more."""
    if last.state is State.DELETING:
        return replace(last, state=State.DELETED, message="", end_ms=now_ms())
    if last.uid:
        reason, message = Reason.DELETED_EXTERNALLY, "it was removed without the platform being asked"
    else:
        reason = Reason.QUEUE_LOST
        message = "the create was lost with the lease store; repeat it under the same request id"
    return replace(last, state=State.FAILED, reason=reason, message=message, end_ms=now_ms())
