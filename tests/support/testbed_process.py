"""Processes of a testbed that are killed, stand still, and come back as they were."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.support.testbed import COMMAND_SECONDS, Testbed


class TestbedProcess:
    """One program of a testbed, such as kube-apiserver."""

    __test__ = False

    def __init__(self, testbed: Testbed, program: str) -> None:
        self._log = testbed.folder / "log" / f"{program}.log"
        self._pid = _pid_of(testbed, program)
        folder = Path("/proc", str(self._pid))
        self._command = _split(folder / "cmdline")
        self._command[0] = str((folder / "exe").readlink())
        self._environment = dict(one.split("=", 1) for one in _split(folder / "environ") if "=" in one)
        self._testbed = testbed
        self._program = program

    def kill(self) -> None:
        """kill -9, and wait until it is no more."""
        os.kill(self._pid, signal.SIGKILL)
        deadline = time.monotonic() + COMMAND_SECONDS
        while _lives(self._pid):
            assert time.monotonic() < deadline, f"{self._program} does not end"
            time.sleep(0.01)

    def start(self) -> None:
        """Start it with the same arguments and environment; no child of ours, as it was none before."""
        with self._log.open("ab") as log:
            subprocess.run(
                ["/bin/sh", "-c", 'setsid "$@" </dev/null &', "sh", *self._command],
                env=self._environment,
                stdout=log,
                stderr=log,
                check=True,
            )
        deadline = time.monotonic() + COMMAND_SECONDS
        while (pid := _find(self._testbed, self._program)) is None:
            assert time.monotonic() < deadline, f"{self._program} does not start"
            time.sleep(0.01)
        self._pid = pid

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


def _pid_of(testbed: Testbed, program: str) -> int:
    pid = _find(testbed, program)
    assert pid is not None, f"no {program} runs"
    return pid


def _find(testbed: Testbed, program: str) -> int | None:
    """As testbed/lib/processes.sh finds it: by its file and the testbed's folder in its arguments."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "exe").readlink().name == program and str(testbed.folder) in (folder / "cmdline").read_text():
                return int(folder.name)
        except OSError:
            continue
    return None


def _lives(pid: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _split(path: Path) -> list[str]:
    return path.read_text().rstrip("\0").split("\0")
