"""The state of every process, in a file of the run directory, for people and tests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from services.local.supervisor.files import write_private
from services.local.supervisor.unit import Unit

STATUS_FILE: Final = "status.json"


def write_status(run: Path, endpoint: str, units: Iterable[Unit]) -> None:
    """Write it, atomically: {"pid", "endpoint", "services": {name: {"state", "pid", "starts"}}}."""
    services = {
        unit.name: {"state": unit.state, "pid": unit.child.pid if unit.child else None, "starts": unit.starts}
        for unit in units
    }
    text = json.dumps({"pid": os.getpid(), "endpoint": endpoint, "services": services})
    write_private(run / STATUS_FILE, text.encode(), durable=False)
