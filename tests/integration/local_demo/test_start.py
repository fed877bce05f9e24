"""A demo whose own platform does not come up."""

import signal
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from services.local.demo import run
from tests.support.platform import processes_naming

QUIET = Console(stderr=True, quiet=True)


def test_a_platform_that_is_not_up_in_time_is_stopped_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(run, "_START_SECONDS", 0.0)
    with pytest.raises(run.PlatformStartError, match="did not start"), run._own_platform(QUIET):
        pytest.fail("it cannot have started")
    assert processes_naming(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_the_platform_starts_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupt(_ready: int) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run, "_read_facts", interrupt)
    with pytest.raises(KeyboardInterrupt), run._own_platform(QUIET):
        pytest.fail("it cannot have started")
    assert processes_naming(str(tmp_path)) == []
