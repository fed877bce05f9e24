"""Signals by their names: the sandbox's numbers, whatever system the client runs on."""

from __future__ import annotations

import enum
import signal
import sys

import orchard
import pytest
from orchard._client.signal_numbers import signal_number


@pytest.mark.skipif(sys.platform != "linux", reason="compares with this machine's own numbers, which must be Linux's")
@pytest.mark.parametrize("name", signal.Signals.__members__)
def test_names_have_the_numbers_of_linux(name: str) -> None:
    number = signal.Signals[name].value
    assert [signal_number(form) for form in (name, name.lower(), name.removeprefix("SIG"), number)] == [number] * 4


def test_a_signal_of_another_system_is_known_by_its_name() -> None:
    class Darwin(enum.IntEnum):
        SIGUSR1 = 30  # sys/signal.h of XNU; on Linux it is SIGPWR

    assert signal_number(Darwin.SIGUSR1) == 10  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "SIG", "odd", "SIGSIGTERM", "2"])
def test_what_is_no_signal_is_refused(name: str) -> None:
    with pytest.raises(orchard.InvalidArgument, match="number"):
        signal_number(name)
