"""The real servers, started and killed the way the supervisor does it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest
import redis.asyncio

from services.local.stores.command import Account, guarded
from services.local.stores.errors import StoreError
from services.local.stores.postgres import Postgres, account_of_servers
from services.local.stores.valkey import Valkey
from services.local.supervisor.children import Child, Children
from tests.support.platform import ROOT, identify, wait_until

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}


class Log:
    """Lines of a child."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    children = Children()
    yield children
    await children.close()


@pytest.fixture(scope="module")
def made_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder straight after its making, to be copied."""
    folder = tmp_path_factory.mktemp("made")
    postgres = Postgres(folder / "postgres", folder / "s", account_of_servers())
    assert postgres.prepare()
    command = postgres.initialise(ENVIRONMENT)
    subprocess.run(command.argv, env=command.environment, check=True, capture_output=True, timeout=110)
    postgres.initialised()
    return postgres.directory


@pytest.fixture
def postgres(tmp_path: Path, made_database: Path) -> Postgres:
    subprocess.run(["cp", "-a", str(made_database), str(tmp_path / "postgres")], check=True)
    # Nobody else may pass: the server has to reach its data all the same.
    tmp_path.chmod(0o700)
    postgres = Postgres(tmp_path / "postgres", tmp_path / "s", account_of_servers())
    assert not postgres.prepare()
    return postgres


async def start(children: Children, postgres: Postgres, log: Log | None = None) -> Child:
    child = await children.start(postgres.command(ENVIRONMENT), log or Log())
    await asyncio.wait_for(postgres.wait_ready(child.pid), 110)
    return child


async def test_postgres_keeps_what_was_committed_when_it_is_killed(children: Children, postgres: Postgres) -> None:
    child = await start(children, postgres)
    with psycopg.connect(postgres.url) as connection:
        connection.execute("CREATE TABLE t (a int)")
        connection.execute("INSERT INTO t VALUES (7)")
    child.signal(signal.SIGKILL)
    assert await child.exited == -signal.SIGKILL
    # The stale pid file names a process that lives but is no server.
    pid_file = postgres.data / "postmaster.pid"
    pid_file.write_text(pid_file.read_text().replace(str(child.pid), str(os.getpid()), 1))
    await postgres.end_leftovers()
    log = Log()
    await start(children, postgres, log)
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SELECT a FROM t").fetchall() == [(7,)]
    async with asyncio.timeout(110):
        while not any("was not properly shut down" in line for line in log.lines):
            await asyncio.sleep(0.01)  # it has been said, and may not have been read yet


async def test_postgres_is_durable_private_and_local(children: Children, postgres: Postgres) -> None:
    child = await start(children, postgres)
    with psycopg.connect(postgres.url) as connection:

        def show(name: str) -> str:
            row = connection.execute(f"SHOW {name}").fetchone()
            return str(row[0]) if row else ""

        assert show("fsync") == show("synchronous_commit") == show("data_checksums") == "on"
        assert show("listen_addresses") == ""
        assert show("server_version_num").startswith("18")
        assert connection.execute("SELECT datcollate, datlocprovider FROM pg_database").fetchall()[0] == ("C", "b")
    # Only the one user, and only as the one role.
    with pytest.raises(psycopg.OperationalError, match="Peer authentication failed"):
        psycopg.connect(postgres.url, user="postgres")
    assert postgres.data.stat().st_mode & 0o077 == 0
    assert postgres.socket_directory.stat().st_mode & 0o077 == 0
    owner = os.geteuid() or 65534
    assert postgres.data.stat().st_uid == owner
    status = Path(f"/proc/{child.pid}/status").read_text()
    assert f"Uid:\t{owner}\t{owner}\t{owner}\t{owner}" in status
    assert "NoNewPrivs:\t1" in status
    if os.geteuid() == 0:
        # To read and to pass folders, and nothing else.
        assert "CapEff:\t0000000000000004" in status
    assert await child.end([(signal.SIGINT, 20.0)])
    assert child.exited.result() == 0


async def test_postgres_that_was_interrupted_in_the_making_is_made_again(children: Children, tmp_path: Path) -> None:
    postgres = Postgres(tmp_path / "postgres", tmp_path / "s", account_of_servers())
    assert postgres.prepare()
    log = Log()
    child = await children.start(postgres.initialise(ENVIRONMENT), log)
    half_made = tmp_path / "postgres" / "data.new"
    await asyncio.to_thread(wait_until, (half_made / "PG_VERSION").exists, "initdb to be at work")
    child.signal(signal.SIGKILL)
    await child.exited
    assert postgres.prepare()
    code, _ = await children.run(postgres.initialise(ENVIRONMENT), log, seconds=60)
    assert code == 0
    postgres.initialised()
    assert not postgres.prepare()
    assert not half_made.exists()


async def test_postgres_of_another_version_is_refused(postgres: Postgres) -> None:
    (postgres.data / "PG_VERSION").write_text("16\n")
    with pytest.raises(StoreError, match="was written by PostgreSQL 16, and the embedded one is 18"):
        postgres.prepare()


async def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    postgres = Postgres(tmp_path / "postgres", tmp_path / "s", None)
    (postgres.data / "x").mkdir(parents=True)
    with pytest.raises(StoreError, match="not a PostgreSQL data folder"):
        postgres.prepare()


@pytest.fixture
def valkey(tmp_path: Path) -> Valkey:
    return Valkey(tmp_path / "valkey", tmp_path / "valkey.sock")


async def start_valkey(children: Children, valkey: Valkey) -> Child:
    valkey.prepare()
    child = await children.start(valkey.command(ENVIRONMENT), Log())
    await asyncio.wait_for(valkey.wait_ready(), 110)
    return child


async def test_valkey_keeps_what_is_on_disk_when_it_is_killed(children: Children, valkey: Valkey) -> None:
    child = await start_valkey(children, valkey)
    async with redis.asyncio.from_url(valkey.url, decode_responses=True) as client:
        await client.set("lease", "held")
        # Until it is in the file.
        assert (await client.execute_command("WAITAOF", 1, 0, 20_000))[0] == 1
    child.signal(signal.SIGKILL)
    await child.exited
    child = await start_valkey(children, valkey)
    async with redis.asyncio.from_url(valkey.url, decode_responses=True) as client:
        assert await client.get("lease") == "held"
        found = await client.config_get("*")
    assert (found["port"], found["maxmemory-policy"], found["appendonly"]) == ("0", "noeviction", "yes")
    assert valkey.socket.stat().st_mode & 0o077 == 0
    assert await child.end([(signal.SIGTERM, 20.0)])
    assert child.exited.result() == 0


PARENT = """
import asyncio, sys
from pathlib import Path
from services.local.stores.postgres import Postgres, account_of_servers
from services.local.stores.valkey import Valkey
from services.local.supervisor.children import Children

