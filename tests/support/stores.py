"""Real stores for tests: one Valkey and one PostgreSQL a test run, empty for each test."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
