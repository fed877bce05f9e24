"""Real stores for tests: one Valkey and one PostgreSQL a test run, empty for each test."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg

from services.local.stores.postgres import Postgres, account_of_servers
from services.local.stores.valkey import Valkey


@contextmanager
def running_valkey() -> Iterator[str]:
    """A Valkey of its own; gives its URL."""
    with tempfile.TemporaryDirectory(prefix="ov-") as folder:
        valkey = Valkey(Path(folder, "data"), Path(folder, "s"))
        valkey.prepare()
        command = valkey.command(dict(os.environ))
        process = subprocess.Popen(command.argv, env=command.environment, stdout=subprocess.DEVNULL)
        try:
            asyncio.run(asyncio.wait_for(valkey.wait_ready(), 110))
            yield valkey.url
        finally:
            process.terminate()
            process.wait(110)


@contextmanager
def running_postgres() -> Iterator[str]:
    """A PostgreSQL of its own; gives its URL."""
    with tempfile.TemporaryDirectory(prefix="op-") as folder:
        Path(folder).chmod(0o711)  # the server's own user passes through
        postgres = Postgres(Path(folder, "pg"), Path(folder, "s"), account_of_servers())
        environment = dict(os.environ)
        if postgres.prepare():
            Path(folder, "pg").chmod(0o711)
            initialise = postgres.initialise(environment)
            subprocess.run(initialise.argv, env=initialise.environment, check=True, stdout=subprocess.DEVNULL)
            postgres.initialised()
        command = postgres.command(environment)
        process = subprocess.Popen(command.argv, env=command.environment, stderr=subprocess.DEVNULL)
        try:
            asyncio.run(asyncio.wait_for(postgres.wait_ready(process.pid), 110))
            yield postgres.url
        finally:
            process.send_signal(2)  # fast shutdown
            process.wait(110)


@contextmanager
def stoppable(database: str) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """A PostgreSQL that can be stopped with all its processes, and go on: gives what does each."""
    stopped: list[int] = []

    def stop() -> None:
        with psycopg.connect(database) as connection:
            pids = [row[0] for row in connection.execute("SELECT pid FROM pg_stat_activity").fetchall()]
            own = connection.info.backend_pid
            server = int(Path(f"/proc/{own}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in [server, *(pid for pid in pids if pid != own)]:
            with suppress(ProcessLookupError):  # one that has ended by itself
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)

    def go_on() -> None:
        while stopped:
            os.kill(stopped.pop(), signal.SIGCONT)

    try:
        yield stop, go_on
    finally:
        go_on()
