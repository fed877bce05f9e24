"""Trainers and the `datasets` library take what we write."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from orchard.data import Record, codec
from orchard.data.codecs.base import Container
from orchard.data.export import export
from orchard.data.registry import writable
from orchard.data.sources import RecordSource

from tests.conformance.environments import run
from tests.unit.data.making import branching, record, with_image


def pool() -> list[Record]:
    made = [record(f"t{n}", n % 3 + 1, 1.0 if n % 2 else -1.0, group=f"g{n // 3}", tokens=True) for n in range(6)]
    for number, one in enumerate(made):
        one.trajectory.attempt = number
        one.steps[2].content[0].text = f"first of {one.id}"
    return [*made, branching()]


def trained(name: str, folder: Path, made: list[Record]) -> Any:
    export(RecordSource.of(made), codec(name), folder / f"{name}.jsonl")
    result = json.loads(run("trainers", "train_trl.py", folder / f"{name}.jsonl").splitlines()[-1])
    assert result["steps"] == 2
    assert math.isfinite(result["loss"])
    assert result["moved"]
    return result["rows"]


def test_trl_trains_on_the_responses_and_on_nothing_else(tmp_path: Path) -> None:
    made = [record("a", actions=3), branching()]
    rows = trained("trl", tmp_path, made)
    call = 'bash{"command":"ls"}'
    assert [row["text"] for row in rows] == [
        f"action 0{call}<|end|>",
        f"action 1{call}<|end|>",
        f"action 2{call}<|end|>",
        f"action 0{call}<|end|>",
        "first way<|end|>",
        "second way<|end|>",
        "third way<|end|>",
    ]
    # All before the response is context, and has no loss.
    for row in rows:
        start = len(row["ids"]) - len(row["trained"])
        assert row["labels"] == [-100] * start + row["ids"][start:]


def test_trl_trains_on_the_very_tokens_that_the_model_wrote(tmp_path: Path) -> None:
    made = [record("a", actions=2, tokens=True), record("b", actions=3, tokens=True)]
    rows = trained("trl-tokens", tmp_path, made)
    assert [row["trained"] for row in rows] == [[100, 101, 110, 111], [100, 101, 110, 111, 120, 121]]
    assert rows[0]["ids"] == [1, 2, 100, 101, 7, 110, 111]


def test_datasets_and_pyarrow_read_our_parquet(tmp_path: Path) -> None:
    source = RecordSource.of([*pool(), with_image("seen", 2, 1.0)])
    wanted = {}
    for one in writable():
        if Container.PARQUET in one.containers:
            table = export(source, one, tmp_path / f"{one.name}.parquet")
            export(source, one, tmp_path / f"{one.name}.jsonl")
            assert table.rows > 0
            lines = (tmp_path / f"{one.name}.jsonl").read_text().splitlines()
            wanted[str(table.output)] = [json.loads(line) for line in lines]
    found = json.loads(run("trainers", "read_parquet.py", *wanted).splitlines()[-1])
    for path, rows in wanted.items():
        assert found[path]["images"] == sum(len(row.pop("images", [])) for row in rows)
        assert [bare(row) for row in found[path]["rows"]] == [bare(row) for row in rows]


def bare(value: Any) -> Any:
    """Without the empty fields that columns give every row."""
    if isinstance(value, dict):
        return {key: bare(item) for key, item in value.items() if item is not None and item != []}
    return [bare(item) for item in value] if isinstance(value, list) else value


def test_rows_of_trainers_fit_their_definitions(tmp_path: Path) -> None:
    counts = {}
    for name in ("verl", "slime", "prime-rl"):
        counts[name] = export(RecordSource.of(pool()), codec(name), tmp_path / f"{name}.jsonl").rows
        assert counts[name] > 0
    assert json.loads(run("verl", "fit_rows.py", tmp_path)) == counts
