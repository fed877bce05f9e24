"""Which process is meant: a pid and its start time, so that a pid given to another process is never taken for it."""

from __future__ import annotations

import errno
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_EXITING: Final = 0x4
"""PF_EXITING of the kernel's include/linux/sched.h."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A process of this machine.

    Attributes:
        pid: its id.
        start: its start time in clock ticks since boot (proc(5), stat, field 22).
    """

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int, proc: int | None = None) -> Identity:
        """The process that has this pid now. `proc`: a descriptor of the proc file system to look in.

        Raises:
            ProcessLookupError: there is none.
        """
        try:
            if proc is None:
                stat = Path(f"/proc/{pid}/stat").read_bytes()
            else:
                with os.fdopen(os.open(f"{pid}/stat", os.O_RDONLY, dir_fd=proc), "rb") as file:
                    stat = file.read()
        except (FileNotFoundError, ProcessLookupError):
            raise ProcessLookupError(errno.ESRCH, f"no process {pid}") from None
        # The name, in parentheses, may hold anything; the state (field 3) follows the last one.
        return cls(pid, int(stat.rpartition(b")")[2].split()[19]))

    def open(self, proc: int | None = None) -> int:
        """A pidfd of exactly this process. `proc`: as for `of`.

        Raises:
            ProcessLookupError: it is gone.
        """
        descriptor = os.pidfd_open(self.pid)
        try:
            if Identity.of(self.pid, proc) == self:
                return descriptor
        except ProcessLookupError:
            pass
        os.close(descriptor)
        raise ProcessLookupError(errno.ESRCH, f"process {self.pid} is gone")

    def is_ending(self) -> bool:
        """Whether it has begun to end. The first process of a pid namespace kills all others in it and waits for them
        before it has ended itself (proc(5), stat, field 9).
        """
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return False
        return int(fields[19]) == self.start and bool(int(fields[6]) & _EXITING)


def has_ended(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended (it may still be a zombie)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def kill(pidfd: int) -> None:
    """SIGKILL, if it is still there."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return
