"""What the steps of making a sandbox share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from services.local.runtime.identity import Identity

PROCESSES_FILE: Final = "processes.json"
LOG_FILE: Final = "agent.log"
SOCKET_NAME: Final = "s"
DEADLINE_SECONDS: Final = 30.0
_RECORD_BYTES: Final = 256


class StartError(Exception):
    """The sandbox cannot be made; the message is for people."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the zygote prepared.

    Attributes:
        bwrap: path of the binary, as seen where bwrap is started.
        run_agent: runs the agent with AgentConfig's fields until it ends.
        rehearse_agent: runs one once in a folder, with a descriptor of the launcher, and ends it.
        lifeline: the descriptor whose end of file ends every sandbox.
        proc: a descriptor of the machine's proc file system.
        own_pids: a descriptor of the zygote's own pid namespace.
    """

    bwrap: str
    run_agent: Callable[[dict[str, Any]], int]
    rehearse_agent: Callable[[Path, int], None]
    lifeline: int
    proc: int
    own_pids: int


@dataclass(frozen=True, slots=True)
class Given:
    """Descriptors that came with a request; closed when it has been answered.

    Attributes:
        launcher: what becomes the first process of a sandbox.
        whole_launcher: it is the launcher, which starts commands too; otherwise plain_init.
        cgroup_procs: open cgroup.procs files.
        oom_event: an eventfd that counts kills for lack of memory.
        oom_counter: the file that counts them.
    """

    launcher: int
    whole_launcher: bool
    cgroup_procs: tuple[int, ...]
    oom_event: int | None
    oom_counter: int | None

    def all(self) -> list[int]:
        """Every one."""
        return [self.launcher, *self.cgroup_procs, *(d for d in (self.oom_event, self.oom_counter) if d is not None)]


@dataclass(frozen=True, slots=True)
class Made:
    """What was made, with its pidfds, and where an agent that waits is told its fields."""

    init: Identity
    init_fd: int
    agent: Identity | None
    agent_fd: int | None
    claim_fd: int | None
    milliseconds: dict[str, float]


def hold(held: contextlib.ExitStack, descriptor: int) -> int:
    """Close a descriptor with `held`; returns it."""
    held.callback(os.close, descriptor)
    return descriptor


class Clock:
    """Milliseconds of each step."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.milliseconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self.milliseconds[name] = round((now - self._last) * 1e3, 2)
        self._last = now


def record(folder: int, init: Identity, agent: Identity | None) -> None:
    """Write down which processes the sandbox has: one write of one length, so that a death leaves the old or the
    new.
    """
    text = json.dumps({"init": asdict(init), "agent": None if agent is None else asdict(agent)})
    descriptor = os.open(PROCESSES_FILE, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=folder)
    os.pwrite(descriptor, text.ljust(_RECORD_BYTES).encode(), 0)
    os.close(descriptor)


def fork_into(work: Callable[[], None]) -> int:
    """Fork a child that does `work` and ends: nothing of the zygote's may run there. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        work()
    except BaseException:  # noqa: BLE001 (the log is the only one left to tell)
        traceback.print_exc()
    finally:
        os._exit(1)
