"""Imported images."""

from __future__ import annotations

from collections.abc import Iterable

from services.local.runtime.model import Image
from services.local.runtime.setup import Machine


class ImageStore:
    """See services.local.node.service.Images."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def find(self, name: str) -> Image | None:
        """By name."""
        del name
        return None

    def by_digest(self, digest: str) -> Image | None:
        """By digest."""
        del digest
        return None

    async def unused(self, digest: str, still_used: Iterable[str]) -> None:
        """A sandbox that used it is gone."""
