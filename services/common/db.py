"""PostgreSQL: engines, and migrations under an advisory lock. Each service owns a schema and an Alembic history."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import psycopg
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from services.common.errors import UnavailableError
from services.common.logs import get_logger
from services.common.tls import TlsFiles, postgres_arguments

_log = get_logger(__name__)

_TRANSACTION_SECONDS: Final = 15.0  # above what connecting and one statement may take
_RETRY_SECONDS: Final = 0.5
# The driver's own too: what a COPY raises, SQLAlchemy does not see.
AWAY: Final = (
    OperationalError,
    InterfaceError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
    PoolTimeoutError,
    OSError,
    TimeoutError,
)


def driver_url(database_url: str) -> str:
    """The URL with the psycopg 3 driver named, whichever of PostgreSQL's own forms it came in."""
    for prefix in ("postgresql+psycopg://", "postgresql://", "postgres://"):
        if database_url.startswith(prefix):
            return "postgresql+psycopg://" + database_url.removeprefix(prefix)
    raise ValueError("the database URL must begin with postgresql://")


def connect(database_url: str, *, pool_size: int = 5, tls: TlsFiles | None = None) -> AsyncEngine:
    """An engine: 5 s to connect, 10 s a statement, 5 s for a pooled connection.

    The server keeps the limit on statements. One that stands still does not: bound each transaction too.

    Raises:
        TlsError: a file of `tls` cannot be used.
    """
    return create_async_engine(
        driver_url(database_url),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=5,
        pool_pre_ping=True,
        connect_args={"connect_timeout": 5, "options": "-c statement_timeout=10000", **postgres_arguments(tls)},
    )


class Database:
    """Transactions that end in time; the database away is UNAVAILABLE, a mistake of ours stays what it is."""

    def __init__(self, engine: AsyncEngine, *, timeout_seconds: float = _TRANSACTION_SECONDS) -> None:
        self._engine = engine
        self._timeout = timeout_seconds

    async def close(self) -> None:
        """Close every connection."""
        await self._engine.dispose()

    @asynccontextmanager
    async def transaction(self, *, timeout_seconds: float | None = None) -> AsyncIterator[AsyncConnection]:
        """One transaction, committed on the way out.

        Raises:
            UnavailableError: the database does not answer.
        """
        try:
            # The server's own limit on statements does not help where the server itself stands still.
            async with asyncio.timeout(timeout_seconds or self._timeout), self._engine.begin() as connection:
                yield connection
        except AWAY as error:
            raise UnavailableError("the database does not answer; retry", reason="DATABASE_UNAVAILABLE") from error


def run_migrations() -> None:
    """What the env.py of each service's migrations does: run them in the connection and schema that `migrate` gave."""
    from alembic import context

    attributes = context.config.attributes
    context.configure(
        connection=attributes["connection"],
        version_table_schema=attributes["schema"],
        include_schemas=True,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def migrate(
    database_url: str,
    *,
    schema: str,
    migrations: Path,
    revision: str = "head",
    tls: TlsFiles | None = None,
    wait_seconds: float = 0.0,
) -> None:
    """Bring one service's schema to a revision. Replicas that start together take turns.

    A database that does not answer is waited for as long as `wait_seconds` says.
    """
    # Only here: it would cost every start of a service a quarter of a second.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations))
    config.attributes["schema"] = schema
    arguments = {"connect_timeout": 5, **postgres_arguments(tls)}
    engine = create_engine(driver_url(database_url), poolclass=NullPool, connect_args=arguments)
    lock = int.from_bytes(hashlib.sha256(f"orchard:{schema}".encode()).digest()[:8], signed=True)
    try:
        with _connect_within(wait_seconds, engine) as connection:
            connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": lock})
            try:
                connection.execute(text(f'CREATE SCHEMA IF NOT EXISTS "{schema}"'))
                connection.commit()
                config.attributes["connection"] = connection
                if not revision.startswith("-"):
                    command.upgrade(config, revision)
                else:
                    command.downgrade(config, revision)
                connection.commit()
            finally:
                connection.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": lock})
                connection.commit()
    finally:
        engine.dispose()


def _connect_within(seconds: float, engine: Engine) -> Connection:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return engine.connect()
        except AWAY as error:
            if time.monotonic() >= deadline:
                raise
            _log.info("the database does not answer yet", why=str(error.__cause__).partition("\n")[0])
        time.sleep(_RETRY_SECONDS)
