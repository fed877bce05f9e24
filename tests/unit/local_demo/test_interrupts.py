import asyncio
import signal

import pytest

from services.local.demo import interrupts as interrupts_module
from services.local.demo.interrupts import Interrupts


def test_the_first_signal_lets_what_runs_clean_up() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("all")

    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            interrupts.run(work())
        assert (cleaned, interrupts.exit_code) == (["all"], 128 + signal.SIGTERM)


def test_a_second_one_hurries_and_does_not_break_into_the_clean_up() -> None:
    hurried: list[str] = []

    async def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
            hurried.append("cleaned")

    with Interrupts() as interrupts:
        interrupts.hurry = lambda: hurried.append("hurried")
        with pytest.raises(KeyboardInterrupt):
            interrupts.run(work())
        assert hurried == ["hurried", "cleaned"]
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_clean_up_of_what_was_hurried_away_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts_module, "_LEAVE_SECONDS", 0.01)

    async def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()  # whoever would answer is gone

    with Interrupts() as interrupts:
        interrupts.hurry = lambda: None
        with pytest.raises(KeyboardInterrupt):
            interrupts.run(work())
        assert interrupts.exit_code == 130


def test_what_is_over_is_not_undone() -> None:
    async def work() -> str:
        return "done"

    with Interrupts() as interrupts:
        assert interrupts.run(work()) == "done"
        signal.raise_signal(signal.SIGINT)
        assert interrupts.exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_nothing_begins_after_a_signal() -> None:
    async def work() -> None:
        pytest.fail("it began")

    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.run(work())


def test_signals_that_were_ignored_stay_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert interrupts.exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, former)
