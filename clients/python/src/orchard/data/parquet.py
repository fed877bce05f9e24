"""Rows in Parquet: read a row group at a time, written from lines of JSON."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from orchard.data.errors import DataError, Where
from orchard.data.schemas import arrow

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH: Final = 1000
"""Rows that are in memory at once."""


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file.

    Raises:
        MissingExtraError: pyarrow is not installed.
        DataError: the file is no Parquet.
    """
    pa = arrow()
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise DataError(f"is no Parquet: {error}", where=Where(str(path)), fix="export it again") from None
    with file:
        for batch in file.iter_batches(batch_size=_BATCH):
            yield from batch.to_pylist()


def write_parquet(lines: Path, output: Path, schema: pa.Schema) -> None:
    """Write a file of JSON lines as Parquet; a column `images` of bytes takes `data:` addresses."""
    arrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = schema.field("images") if "images" in schema.names else None
    with pq.ParquetWriter(output, schema, compression="zstd") as writer, lines.open(encoding="utf-8") as file:
        batch: list[dict[str, Any]] = []
        for line in file:
            row = json.loads(line)
            if images is not None:
                row["images"] = [{"bytes": _bytes(address), "path": None} for address in row["images"]]
            batch.append(row)
            if len(batch) == _BATCH:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                batch = []
        writer.write_table(pa.Table.from_pylist(batch, schema))
    with output.open("rb+") as made:
        os.fsync(made.fileno())


def _bytes(address: str) -> bytes:
    return base64.b64decode(address.partition(",")[2])
