"""Authentication of calls between our own services: a token signed by the gateway in the metadata."""

from __future__ import annotations

from typing import Final

from services.common.interceptor import Metadata, current_call
from services.common.tokens import PRINCIPAL_KEY, Principal, Verifier, principal_of

EXPECTS_SECRET_ENV_KEY: Final = "orchard-expects-secret-env"  # noqa: S105 (a metadata key)
"""Metadata by which the gateway tells the scheduler that it holds a secret environment for this create."""


class PrincipalAuthenticator:
    """Accepts a principal that the gateway signed; for internal services."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    async def authenticate(self, method: str, metadata: Metadata) -> Principal | None:  # noqa: ARG002
        """See interceptor.Authenticator."""
        return principal_of(self._verifier.verify(metadata.get(PRINCIPAL_KEY)))


def principal() -> Principal:
    """Who made the call that is being served. Only in servers whose authenticator gives a principal."""
    found = current_call.get().principal
    if found is None:
        raise RuntimeError("this server does not authenticate calls")
    return found
