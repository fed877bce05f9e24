"""A command line with its environment, and the guard that ties a foreign program's life to ours."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_GUARD = Path(__file__).with_name("guard.py")


@dataclass(frozen=True, slots=True)
class Account:
    """Whom a program runs as."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Command:
    """What to execute."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def guarded(
    argv: Sequence[str], *, ends_with: signal.Signals, account: Account | None, environment: Mapping[str, str]
) -> Command:
    """`argv`, sent `ends_with` by the kernel as soon as this process ends, and run as `account` where one is given.

    The kernel watches the thread that starts the command: start it from the main thread.
    """
    who = f"{account.uid}:{account.gid}" if account else "-"
    guard = (sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), str(int(ends_with)), who)
    return Command((*guard, *argv), environment)
