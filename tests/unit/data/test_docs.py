"""What docs/datasets.md says is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from orchard.data import codecs
from orchard.data.curation.plan import load_plan, schema

TEXT = (Path(__file__).parents[3] / "docs" / "datasets.md").read_text()
PLANS = [block for block in re.findall(r"(?:^    .*\n)+", TEXT, re.MULTILINE) if block.startswith("    version: 1")]


def test_every_format_is_in_the_table() -> None:
    rows = [line.split("|") for line in TEXT.splitlines() if line.startswith("| `")]
    table = {row[1].strip(" `"): (bool(row[2].strip()), row[3]) for row in rows if row[1].strip(" `") in codecs()}
    assert set(table) == set(codecs())
    for name, (read, written) in table.items():
        one = codecs()[name]
        assert read is (one.read is not None)
        assert all((container.value or "folder") in written for container in one.containers)


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_is_one(plan: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("".join(line[4:] for line in plan.splitlines(keepends=True)))
    assert load_plan(tmp_path / "plan.yaml").format


def test_every_step_is_in_the_reference() -> None:
    assert len(PLANS) == 5
    for name in schema()["properties"]["steps"]["items"]["properties"]:
        assert f"`{name}: " in TEXT
