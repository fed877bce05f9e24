"""The static launcher binary: where it is, and how to hold it so that nothing inside a sandbox can alter it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

_MFD_EXEC: Final = 0x10  # Linux 6.3; older kernels refuse the flag and allow execution anyway


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
    content = (path or launcher_path()).read_bytes()
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
