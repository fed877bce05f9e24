"""How commands of a sandbox are shown."""

from __future__ import annotations

import datetime as dt
import io

import pytest
from orchard import ExecEnd, ExecInfo, ExecState
from orchard._cli.output import one_line, table
from orchard._cli.processes import _duration, _signal_number, _state
from rich.console import Console

NOON = dt.datetime(2026, 1, 2, 12, tzinfo=dt.UTC)


def info(ended: ExecEnd | None = None, *, state: ExecState = ExecState.ENDED, **more: object) -> ExecInfo:
    whole = {"start_time": NOON, "end_time": None, "exit_code": -1, **more}
    return ExecInfo("e-1", state, "true", 1, 0, NOON, ended=ended, **whole)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "shown"),
    [
        (info(state=ExecState.QUEUED), "queued"),
        (info(state=ExecState.RUNNING), "running"),
        (info(ExecEnd.EXITED, exit_code=3), "exited 3"),
        (info(ExecEnd.SIGNALLED, signal=9), "signalled 9"),
        (info(ExecEnd.KILLED, signal=15), "killed"),
        (info(ExecEnd.TIMED_OUT), "timed_out"),
        (info(ExecEnd.NOT_STARTED), "not_started"),
    ],
)
def test_states(one: ExecInfo, shown: str) -> None:
    assert _state(one) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(0.04, "0.0s"), (9.5, "9.5s"), (45, "45s"), (600, "10m"), (-3, "0.0s")])
def test_durations(seconds: float, shown: str) -> None:
    assert _duration(info(ExecEnd.EXITED, end_time=NOON + dt.timedelta(seconds=seconds))) == shown


def test_what_has_not_started_has_no_duration() -> None:
    assert _duration(info(state=ExecState.QUEUED, start_time=None)) == ""


@pytest.mark.parametrize("text", ["INT", "int", "SIGINT", "sigint", "2"])
def test_signals_are_named_as_kill_has_them(text: str) -> None:
    assert _signal_number(text) == 2


def test_a_command_line_is_one_line_and_does_nothing_to_the_terminal() -> None:
    assert (
        one_line("for i in 1 2\ndo\n\techo \x1b[31m$i\ndone")
        == "for i in 1 2 do echo \N{REPLACEMENT CHARACTER}[31m$i done"
    )


@pytest.mark.parametrize(("width", "is_cut"), [(60, True), (400, False)])
def test_the_column_that_is_cut_is_the_only_one(width: int, is_cut: bool) -> None:
    rows = [("a" * 32, "exited 0", "echo " * 50 + "end"), ("b" * 32, "running", "short")]
    out = io.StringIO()
    Console(file=out, width=width).print(table(("EXEC ID", "STATE", "COMMAND"), rows, cut="COMMAND"))
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    assert len(lines) == 4, "a heading, a rule, and a line for each"
    assert max(map(len, lines)) <= width
    first, second = lines[2:]
    assert first.split()[:4] == ["a" * 32, "exited", "0", "echo"]
    assert first.endswith("\N{HORIZONTAL ELLIPSIS}" if is_cut else "end")
    assert second.split() == ["b" * 32, "running", "short"]
