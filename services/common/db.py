"""PostgreSQL: engines, and migrations under an advisory lock. Each service owns a schema and an Alembic history."""

from __future__ import annotations

import asyncio
import hashlib
import select
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import orjson
import psycopg
from psycopg.types.json import set_json_loads
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DisconnectionError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from services.common.errors import UnavailableError
from services.common.logs import get_logger
from services.common.tls import TlsFiles, postgres_arguments

_log = get_logger(__name__)

_TRANSACTION_SECONDS: Final = 15.0  # above what connecting and one statement may take
_RETRY_SECONDS: Final = 0.5
_STATEMENT_SECONDS: Final = 10.0
# By the server's clock: what a client that stands still has locked is free again, some time after its own limit.
_IDLE_SLACK_SECONDS: Final = 15.0
# A peer that is gone without a word is found in 25 s, or 20 s after something was sent to it.
_KEEPALIVE: Final = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
# The driver's own too: what a COPY raises, SQLAlchemy does not see.
AWAY: Final = (
    OperationalError,
    InterfaceError,
    psycopg.OperationalError,
    psycopg.InterfaceError,
    # We stood still for so long that the server took back what was locked. SQLAlchemy has no class of its own for it.
    psycopg.errors.IdleInTransactionSessionTimeout,
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
    """An engine: 5 s to connect, 10 s a statement, 30 s idle in a transaction, 5 s for a pooled connection.

    The server keeps the limits on statements and transactions. One that stands still does not: bound each transaction
    too. A pooled connection that the server has closed is replaced when it is taken; the server is not asked for that.

    Raises:
        TlsError: a file of `tls` cannot be used.
    """
    idle = _TRANSACTION_SECONDS + _IDLE_SLACK_SECONDS
    limits = {"statement_timeout": _STATEMENT_SECONDS, "idle_in_transaction_session_timeout": idle}
    engine = create_async_engine(
        driver_url(database_url),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=5,
        connect_args={
            "connect_timeout": 5,
            "options": " ".join(f"-c {name}={seconds * 1000:.0f}" for name, seconds in limits.items()),
            **_KEEPALIVE,
            **postgres_arguments(tls),
        },
    )
    event.listen(engine.sync_engine, "connect", _prepare)
    event.listen(engine.sync_engine, "checkout", _refuse_closed)
    return engine


def _prepare(connection: Any, *_: object) -> None:
    """The standard library's parser takes a fifth of what it costs to make a row of trajectories into a value."""
    set_json_loads(orjson.loads, connection.driver_connection)


def _refuse_closed(connection: Any, *_: object) -> None:
    """Have the pool connect again where the server has closed a connection; the kernel knows, and nobody is asked."""
    if is_closed(connection.driver_connection):
        raise DisconnectionError("the server has closed the connection")


def is_closed(connection: psycopg.AsyncConnection[Any]) -> bool:
    """Whether the server has closed a connection that nobody uses now."""
    if connection.closed:
        return True
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLIN)
    # The server says nothing on an idle connection but that it ends, or that its configuration changed.
    return bool(poller.poll(0))


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
        with _away():
            # The server's own limit on statements does not help where the server itself stands still.
            async with asyncio.timeout(timeout_seconds or self._timeout), self._engine.begin() as connection:
                if timeout_seconds is not None:
                    idle = f"{(timeout_seconds + _IDLE_SLACK_SECONDS) * 1000:.0f}"
                    await connection.execute(_SET_LOCAL, {"name": "idle_in_transaction_session_timeout", "value": idle})
                yield connection

    @asynccontextmanager
    async def driver(self, *, autocommit: bool = False) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """One transaction on the driver's own connection, committed on the way out; with `autocommit` each statement is
        one. For what is called so often that what SQLAlchemy costs a statement would be most of its cost.

        Raises:
            UnavailableError: the database does not answer.
        """
        with _away():
            async with asyncio.timeout(self._timeout), self._engine.connect() as connection:
                raw: Any = (await connection.get_raw_connection()).driver_connection
                if not autocommit:
                    yield raw
                    await raw.commit()
                    return
                try:
                    await raw.set_autocommit(True)
                    yield raw
                    await raw.set_autocommit(False)
                except BaseException:
                    await connection.invalidate()  # its mode is not to stay, and may not be changed any more
                    raise


_SET_LOCAL: Final = text("SELECT set_config(:name, :value, true)")


@contextmanager
def _away() -> Iterator[None]:
    try:
        yield
    except (*AWAY, InternalError) as error:
        if isinstance(error, InternalError) and not isinstance(error.orig, AWAY):
            raise
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
    arguments = {"connect_timeout": 5, **_KEEPALIVE, **postgres_arguments(tls)}
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
