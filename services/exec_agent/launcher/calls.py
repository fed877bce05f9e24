"""System calls that Python does not have or that it does too much around."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_CHILD_SUBREAPER: Final = 36
_SYS_CLONE: Final = {"x86_64": 56, "aarch64": 220}
_SYS_RT_SIGACTION: Final = {"x86_64": 13, "aarch64": 134}
_KERNEL_SIGACTION_BYTES: Final = 32
_SIGNAL_SET_BYTES: Final = 8
_OF_THE_C_LIBRARY: Final = (32, 33)

# PyDLL: a child must not come back without the interpreter's lock that its parent had.
_libc: Final = ctypes.PyDLL(None, use_errno=True)


def prctl(option: int, argument: int) -> None:
    """Change an attribute of this process.

    Raises:
        OSError: the kernel refuses.
    """
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")


def reset_internal_signals() -> None:
    """Set the signals that the C library keeps for itself to their default, past the library.

    glibc's posix_spawn leaves them ignored, and `make` starts programs by it; neither library nor Python lets one ask.
    """
    number = _SYS_RT_SIGACTION.get(platform.machine())
    if number is None:
        return
    default = ctypes.create_string_buffer(_KERNEL_SIGACTION_BYTES)
    for signal_number in _OF_THE_C_LIBRARY:
        _libc.syscall(number, signal_number, default, None, ctypes.c_size_t(_SIGNAL_SET_BYTES))


def plain_fork() -> int:
    """os.fork, without what libraries in C have done at a fork.

    The event loop's closes descriptors by their numbers, which are others by then; gRPC's starts threads in the child.

    Raises:
        OSError: no process is left, or this machine has neither way to do it.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    number = 0
    try:
        pid = _bare_fork()
        number = ctypes.get_errno()
    except OSError:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        raise
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"fork: {os.strerror(number)}")
    return pid


def _bare_fork() -> int:
    fork = getattr(_libc, "_Fork", None)  # from glibc 2.34 and musl 1.2.3 on
    if fork is not None:
        return int(fork())
    number = _SYS_CLONE.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return int(_libc.syscall(number, int(signal.SIGCHLD), 0, 0, 0, 0))
