"""What keeps the platform from starting."""

from __future__ import annotations


class PlatformError(Exception):
    """The platform cannot start; the message says why and what to do."""


class UsageError(PlatformError):
    """What was typed cannot be: the exit code is 2, as of any command."""
