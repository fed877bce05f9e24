"""The journal: one small file a sandbox, replaced as a whole, so that a daemon that is killed at any moment finds
each as it was or as it is.

Not synced to the disk: it must outlive the daemon, and no sandbox outlives the machine.
"""

from __future__ import annotations

import base64
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.common.logs import get_logger
from services.local.node.model import Phase, Record
from services.local.runtime.model import Reason, Request, Resources

_log = get_logger(__name__)


class Journal:
    """Records in a folder of ours alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(self, record: Record) -> None:
        """Keep a record, in place of an earlier one.

        Raises:
            OSError: there is no space.
        """
        values = asdict(record)
        values["spec"] = base64.b64encode(record.spec).decode()
        values["phase"] = record.phase.value
        values["reason"] = None if record.reason is None else record.reason.value
        path = self._folder / f"{record.uid}.json"
        temporary = path.with_suffix(".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(values, file)
        temporary.rename(path)

    def remove(self, uid: str) -> None:
        """Forget a record."""
        (self._folder / f"{uid}.json").unlink(missing_ok=True)

    def read_all(self) -> list[Record]:
        """Every record. A file that cannot be understood is put aside and told of."""
        records = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                records.append(_parse(json.loads(path.read_text(encoding="utf-8"))))
            except (ValueError, KeyError, TypeError) as error:
                _log.error("a journal entry is damaged; put aside", path=str(path), error=str(error))
                path.rename(path.with_suffix(".damaged"))
        for path in self._folder.glob("*.new"):
            path.unlink(missing_ok=True)
        return records


def _parse(values: dict[str, Any]) -> Record:
    request = values["request"]
    request["resources"] = Resources(**request["resources"])
    request["start_argv"] = tuple(request["start_argv"])
    values["request"] = Request(**request)
    values["spec"] = base64.b64decode(values["spec"])
    values["phase"] = Phase(values["phase"])
    values["reason"] = None if values["reason"] is None else Reason(values["reason"])
    return Record(**values)
