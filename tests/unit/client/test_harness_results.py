"""What harnesses are told of a command's end, by their adapters' common part."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys

import pytest
from orchard import CommandNotStarted, ExecEnd, ExecResult, InvalidArgument, SandboxLost
from orchard.harness._results import refusal, remark, shell_status

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def result(ended: ExecEnd, *, exit_code: int = -1, signal: int = 0, dropped: int = 0, message: str = "") -> ExecResult:
    end = START + dt.timedelta(seconds=7)
    return ExecResult("e", ended, exit_code, signal, message, START, end, 0.0, 0.0, 0, 0, dropped)


@pytest.mark.parametrize(
    ("ended", "exit_code", "signal", "status"),
    [
        (ExecEnd.EXITED, 0, 0, 0),
        (ExecEnd.EXITED, 124, 0, 124),
        (ExecEnd.EXITED, 143, 0, 143),
        (ExecEnd.SIGNALLED, -1, 15, 143),
        (ExecEnd.SIGNALLED, -1, 9, 137),
        (ExecEnd.OUT_OF_MEMORY, -1, 0, 137),
        (ExecEnd.KILLED, -1, 0, 137),
        (ExecEnd.OUTPUT_LIMIT, -1, 0, 137),
    ],
)
def test_status_is_the_shells(ended: ExecEnd, exit_code: int, signal: int, status: int) -> None:
    assert shell_status(result(ended, exit_code=exit_code, signal=signal)) == status


def test_a_plain_end_needs_no_remark() -> None:
    assert remark(result(ExecEnd.EXITED, exit_code=124)) == ""
    assert remark(result(ExecEnd.SIGNALLED, signal=15)) == ""


def test_remarks_say_what_the_output_does_not() -> None:
    assert remark(result(ExecEnd.TIMED_OUT)) == "the command was ended by its timeout after 7 s"
    assert remark(result(ExecEnd.OUT_OF_MEMORY)) == "the command was ended: out of memory"
    assert remark(result(ExecEnd.KILLED, message="killed by an operator")) == "killed by an operator"
    assert "5 bytes" in remark(result(ExecEnd.EXITED, exit_code=0, dropped=5))


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("COMMAND_NOT_FOUND", 127),
        ("SHELL_NOT_FOUND", 127),
        ("COMMAND_NOT_EXECUTABLE", 126),
        ("CWD_NOT_FOUND", 126),
        ("CWD_NOT_A_DIRECTORY", 126),
        ("CWD_NOT_ACCESSIBLE", 126),
        # It waited for its turn in vain: not what a command can do about.
        ("NOT_STARTED", None),
        ("USER_NOT_FOUND", None),
    ],
)
def test_refusals_are_results_where_the_command_is_to_blame(reason: str, status: int | None) -> None:
    assert refusal(CommandNotStarted("no", reason=reason)) == status


def test_failures_of_the_platform_are_no_results() -> None:
    assert refusal(SandboxLost("gone")) is None
    assert refusal(InvalidArgument.of("command", "has a NUL")) == 126


def test_the_package_needs_no_harness() -> None:
    """Its common parts, and finding its modules, import none of them."""
    harnesses = ("minisweagent", "inspect_ai", "harbor", "swerex", "pydantic")
    code = (
        "import sys, orchard.harness, orchard.harness._clients, orchard.harness._results;"
        f"sys.exit(sorted(set({harnesses!r}) & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
