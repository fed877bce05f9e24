"""A demo whose own platform does not come up."""

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from services.local.demo import own_platform
from services.local.demo.interrupts import Interrupts
from tests.support.platform import processes_naming, wait_until

QUIET = Console(stderr=True, quiet=True)


def test_a_platform_that_is_not_up_in_time_is_stopped_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(own_platform, "_START_SECONDS", 0.0)
    with (
        Interrupts() as interrupts,
        pytest.raises(own_platform.PlatformStartError, match="did not start"),
        own_platform.own_platform(interrupts, QUIET),
    ):
        pytest.fail("it cannot have started")
    wait_until(lambda: processes_naming(str(tmp_path)) == [], "its processes to end")
    assert list(tmp_path.iterdir()) == []


def test_a_platform_is_asked_to_stop_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of its lifeline asks too, and whoever is asked twice hurries."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(own_platform, "_START_SECONDS", 0.0)
    make, stop, pipes, held = os.pipe, own_platform._stop, [], []

    def pipe() -> tuple[int, int]:
        pipes.append(make())
        return pipes[-1]

    def stopped(process: subprocess.Popen[bytes]) -> None:
        _ready, (_end, lifeline), *_others = pipes
        held.append(Path(f"/proc/self/fd/{lifeline}").exists())
        stop(process)

    monkeypatch.setattr(os, "pipe", pipe)
    monkeypatch.setattr(own_platform, "_stop", stopped)
    with (
        Interrupts() as interrupts,
        pytest.raises(own_platform.PlatformStartError),
        own_platform.own_platform(interrupts, QUIET),
    ):
        pytest.fail("it cannot have started")
    assert held
    assert all(held)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_platform_starts_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    former = signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored
    with Interrupts() as interrupts:
        read = own_platform._read_facts

        def interrupted(ready: int, interrupts: Interrupts) -> object:
            signal.raise_signal(number)
            return read(ready, interrupts)

        monkeypatch.setattr(own_platform, "_read_facts", interrupted)
        with pytest.raises(KeyboardInterrupt), own_platform.own_platform(interrupts, QUIET):
            pytest.fail("it cannot have started")
        assert interrupts.exit_code == 128 + number
    assert signal.signal(number, former) is signal.SIG_DFL
    wait_until(lambda: processes_naming(str(tmp_path)) == [], "its processes to end")
    assert list(tmp_path.iterdir()) == []
