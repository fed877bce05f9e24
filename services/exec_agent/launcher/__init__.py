"""The static launcher binary: where it is, and how to hold it so that nothing inside a sandbox can alter it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

_MFD_EXEC: Final = 0x10  # Linux 6.3; older kernels refuse the flag and allow execution anyway


GAP: Final = (
    "The launcher is not built: Python processes start and watch over commands, which takes some milliseconds and"
    " megabytes more for each. Install a C compiler that links statically (Debian: gcc, libc6-dev) and run"
    " scripts/build-launcher."
)


class LauncherMissingError(Exception):
    """The launcher was not built; the message says how."""


def launcher_path() -> Path:
    """The launcher of this machine's architecture.

    Raises:
        LauncherMissingError: it was not built.
    """
    path = Path(__file__).resolve().parents[3] / "build" / "launcher"
    if not path.is_file():
        raise LauncherMissingError(f"{path} is missing: run scripts/build-launcher")
    return path


def open_launcher(path: Path | None = None) -> int:
    """A descriptor of a sealed copy in memory, to be executed as /proc/self/fd/N. The caller closes it.

    `path` is the launcher where it stands elsewhere than scripts/build-launcher puts it.

    Raises:
        LauncherMissingError: it was not built.
    """
    path = path or launcher_path()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LauncherMissingError(f"{path} cannot be read: {error.strerror}") from None
    return hold_program(content)


def open_or_gap(path: Path | None = None) -> tuple[int | None, tuple[str, ...]]:
    """The launcher as of open_launcher, or what is to be said where there is none."""
    try:
        return open_launcher(path), ()
    except LauncherMissingError:
        return None, (GAP,)


def hold_program(content: bytes) -> int:
    """A descriptor of a sealed program in memory, to be executed as /proc/self/fd/N. The caller closes it."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create("orchard-launcher", flags | _MFD_EXEC)
    except OSError:
        descriptor = os.memfd_create("orchard-launcher", flags)
    with os.fdopen(os.dup(descriptor), "wb") as copy:
        copy.write(content)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor
