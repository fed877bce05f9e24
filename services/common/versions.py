"""Versions of what talks to each other, and how old an agent may be: sandboxes outlive an upgrade."""

from __future__ import annotations

import re
from typing import Final

MINIMUM_AGENT: Final = "0.1.0"
"""The oldest agent that a gateway works with: one minor version older than its own, or the first release."""
AGENT_VERSION_KEY: Final = "orchard-agent-version"
"""Metadata with which an agent's health tells its version."""
_VERSION: Final = re.compile(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})(?:[-+.a-z].*)?")


def parse(version: str) -> tuple[int, int, int] | None:
    """MAJOR.MINOR.PATCH as numbers; None for anything else."""
    match = _VERSION.fullmatch(version)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def works(version: str, minimum: str = MINIMUM_AGENT) -> bool:
    """Whether an agent of this version is new enough. What is no version is not."""
    found, needed = parse(version), parse(minimum)
    return found is not None and needed is not None and found >= needed
