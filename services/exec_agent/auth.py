"""Who may call an agent: whoever shows a gateway's token for this very sandbox."""

from __future__ import annotations

from services.common.interceptor import Metadata
from services.common.tokens import AGENT_TOKEN_KEY, Principal, Verifier


class AgentAuthenticator:
    """See interceptor.Authenticator."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    async def authenticate(self, method: str, metadata: Metadata) -> Principal | None:  # noqa: ARG002
        """Check the token. Agents know no principals."""
        self._verifier.verify(metadata.get(AGENT_TOKEN_KEY))
        return None
