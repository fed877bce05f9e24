"""Ties the program that it becomes to its parent's life: `guard.py PARENT_PID SIGNAL UID:GID|- PROGRAM ARGUMENT...`.

It runs as a script in a bare interpreter (-I -S) and imports nothing of ours. PostgreSQL refuses to run as root: with
UID:GID the program gets that identity, and keeps one capability, to read and pass folders, because its data and perhaps
its program lie below folders of mode 0700.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2
CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, first: int = 0, second: int = 0) -> None:
    unsigned = ctypes.c_ulong
    if _libc.prctl(option, unsigned(first), unsigned(second), unsigned(0), unsigned(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def _permitted() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:  # noqa: PTH123 (few imports)
        return next((int(line.split()[1], 16) for line in status if line.startswith("CapPrm:")), 0)


def _keep_only(capability: int) -> None:
    bit = 1 << capability
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    # Effective, permitted and inheritable of capabilities 0 to 31, then of the rest.
    data = (ctypes.c_uint32 * 6)(bit, bit, bit, 0, 0, 0)
    if _libc.capset(header, data) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"capset: {os.strerror(number)}")
    _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability)


def _become(uid: int, gid: int) -> None:
    permitted = _permitted()
    # A container without the first (Docker's default) usually has the second.
    capability = next((c for c in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE) if permitted >> c & 1), None)
    _prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if capability is not None:
        _keep_only(capability)


def main(arguments: list[str]) -> int:
    """Become the program; returns only when that fails."""
    parent, number, who, *argv = arguments
    try:
        if who != "-":
            uid, gid = who.split(":")
            _become(int(uid), int(gid))
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        # After the change of identity, which clears it.
        _prctl(PR_SET_PDEATHSIG, int(number))
        # The parent may have died before the kernel was told.
        if os.getppid() != int(parent):
            return 1
        # The interpreter ignores it, and a program inherits that.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execv(argv[0], argv)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"cannot start {argv[0]}: {error}\n")
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
