"""What `orchard demo` shows: live progress on a terminal, lines elsewhere, and the table at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from services.local.demo.tasks import Candidate, Outcome, Task

_ROWS_SHOWN: Final = 14
_BORDER: Final = 1
_CELL_BORDER: Final = 3
_HEADINGS: Final = ("task", "candidate", "verdict", "tests", "time")
_COLOURS: Final = {"resolved": "green", "unresolved": "yellow", "patch_failed": "magenta", "error": "bold red"}


class Screen:
    """Live progress of many candidates."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._active: dict[tuple[str, str], tuple[float, str]] = {}
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task: TaskID = self._bar.add_task("candidates", total=total)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def progress(self, task: Task, candidate: Candidate, what: str) -> None:
        """A candidate went on."""
        key = (task.instance_id, candidate.name)
        self._active[key] = (self._active.get(key, (time.monotonic(), ""))[0], what)

    def done(self, outcome: Outcome) -> None:
        """A candidate has its verdict."""
        self._active.pop((outcome.task.instance_id, outcome.candidate.name), None)
        self._bar.advance(self._task)
        mark = "" if outcome.expected else f"  (expected {outcome.candidate.expected})"
        line = Text.assemble(
            f"{_short(outcome.task)}/{outcome.candidate.name} ", (outcome.verdict, _COLOURS[outcome.verdict]), mark
        )
        self._console.print(line)

    def _render(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        busy = sorted(self._active.items(), key=lambda item: item[1][0])
        for (task, candidate), (_, what) in busy[:_ROWS_SHOWN]:
            rows.add_row(
                task.rpartition("__")[2], candidate, Text(what, style="dim", overflow="ellipsis", no_wrap=True)
            )
        if len(busy) > _ROWS_SHOWN:
            rows.add_row("", f"and {len(busy) - _ROWS_SHOWN} more", "")
        return Group(rows, self._bar)


def show_table(console: Console, outcomes: Sequence[Outcome]) -> None:
    """The verdict of every candidate. The last column gives way on narrow terminals, the others never do."""
    rows: list[tuple[str, str, str, str, str]] = []
    last = ""
    for outcome in outcomes:
        name = _short(outcome.task)
        tests = f"{outcome.tests[0]}/{outcome.tests[1]}" if outcome.tests else ""
        rows.append(
            (name if name != last else "", outcome.candidate.name, outcome.verdict, tests, f"{outcome.seconds:.1f} s")
        )
        last = name
    table = Table(title="Verdicts", title_justify="left")
    left = console.width - _BORDER
    for index, heading in enumerate(_HEADINGS):
        width = max(len(heading), *(len(row[index]) for row in rows))
        table.add_column(heading, justify="right" if index >= 3 else "left", no_wrap=True, min_width=width)
        left -= width + _CELL_BORDER
    # A column that may wrap is the one that gives way; what is cut to its width does not wrap.
    table.add_column("")
    for outcome, row in zip(outcomes, rows, strict=True):
        wrong = "" if outcome.expected else f"EXPECTED {outcome.candidate.expected}. "
        verdict = Text(outcome.verdict, style=_COLOURS[outcome.verdict])
        detail = Text.assemble((wrong, "bold red"), outcome.detail.partition("\n")[0])
        detail.truncate(max(0, left - _CELL_BORDER), overflow="ellipsis")
        table.add_row(row[0], row[1], verdict, row[3], row[4], detail)
    console.print(table)
    counts = Counter(outcome.verdict for outcome in outcomes)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))


def _short(task: Task) -> str:
    return task.instance_id.rpartition("__")[2]
