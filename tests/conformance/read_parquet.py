"""The `datasets` library and pyarrow on Parquet files; prints rows and columns as each sees them.

Usage: read_parquet.py FILE...
"""

import io
import json
import sys

import pyarrow.parquet as pq
from datasets import Dataset, Image, List, load_dataset


def images_of(dataset: Dataset) -> int:
    """How many images the rows have, each of which must be decoded as one."""
    cast = dataset.cast_column("images", List(Image(decode=False)))
    found = [image["bytes"] for row in cast for image in row["images"]]
    assert all(io.BytesIO(data).read(4) == b"\x89PNG" for data in found)
    return len(found)


found = {}
for path in sys.argv[1:]:
    dataset = load_dataset("parquet", data_files=path, split="train")
    table = pq.read_table(path)
    assert table.num_rows == len(dataset)
    assert table.column_names == dataset.column_names
    rows = dataset.remove_columns("images") if "images" in dataset.column_names else dataset
    images = images_of(dataset) if "images" in dataset.column_names else 0
    found[path] = {"rows": list(rows), "columns": dataset.column_names, "images": images}
print(json.dumps(found))
