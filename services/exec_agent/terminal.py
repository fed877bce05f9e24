"""Terminals of commands: a pair of descriptors of the sandbox's own devpts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import termios
from typing import Final

from services.common.errors import FailedPreconditionError
from services.exec_agent.model import Tty
from services.exec_agent.users import ResolvedUser

_TIOCSPTLCK: Final = 0x40045431
_TIOCGPTPEER: Final = 0x5441
"""From Linux 4.13 on; opens the other side whatever is mounted at /dev/pts."""
_TIOCGPTN: Final = 0x80045430
_IUTF8: Final = 0o40000
_MULTIPLEXER: Final = "/dev/ptmx"
_FLAGS: Final = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC


def open_terminal(tty: Tty, identity: ResolvedUser | None) -> tuple[int, int]:
    """A new terminal: the command's side, which belongs to its user, and ours.

    Raises:
        FailedPreconditionError: PTY_UNAVAILABLE.
    """
    try:
        ours = os.open(_MULTIPLEXER, _FLAGS)
    except OSError as error:
        raise unavailable(error) from None
    try:
        fcntl.ioctl(ours, _TIOCSPTLCK, struct.pack("i", 0))
        theirs = _open_peer(ours)
    except OSError as error:
        os.close(ours)
        raise unavailable(error) from None
    try:
        _set_up(theirs, tty, identity)
    except OSError as error:
        os.close(ours)
        os.close(theirs)
        raise unavailable(error) from None
    return theirs, ours


def set_size(descriptor: int, rows: int, columns: int) -> None:
    """Set the size of a terminal; its foreground processes get SIGWINCH if it was another."""
    with contextlib.suppress(OSError):  # it has just been hung up
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))


def unavailable(error: OSError) -> FailedPreconditionError:
    """The error that says why there is no terminal."""
    why = "all of them are in use" if error.errno == errno.ENOSPC else os.strerror(error.errno or errno.EIO)
    return FailedPreconditionError(
        f"the sandbox has no terminal for the command: {_MULTIPLEXER}: {why}; run it without tty, or mount devpts at"
        " /dev/pts of the sandbox",
        reason="PTY_UNAVAILABLE",
        cause=why,
    )


def _open_peer(ours: int) -> int:
    try:
        return fcntl.ioctl(ours, _TIOCGPTPEER, _FLAGS)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTTY):
            raise
    (number,) = struct.unpack("I", fcntl.ioctl(ours, _TIOCGPTN, struct.pack("I", 0)))
    return os.open(f"/dev/pts/{number}", _FLAGS)


def _set_up(theirs: int, tty: Tty, identity: ResolvedUser | None) -> None:
    attributes = termios.tcgetattr(theirs)
    attributes[0] |= _IUTF8  # a backspace takes back a whole character
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    set_size(theirs, tty.rows, tty.columns)
    if identity is not None:
        # Programs such as tmux open it by its name. Where owners cannot be changed, all belongs to one user anyway.
        with contextlib.suppress(OSError):
            os.fchown(theirs, identity.uid, -1)