async def main(folder):
    children = Children()
    postgres = Postgres(folder / "postgres", folder / "s", account_of_servers())
    postgres.prepare()
    valkey = Valkey(folder / "valkey", folder / "v")
    valkey.prepare()
    servers = [await children.start(server.command({"PATH": "/bin"}), print) for server in (postgres, valkey)]
    await postgres.wait_ready(servers[0].pid)
    await valkey.wait_ready()
    print("up", *(server.pid for server in servers), flush=True)
    await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_the_servers_die_with_a_parent_that_is_killed(postgres: Postgres, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        line = next(line for line in parent.stdout if line.startswith("up"))
        servers = [identify(int(pid)) for pid in line.split()[1:]]
        assert None not in servers
        parent.kill()
    for server in servers:
        assert server is not None
        wait_until(lambda server=server: not server.lives(), "the server to end")
    wait_until(lambda: not postgres._processes(), "its helpers to end")
    # At once, although the first was not shut down.
    assert not postgres.prepare()


def test_the_guard_starts_nothing_for_a_parent_that_is_gone(tmp_path: Path) -> None:
    command = guarded(["/bin/touch", str(tmp_path / "started")], ends_with=signal.SIGTERM, account=None, environment={})
    argv = list(command.argv)
    position = argv.index(str(os.getpid()))
    assert subprocess.run(argv, timeout=110).returncode == 0
    (tmp_path / "started").unlink()
    argv[position] = "1"
    assert subprocess.run(argv, timeout=110).returncode == 1
    assert not (tmp_path / "started").exists()


def test_the_guard_says_what_it_cannot_start() -> None:
    command = guarded(["/no/such/program"], ends_with=signal.SIGTERM, account=None, environment={})
    done = subprocess.run(command.argv, timeout=110, capture_output=True, text=True)
    assert done.returncode == 127
    assert done.stderr.startswith("cannot start /no/such/program: ")


@pytest.mark.root
def test_the_guard_gives_up_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    command = guarded(
        ["/bin/cat", "/proc/self/status"], ends_with=signal.SIGTERM, account=Account(65534, 65534), environment={}
    )
    status = subprocess.run(command.argv, timeout=110, capture_output=True, text=True, check=True).stdout
    assert "Uid:\t65534\t65534\t65534\t65534" in status
    assert "Gid:\t65534\t65534\t65534\t65534" in status
    assert "Groups:\t \n" in status
    assert "CapPrm:\t0000000000000004" in status
