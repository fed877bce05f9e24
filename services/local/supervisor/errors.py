"""What keeps the platform from starting."""

from __future__ import annotations


class PlatformError(Exception):
    """The platform cannot start; the message says why and what to do."""
