"""What an agent in a Pod knows of its sandbox: the files that the kubelet shows it, and what the image says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from services.common import pods
from services.common.errors import FailedPreconditionError
from services.exec_agent.users import resolve_user

USER_GAP: Final = (
    "its agent runs as the image's user; create the sandbox with user='root', or with the user that is needed"
)
_ROOT_CAPABILITIES: Final = (1 << 6) | (1 << 7)  # CAP_SETGID, CAP_SETUID (capabilities(7))
_MEMORY_COUNTERS: Final = ("memory.events", "memory/memory.oom_control")
_STATE: Final = "agent"
# The kubelet adds these to every container. A sandbox has no business with the cluster, and programs that see them
# believe that they have.
_OF_THE_CLUSTER: Final = frozenset(
    {
        *("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "KUBERNETES_SERVICE_PORT_HTTPS", "KUBERNETES_PORT"),
        *(f"KUBERNETES_PORT_443_TCP{end}" for end in ("", "_ADDR", "_PORT", "_PROTO")),
    }
)
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def read_files(folder: Path) -> dict[str, str]:
    """Every file of the config folder, by its name.

    Raises:
        OSError: one cannot be read.
        ValueError: one is not text.
    """
    return {name: (folder / name).read_text(encoding="utf-8") for name in ("uid", *pods.CONFIG_FILES)}


def flag(files: Mapping[str, str], name: str) -> bool:
    """A file that says yes or no.

    Raises:
        ValueError: it says something else.
    """
    if files[name] not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1")
    return files[name] == "1"


def read_all(descriptor: int) -> bytes:
    """A file from its beginning, wherever somebody before has read to.

    Raises:
        OSError: it cannot be read.
    """
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def environment(saved: bytes, spec_env: Mapping[str, str], user: str) -> dict[str, str]:
    """Environment of commands: the container's as its init found it, untouched, and the spec's above it."""
    entries = (entry.partition("=") for entry in os.fsdecode(saved).split("\0"))
    env = {key: value for key, equals, value in entries if key and equals and key not in _OF_THE_CLUSTER}
    env.setdefault("PATH", _PATH)
    home = home_of(user) if user else None
    if home is not None:
        env["HOME"] = home  # the one that is there belongs to whom the container runs as
    env.setdefault("HOME", "/")
    return {**env, **spec_env}


def home_of(user: str) -> str | None:
    """Home of a user of the image; None where it has no such user, which commands will be told."""
    try:
        return resolve_user(user).home
    except FailedPreconditionError:
        return None


def working_directory(of_spec: str, of_image: str, home: str) -> str:
    """Where commands start. An image that names no directory has `/`: then it is the user's home, if there is one."""
    if of_spec or of_image != "/":
        return of_spec or of_image
    return home if Path(home).is_dir() else "/"


def can_switch_user() -> bool:
    """Whether this process may run commands as any user."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == "CapEff":
            return int(value, 16) & _ROOT_CAPABILITIES == _ROOT_CAPABILITIES
    return False


def open_state(folder: Path) -> int:
    """A directory of the agent's own in the volume that it is given, closed to other users.

    Raises:
        OSError: it cannot be made, or somebody else made it.
    """
    path = folder / _STATE
    path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(1, "it belongs to another user", str(path))
    return descriptor


def open_oom_counter(folder: Path) -> int | None:
    """The file that counts what the container's memory limit has killed; None where there is none."""
    for name in _MEMORY_COUNTERS:
        try:
            return os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return None
