"""Whether a request is for this agent's sandbox."""

from __future__ import annotations

from services.common.errors import NotFoundError
from services.common.validation import Fields


def fields_for(own_id: str, sandbox_id: str) -> Fields:
    """Field rules to go on with, for a request that names the sandbox `sandbox_id`.

    Raises:
        NotFoundError: it is another sandbox's, as after a wrong route.
    """
    fields = Fields()
    if sandbox_id != own_id:
        if not fields.sandbox_id("sandbox_id", sandbox_id):
            return fields  # told with whatever else is wrong
        raise NotFoundError(
            f"this agent serves no sandbox {sandbox_id!r}", reason="SANDBOX_NOT_FOUND", sandbox_id=sandbox_id
        )
    return fields
