"""Import, export and curation of trajectories: files in other formats, and datasets to train on.

    from pathlib import Path
    from orchard.data import read

    for record in read(Path("run.traj.json")):
        print(record.id, len(record.steps))

What needs more than the client's own packages (Parquet, plan files, near-duplicates) is imported when it is used, and
says which extra brings it.
"""

from orchard.data.errors import DataError, MissingExtraError, OptionError, Where
from orchard.data.record import Record
from orchard.data.registry import codec, codecs, detect, read
from orchard.data.report import Loss, Report

__all__ = [
    "DataError",
    "Loss",
    "MissingExtraError",
    "OptionError",
    "Record",
    "Report",
    "Where",
    "codec",
    "codecs",
    "detect",
    "read",
]
