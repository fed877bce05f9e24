"""The table of verdicts on terminals of any width."""

import io

import pytest
from rich.console import Console

from services.local.demo.screen import show_table
from services.local.demo.tasks import Outcome, load_tasks
from tests.support.platform import ROOT


def outcomes() -> list[Outcome]:
    found = []
    for task in load_tasks(ROOT / "examples" / "tasks", frozenset()):
        for candidate in task.candidates:
            detail = f"{candidate.name}: a line that says more than fits beside the rest of it, and then some more"
            found.append(Outcome(task, candidate, candidate.expected, (12, 34), f"{detail}\nand another", 123.4))
    return found


@pytest.mark.parametrize("width", [90, 100, 140, 200])
def test_every_column_but_the_last_is_whole(width: int) -> None:
    written = io.StringIO()
    shown = outcomes()
    show_table(Console(file=written, width=width), shown)
    lines = written.getvalue().splitlines()
    rows = [line for line in lines if " 12/34 " in line]
    assert len(rows) == len(shown)
    for row, outcome in zip(rows, shown, strict=True):
        assert f" {outcome.candidate.name} " in row
        assert f" {outcome.verdict} " in row
        assert " 123.4 s " in row
    assert all(len(line) <= width for line in lines)
