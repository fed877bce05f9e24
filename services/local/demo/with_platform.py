"""`orchard with-platform`: run a program against a platform of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Final

from rich.console import Console

from services.local.demo.interrupts import Interrupts
from services.local.demo.own_platform import PlatformStartError, own_platform

# What shells give for a program that they cannot run.
_NOT_FOUND: Final = 127
_NOT_EXECUTABLE: Final = 126


def run(command: Sequence[str]) -> int:
    """Start a platform, run the program, stop the platform; returns the program's exit code.

    The program finds the platform by ORCHARD_ENDPOINT and ORCHARD_API_KEY. A signal is passed on to it.
    """
    console = Console(stderr=True)
    with Interrupts() as interrupts:
        try:
            with own_platform(interrupts, console) as (endpoint, api_key):
                environment = {**os.environ, "ORCHARD_ENDPOINT": endpoint, "ORCHARD_API_KEY": api_key}
                return _run(command, environment, interrupts, console)
        except (KeyboardInterrupt, PlatformStartError) as error:
            what = "interrupted" if interrupts.exit_code else error
            console.print(f"[bold red]with-platform:[/] {what}", highlight=False)
            return interrupts.exit_code or 1


def _run(command: Sequence[str], environment: dict[str, str], interrupts: Interrupts, console: Console) -> int:
    interrupts.check()
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        console.print(f"[bold red]with-platform:[/] {command[0]}: {error.strerror}", highlight=False)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
    # Ctrl-C reaches the program by itself, from the terminal; a signal that was sent to us alone does not.
    interrupts.hurry = lambda: process.send_signal(signal.SIGTERM)
    code = process.wait()
    return 128 - code if code < 0 else code
