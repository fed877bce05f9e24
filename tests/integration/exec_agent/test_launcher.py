"""The launcher as PID 1, and the way the binary is handed on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.exec_agent.launcher import launcher_path, open_launcher
from tests.integration.exec_agent.conftest import lives

# Forks twice and leaves: the grandchild is an orphan that ends after the pipe closes.
_ORPHAN = (
    "import os, sys\nif os.fork() == 0:\n    if os.fork() == 0:\n        os.read(0, 1)\n    os._exit(0)\nos.wait()"
)
# As many as keep their new parent busy for some milliseconds.
_MANY_ORPHANS = """
import os
if os.fork() == 0:
    for _ in range(400):
        if os.fork() == 0:
            os._exit(0)
    os._exit(0)
os.wait()
"""


class Init:
    """PID 1 of a namespace of its own."""

    def __init__(self) -> None:
        read, self.lifeline = os.pipe()
        self.other_end = os.dup(read)
        self.process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--mount-proc", str(launcher_path()), "init", str(read)], pass_fds=[read]
        )
        os.close(read)
        self.pid = self._child()

    def _child(self) -> int:
        end = time.monotonic() + 110
        while True:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            if children and b"init" in Path(f"/proc/{children[0]}/cmdline").read_bytes().split(b"\0"):
                return int(children[0])
            assert time.monotonic() < end
            time.sleep(0.002)

    def inside(self, *argv: str, **options: object) -> subprocess.CompletedProcess[bytes]:
        command = ["nsenter", "-t", str(self.pid), "-p", "-m", *argv]
        return subprocess.run(command, capture_output=True, timeout=110, **options)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def init() -> Iterator[Init]:
    init = Init()
    yield init
    os.close(init.other_end)


@pytest.mark.root
def test_a_lifeline_that_others_read_too_is_no_end(init: Init) -> None:
    """The services of a platform share one pipe, and set it not to block: another one may be quicker to take a byte."""
    os.set_blocking(init.other_end, False)
    children = Path(f"/proc/{init.pid}/task/{init.pid}/children")
    for _ in range(100):
        # It wakes to a byte, and is busy with the dead before it reads that.
        os.kill(init.pid, signal.SIGSTOP)
        init.inside("/usr/bin/python3", "-c", _MANY_ORPHANS)
        dead = children.read_text()
        os.write(init.lifeline, b".")
        os.kill(init.pid, signal.SIGCONT)
        while children.read_text() == dead:
            pass
        with contextlib.suppress(BlockingIOError):
            if os.read(init.other_end, 1):
                break
    else:
        pytest.fail("it was always quicker")
    assert b"init" in init.inside("ps", "ax").stdout
    os.close(init.lifeline)
    init.process.wait(110)


@pytest.mark.root
def test_it_ends_with_its_lifeline_and_everything_with_it(init: Init) -> None:
    sleeper = subprocess.Popen(["nsenter", "-t", str(init.pid), "-p", "-m", "sleep", "1000"])
    while b"sleep" not in init.inside("ps", "ax").stdout:
        time.sleep(0.005)
    os.close(init.lifeline)
    init.process.wait(110)
    sleeper.wait(110)
    assert not lives(init.pid)


@pytest.mark.root
def test_it_ends_on_term_from_outside_and_ignores_signals_from_inside(init: Init) -> None:
    for name in ("TERM", "INT", "HUP", "KILL", "STOP", "USR1", "CHLD"):
        init.inside("kill", f"-{name}", "1")
    assert b"init" in init.inside("ps", "ax").stdout
    os.kill(init.pid, signal.SIGTERM)
    init.process.wait(110)
    os.close(init.lifeline)


@pytest.mark.root
def test_it_reaps_every_orphan(init: Init) -> None:
    for _ in range(20):
        init.inside("/usr/bin/python3", "-c", _ORPHAN, input=b"")
    end = time.monotonic() + 110
    while b"defunct" in init.inside("ps", "ax").stdout:
        assert time.monotonic() < end
        time.sleep(0.005)
    os.close(init.lifeline)
    init.process.wait(110)


def test_bad_arguments_are_explained() -> None:
    done = subprocess.run([launcher_path(), "nonsense"], capture_output=True, timeout=110)
    assert done.returncode == 2
    assert b"usage" in done.stderr


def test_the_copy_in_memory_cannot_be_altered() -> None:
    descriptor = open_launcher()
    try:
        with pytest.raises(OSError, match="not permitted"):
            os.write(descriptor, b"x")
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(descriptor, 0)
        assert (
            subprocess.run([f"/proc/self/fd/{descriptor}"], pass_fds=[descriptor], capture_output=True).returncode == 2
        )
    finally:
        os.close(descriptor)


def test_it_is_static() -> None:
    headers = subprocess.run(["readelf", "-l", launcher_path()], capture_output=True, check=True, timeout=110).stdout
    assert b"INTERP" not in headers
