"""How a forked Python process becomes a command: the half of reaper.c that runs in the child, in Python."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import struct
import termios
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from services.exec_agent.launcher.calls import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, prctl
from services.exec_agent.launcher.protocol import (
    SPEC,
    SPEC_BIG,
    SPEC_TTY,
    SPEC_USER,
    STAGE_CWD,
    STAGE_EXEC,
    STAGE_INTERPRETER,
    STAGE_SPEC,
    STAGE_TTY,
    STAGE_USER,
)

_OPEN_FILES: Final = 65_536
_BIG_STACK: Final = 64 << 20
_DEFAULT_PATH: Final = b"/usr/local/bin:/usr/bin:/bin"
_PAST_LAST_DESCRIPTOR: Final = 1 << 30
_NOT_HERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})


class StartError(Exception):
    """A command could not be started."""

    def __init__(self, stage: int, error: OSError) -> None:
        super().__init__(stage, error)
        self.stage = stage
        self.number = error.errno or 0


@dataclass(frozen=True, slots=True)
class Program:
    """What a spec says."""

    flags: int
    uid: int
    gid: int
    groups: tuple[int, ...]
    cwd: bytes
    argv: list[bytes]
    env: dict[bytes, bytes]

    @classmethod
    def parse(cls, message: bytes) -> Self:
        """From the agent's message.

        Raises:
            StartError: it is malformed.
        """
        malformed = StartError(STAGE_SPEC, OSError(errno.EINVAL, ""))
        if len(message) < SPEC.size:
            raise malformed
        size, flags, uid, gid, group_count, argc, envc = SPEC.unpack_from(message)
        start = SPEC.size + 4 * group_count
        if size != len(message) or start >= size or message[-1] != 0 or argc < 1:
            raise malformed
        cwd, *strings = message[start:-1].split(b"\0")
        if len(strings) != argc + envc:
            raise malformed
        entries = (entry.partition(b"=") for entry in strings[argc:])
        env = {key: value for key, _, value in entries if key}
        groups = struct.unpack_from(f"={group_count}I", message, SPEC.size)
        return cls(flags, uid, gid, groups, cwd, strings[:argc], env)

    def become(self, standard: Sequence[int], failed: int, reaper: int) -> None:
        """Turn this process into the command. `failed` stays open until that is done.

        Raises:
            StartError: something did not work.
        """
        os.setsid()
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
        os.closerange(3, failed)
        os.closerange(failed + 1, _PAST_LAST_DESCRIPTOR)
        if self.flags & SPEC_TTY:
            self._take_terminal()
        os.umask(0o022)
        self._limit()
        if self.flags & SPEC_USER:
            self._switch_user()
        try:
            os.chdir(self.cwd)
        except OSError as error:
            raise StartError(STAGE_CWD, error) from None
        # If somebody kills the reaper, its command does not go on unwatched.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != reaper:
            return
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._search_and_execute()

    @staticmethod
    def _take_terminal() -> None:
        try:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        except OSError as error:
            raise StartError(STAGE_TTY, error) from None

    def _limit(self) -> None:
        _limit(resource.RLIMIT_CORE, 0, lower_hard=True)
        _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
        if self.flags & SPEC_BIG:  # the kernel gives arguments a quarter of it
            _limit(resource.RLIMIT_STACK, _BIG_STACK)

    def _switch_user(self) -> None:
        try:
            os.setgroups(self.groups)
            os.setresgid(self.gid, self.gid, self.gid)
            os.setresuid(self.uid, self.uid, self.uid)
        except OSError as error:
            raise StartError(STAGE_USER, error) from None
        prctl(PR_SET_DUMPABLE, 0)  # a change of ids may have set it, and this is still the agent's memory

    def _search_and_execute(self) -> None:
        """Search the command's own PATH as execvp does; tells a missing program from a missing interpreter, too."""
        name = self.argv[0]
        if b"/" in name:
            candidates = [name]
        else:
            path = self.env.get(b"PATH", _DEFAULT_PATH)
            candidates = [folder + b"/" + name if folder else name for folder in path.split(b":")]
        denied = 0
        for candidate in candidates:
            try:
                os.execve(candidate, self.argv, self.env)  # noqa: S606
            except OSError as error:
                number = error.errno or 0
            if number == errno.ENOENT and os.path.exists(candidate):  # noqa: PTH110
                raise StartError(STAGE_INTERPRETER, OSError(number, ""))
            if len(candidates) == 1 or number not in (*_NOT_HERE, errno.EACCES):
                raise StartError(STAGE_EXEC, OSError(number, ""))
            denied = denied or (number if number == errno.EACCES else 0)
        raise StartError(STAGE_EXEC, OSError(denied or errno.ENOENT, ""))


def _limit(which: int, soft: int, *, lower_hard: bool = False) -> None:
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(which)
        if lower_hard:
            hard = soft
        resource.setrlimit(which, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
