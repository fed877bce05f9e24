"""A place where the agent notes changes of several files while they are under way."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.exec_agent.files.intents import Intents


@contextmanager
def intents() -> Iterator[Intents]:
    """Within it; of what has ended nothing may be left there."""
    with tempfile.TemporaryDirectory(prefix="intents") as folder:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            yield Intents(descriptor)
            assert not list(Path(folder).iterdir())
        finally:
            os.close(descriptor)
