"""What brings the agent into a Pod, whatever its image is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Injection:
    """The parts of a Pod that hold the agent: everything below pods.ROOT, its volumes, and what is started.

    Objects as the API takes them. Whoever adds them to a Pod must not change them: every Pod shares them.
    """

    volumes: tuple[Mapping[str, Any], ...]
    """Of the Pod."""
    mounts: tuple[Mapping[str, Any], ...]
    """Of the sandbox's container."""
    init_containers: tuple[Mapping[str, Any], ...]
    """Run before it; none where the payload needs no copy."""
    command: tuple[str, ...]
    """Of the sandbox's container, in place of the image's entry point."""
