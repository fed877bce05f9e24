"""A platform for one piece of work: started before it, and gone with its data afterwards."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from services.local.demo.interrupts import Interrupts

_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.1  # how often a wait looks whether it was interrupted


class PlatformStartError(Exception):
    """The platform did not start; the message is its log."""


@contextmanager
def own_platform(interrupts: Interrupts, console: Console) -> Iterator[tuple[str, str]]:
    """A platform with a data directory of its own, gone at the end; gives its endpoint and API key.

    Raises:
        PlatformStartError: it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="orchard-demo-") as folder:
        log = Path(folder, "log")
        ready, ready_end = os.pipe()
        # Should this process be killed, the platform sees the end of its lifeline and stops.
        lifeline_end, lifeline = os.pipe()
        command = [sys.executable, "-m", "services.local", "up", "--data-dir", f"{folder}/data"]
        command += ["--listen", "127.0.0.1:0", "--ready-fd", str(ready_end), "--lifeline-fd", str(lifeline_end)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(ready_end, lifeline_end),
                env={**os.environ, "ORCHARD_CONFIG_DIR": f"{folder}/config"},
                start_new_session=True,  # Ctrl-C is for this process, which then stops the platform in order
            )
            os.close(ready_end)
            os.close(lifeline_end)
        interrupts.hurry = lambda: process.send_signal(signal.SIGINT)
        try:
            with console.status("starting the platform"):
                facts = _read_facts(ready, interrupts)
            if facts is None:
                _stop(process)
                raise PlatformStartError(f"the platform did not start:\n{log.read_text(errors='replace')}")
            profile: dict[str, Any] = json.loads(Path(folder, "config", "profile.json").read_text())
            yield profile["endpoint"], profile["api_key"]
        finally:
            try:
                with console.status("stopping the platform"):
                    _stop(process)
            finally:
                # Not before: a platform that stops already takes our signal for a wish to hurry.
                os.close(lifeline)


def _read_facts(ready: int, interrupts: Interrupts) -> dict[str, Any] | None:
    """The line that says that all is up; None if the platform ended without it, or does not come up."""
    text = b""
    with os.fdopen(ready, "rb", buffering=0) as pipe:
        deadline = time.monotonic() + _START_SECONDS
        while not text.endswith(b"\n"):
            interrupts.check()
            if time.monotonic() > deadline:
                return None
            if not select.select([pipe], [], [], _LOOK_SECONDS)[0]:
                continue
            data = pipe.read(4096)
            if not data:
                return None
            text += data
    facts: dict[str, Any] = json.loads(text)
    return facts


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
