"""The data directory with its locks, and the short folder of Unix sockets."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from services.local.runtime import linux
from services.local.runtime.removal import remove_tree
from services.local.runtime.submounts import mount_points
from services.local.supervisor.errors import PlatformError

_LOCK: Final = "supervisor.lock"
_PROCESSES_LOCK: Final = "processes.lock"
_LEFTOVER_SECONDS: Final = 20.0
_KILLED_SECONDS: Final = 5.0
# A Unix socket's path has at most 107 bytes, and folders and names of our own follow.
_RUN_LIMIT: Final = 60


def default_data_directory(environment: Mapping[str, str]) -> Path:
    """ORCHARD_DATA_DIR, or the place that the XDG base directory specification gives."""
    if chosen := environment.get("ORCHARD_DATA_DIR"):
        return Path(chosen)
    base = environment.get("XDG_DATA_HOME") or ""
    # The specification: a relative path is to be ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".local/share") / "orchard"


class DataDirectory:
    """A data directory that this process alone may use, until `close`.

    Two locks: `supervisor.lock` is held by the supervisor alone and says who it is; `processes.lock` is inherited by
    everything that it starts (`processes_fd`), so that the next start knows when the last process of a killed platform
    has ended.
    """

    def __init__(self, path: Path, lock_fd: int, processes_fd: int) -> None:
        self.path = path
        self.processes_fd = processes_fd
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, path: Path) -> DataDirectory:
        """Make it if it is not there, and lock it.

        Raises:
            PlatformError: another platform uses it, it belongs to somebody else, or it is no data directory.
        """
        path = Path(os.path.abspath(path.expanduser()))  # noqa: PTH100 (resolve comes once it exists)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = path.resolve(strict=True)
            _check_ours(path)
            lock_fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            raise PlatformError(f"{path} is not a folder: choose another with --data-dir") from None
        except OSError as error:
            raise PlatformError(
                f"cannot use the data directory {path}: {error.strerror}. Choose another with --data-dir"
            ) from None
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(lock_fd)
            os.close(lock_fd)
            raise PlatformError(_in_use(path, holder)) from None
        path.chmod(0o700)
        # Read only: a process that inherits it can do nothing else with it.
        return cls(path, lock_fd, os.open(path / _PROCESSES_LOCK, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))

    def write_holder(self, endpoint: str) -> None:
        """Say in the lock file who holds it."""
        text = json.dumps({"pid": os.getpid(), "started": time.time(), "endpoint": endpoint})
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, text.encode(), 0)

    async def wait_for_leftovers(self, say: Callable[[str], None]) -> None:
        """Return when no process of an earlier platform on this directory lives; those that do not end are killed.

        Raises:
            PlatformError: one cannot be killed.
        """
        if self._take_processes_lock():
            return
        say("waiting for processes of a platform that was killed to end")
        for seconds in (_LEFTOVER_SECONDS, _KILLED_SECONDS):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if self._take_processes_lock():
                    return
                await asyncio.sleep(0.02)
            for pid in self._holders():
                say(f"killing process {pid}, which a killed platform left and which does not end")
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        left = ", ".join(map(str, self._holders())) or "not visible"
        raise PlatformError(f"processes of an earlier platform on {self.path} do not end: {left}")

    def _take_processes_lock(self) -> bool:
        try:
            fcntl.flock(self.processes_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holders(self) -> list[int]:
        wanted = os.fstat(self.processes_fd)
        found = []
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                files = [os.stat(f.path) for f in os.scandir(f"/proc/{entry.name}/fd")]  # noqa: PTH116
            except OSError:
                continue
            if any((f.st_dev, f.st_ino) == (wanted.st_dev, wanted.st_ino) for f in files):
                found.append(int(entry.name))
        return found

    def close(self) -> None:
        """Let go of it."""
        os.ftruncate(self._lock_fd, 0)
        os.close(self.processes_fd)
        os.close(self._lock_fd)


def _check_ours(path: Path) -> None:
    owner = path.stat().st_uid
    if owner != os.geteuid():
        raise PlatformError(
            f"the data directory {path} belongs to user id {owner} and this is user id {os.geteuid()}: "
            "choose another with --data-dir"
        )
    # In this order: one that starts at the same moment makes the lock before anything else.
    if any(path.iterdir()) and not (path / _LOCK).exists():
        raise PlatformError(f"{path} is not empty and no data directory of Orchard: choose another with --data-dir")


def _read_holder(lock_fd: int) -> dict[str, Any]:
    try:
        holder = json.loads(os.pread(lock_fd, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _in_use(path: Path, holder: dict[str, Any]) -> str:
    try:
        since = (
            datetime.fromtimestamp(float(holder["started"]), UTC).astimezone().isoformat(sep=" ", timespec="seconds")
        )
        who = f"process {holder['pid']}, running since {since}, endpoint {holder['endpoint']}"
    except (KeyError, TypeError, ValueError, OverflowError):
        who = "which is just starting"
    return f"another `orchard up` uses {path} ({who}): stop it first, or choose another with --data-dir"


def run_directory_of(data: Path, environment: Mapping[str, str]) -> Path:
    """Where the Unix sockets of the platform on `data` are: always the same short path."""
    name = hashlib.sha256(os.fsencode(data)).hexdigest()[:8]
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and _fits(runtime):
        with suppress(OSError):
            status = os.stat(runtime)  # noqa: PTH116
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and os.access(runtime, os.W_OK):
                return Path(runtime) / f"orchard-{name}"
    return Path("/tmp") / f"orchard-{os.geteuid()}-{name}"  # noqa: S108 (made with care below)


def _fits(runtime: str) -> bool:
    # PostgreSQL takes the path in a list separated by commas.
    plain = all(c.isalnum() or c in "/._-" for c in runtime)
    return plain and len(os.fsencode(runtime)) + len("/orchard-12345678") <= _RUN_LIMIT


def make_run_directory(path: Path) -> int:
    """Make the folder anew, without anything that a killed platform left in it. Call it with the data directory locked.

    Returns a descriptor to be kept open: its lock tells systemd-tmpfiles, which tidies /tmp, that the folder is in use.

    Raises:
        PlatformError: the path is somebody else's, or something is mounted below it that cannot be unmounted.
    """
    remove_run_directory(path)
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        raise PlatformError(f"cannot make the folder of sockets {path}: {error.strerror}") from None
    _check_private(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def remove_run_directory(path: Path) -> None:
    """Remove the folder and what is in it, if it is there.

    Raises:
        PlatformError: as make_run_directory.
    """
    try:
        _check_private(path)
    except FileNotFoundError:
        return
    _unmount_below(path)
    try:
        remove_tree(path)
    except OSError as error:
        raise PlatformError(f"cannot remove {path}, which an earlier platform left: {error}") from None


def _check_private(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PlatformError(
            f"{path} is not a folder of this user: somebody else made it. Remove it, "
            "or set XDG_RUNTIME_DIR to a folder of your own"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise PlatformError(f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):o}): remove it")


def mounts_below(path: Path) -> list[Path]:
    """Mount points below `path`, the deepest first."""
    found = [point for point in map(Path, mount_points()) if point.is_relative_to(path)]
    return sorted(found, key=lambda point: len(point.parts), reverse=True)


def _unmount_below(path: Path) -> None:
    """A folder of the host that is mounted here must never be emptied by the removal."""
    for point in mounts_below(path):
        try:
            linux.detach(str(point))
        except OSError as error:
            raise PlatformError(
                f"{point} is still mounted by an earlier platform and cannot be unmounted: {error}"
            ) from None
    if mounts_below(path):
        raise PlatformError(f"something is still mounted below {path}: unmount it first")
