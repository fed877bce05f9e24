"""What the command line makes of a command's end."""

import dataclasses

import pytest
from orchard import ExecEnd, ExecResult
from orchard._cli.execution import PLATFORM_ERROR, tell_end


def result(**more: object) -> ExecResult:
    empty = {field.name: None for field in dataclasses.fields(ExecResult)}
    return ExecResult(**{**empty, "ended": ExecEnd.EXITED, "exit_code": 0, "dropped_bytes": 0, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dropped", "code", "whole", "expected"),
    [(0, 0, True, 0), (5, 0, True, PLATFORM_ERROR), (5, 3, True, 3), (5, 0, False, 0), (0, 3, False, 3)],
)
def test_output_that_is_missing_is_told_and_is_no_success(
    capsys: pytest.CaptureFixture[str], dropped: int, code: int, whole: bool, expected: int
) -> None:
    assert tell_end(result(dropped_bytes=dropped, exit_code=code), whole=whole) == expected
    assert ("5 bytes of the output are missing" in capsys.readouterr().err) == bool(dropped)
