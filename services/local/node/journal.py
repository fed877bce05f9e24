"""The journal: one small file a sandbox, its record and then a line for each change.

A daemon that is killed at any moment leaves whole lines and perhaps a torn last one, which was never told to anybody.
Not synced to the disk: it must outlive the daemon, and no sandbox outlives the machine.
"""

from __future__ import annotations

import base64
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from services.common.logs import get_logger
from services.local.node.model import Phase, Record
from services.local.runtime.model import Reason, Request, Resources

_log = get_logger(__name__)

_REVISION: Final = "revision"
_REVISIONS_A_START: Final = 1_000_000_000  # more changes than a daemon makes in its life


class Journal:
    """Records in a folder of ours alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def add(self, record: Record) -> None:
        """Keep a new record.

        Raises:
            OSError: there is no space; nothing is kept.
        """
        values = asdict(record)
        values["spec"] = base64.b64encode(record.spec).decode()
        values.update(_changing(record))
        try:
            self._append(record.uid, values, os.O_CREAT | os.O_EXCL)
        except OSError:
            self.remove(record.uid)
            raise

    def change(self, record: Record) -> None:
        """Note a record's new phase, reason, message, deadline and revision.

        Raises:
            OSError: there is no space.
        """
        self._append(record.uid, _changing(record), 0)

    def remove(self, uid: str) -> None:
        """Forget a record."""
        self._path(uid).unlink(missing_ok=True)

    def first_revision(self, at_least: int) -> int:
        """A revision above all that were ever told from this folder, whatever the clock says, and at least so high."""
        path = self._folder / _REVISION
        try:
            known = int(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            known = 0
        first = max(at_least, known)
        try:
            temporary = path.with_suffix(".new")
            temporary.write_text(str(first + _REVISIONS_A_START), encoding="ascii")
            temporary.replace(path)
        except OSError as error:
            _log.warning("the revision could not be journalled", error=str(error))
        return first

    def read_all(self) -> list[Record]:
        """Every record as it last was. A file that cannot be understood is put aside and told of."""
        records = []
        for path in sorted(self._folder.glob("*.jsonl")):
            try:
                record = _read(path)
            except (ValueError, KeyError, TypeError) as error:
                _log.error("a journal entry is damaged; put aside", path=str(path), error=str(error))
                path.rename(path.with_suffix(".damaged"))
                continue
            if record is None:
                path.unlink()
            else:
                records.append(record)
        return records

    def _path(self, uid: str) -> Path:
        return self._folder / f"{uid}.jsonl"

    def _append(self, uid: str, values: dict[str, Any], flags: int) -> None:
        data = json.dumps(values).encode() + b"\n"
        descriptor = os.open(self._path(uid), os.O_WRONLY | os.O_APPEND | flags, 0o600)
        try:
            whole = os.fstat(descriptor).st_size
            try:
                while data:
                    data = data[os.write(descriptor, data) :]
            except OSError:
                os.ftruncate(descriptor, whole)  # a torn line would spoil the next one
                raise
        finally:
            os.close(descriptor)


def _changing(record: Record) -> dict[str, Any]:
    return {
        "phase": record.phase.value,
        "reason": None if record.reason is None else record.reason.value,
        "message": record.message,
        "expire_time": record.expire_time,
        "revision": record.revision,
    }


def _read(path: Path) -> Record | None:
    """The record of a file; None if its create was never answered."""
    lines = path.read_bytes().split(b"\n")[:-1]
    if not lines:
        return None
    # Cut off a torn line, so that the next one stands alone.
    os.truncate(path, sum(len(line) + 1 for line in lines))
    record = _parse(json.loads(lines[0]))
    for line in lines[1:]:
        values = json.loads(line)
        values["phase"] = Phase(values["phase"])
        values["reason"] = None if values["reason"] is None else Reason(values["reason"])
        record = replace(record, **values)
    return record


def _parse(values: dict[str, Any]) -> Record:
    request = values["request"]
    request["resources"] = Resources(**request["resources"])
    request["start_argv"] = tuple(request["start_argv"])
    values["request"] = Request(**request)
    values["spec"] = base64.b64decode(values["spec"])
    values["phase"] = Phase(values["phase"])
    values["reason"] = None if values["reason"] is None else Reason(values["reason"])
    return Record(**values)
