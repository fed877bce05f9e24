"""The supervisor of the one-machine platform."""

from services.local.supervisor.errors import PlatformError
from services.local.supervisor.platform import Platform, PlatformOptions

__all__ = ["Platform", "PlatformError", "PlatformOptions"]
