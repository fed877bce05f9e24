"""Files of a format, made of one record."""

from __future__ import annotations

import json
from pathlib import Path

from orchard.data import Record, Report, codecs
from orchard.data.options import ExportOptions


def write(record: Record, name: str, folder: Path) -> tuple[Path, Report]:
    """One record as a file of this format."""
    report = Report()
    rows = codecs()[name].rows
    assert rows is not None
    made = list(rows(record, ExportOptions(), report))
    for row in made:
        for file, data in row.files.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(data)
    path = folder / "out.jsonl"
    path.write_text("".join(json.dumps(row.value) + "\n" for row in made), encoding="utf-8")
    return path, report
