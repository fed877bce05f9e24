"""What a starter wrote down of a sandbox's processes, for daemons after the one that had it made."""

from __future__ import annotations

import fcntl
import json
import os
import select
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.local.runtime.identity import Identity, kill
from services.local.runtime.steps import PROCESSES_FILE

_KILL_SECONDS: Final = 10.0
_LOCK_SECONDS: Final = 35.0
_LOCK_POLL_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class Record:
    """What a starter wrote down."""

    init: Identity
    agent: Identity | None


def read_record(folder: Path) -> Record:
    """The record, once no starter is at work on it any more: a zygote whose daemon died ends at once."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOCK_POLL_SECONDS)
        values = json.loads((folder / PROCESSES_FILE).read_text(encoding="utf-8"))
    finally:
        os.close(lock)
    agent = values["agent"]
    return Record(Identity(**values["init"]), None if agent is None else Identity(**agent))


def open_agent(folder: Path) -> int | None:
    """A pidfd of the agent that was recorded last; None: there is none any more."""
    try:
        agent = read_record(folder).agent
        return None if agent is None else agent.open()
    except (OSError, ValueError):
        return None


def end_recorded(folder: Path) -> None:
    """Kill the init of a sandbox that nobody watches over, and wait until it is gone."""
    try:
        descriptor = read_record(folder).init.open()
    except (OSError, ValueError):
        return
    try:
        kill(descriptor)
        select.select([descriptor], [], [], _KILL_SECONDS)
    finally:
        os.close(descriptor)
