"""`orchard up` itself: the real services, killed in every way."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from services.local.stores.postgres import Postgres, account_of_servers
from services.local.stores.valkey import Valkey
from services.local.supervisor import Platform, PlatformError, PlatformOptions
from services.local.supervisor.children import Children
from services.local.supervisor.output import Output
from tests.support.platform import ROOT, SERVICES, PlatformProcess, identify, wait_until
from tests.support.ports import free_port


def up(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """A start that is expected to fail."""
    return subprocess.run(
        [sys.executable, "-m", "services.local", "up", *arguments],
        cwd=ROOT,
        env=environment,
        timeout=60,
        capture_output=True,
        text=True,
    )


def test_the_first_start_makes_everything_and_says_so(made: Path) -> None:
    output = (made / "output.txt").read_text()
    profile = json.loads((made / "config" / "profile.json").read_text())
    assert "all is up in" in output
    assert profile["endpoint"] in output
    assert str(made / "data") in output or "~/data" in output
    assert "user ids: " in output
    # A key is in the profile, and nowhere where others may see it.
    assert profile["api_key"]
    assert profile["api_key"] not in output
    assert "PRIVATE KEY" not in output
    for path in (
        made / "data",
        made / "data" / "keys",
        made / "data" / "trajectories",
        made / "data" / "judge",
        made / "data" / "judges.json",
        made / "config" / "profile.json",
    ):
        assert path.stat().st_mode & 0o077 == 0


def test_everything_stops_in_order(made: Path) -> None:
    said = [line.partition("stopping ")[2] for line in (made / "output.txt").read_text().splitlines()]
    assert [name for name in said if name in SERVICES] == list(SERVICES)


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_killed_comes_back_alone(shared: PlatformProcess, name: str) -> None:
    before = {service: shared.wait_ready(service) for service in SERVICES}
    killed = shared.kill_service(name)
    assert killed == before[name]
    shared.wait_ready(name, not_pid=killed)
    after = {service: shared.wait_ready(service) for service in SERVICES}
    assert after[name] != killed
    assert {service for service in SERVICES if after[service] != before[service]} == {name}
    assert f"{name} was killed by SIGKILL" in shared.output()


def test_a_second_one_is_refused_and_names_the_first(shared: PlatformProcess) -> None:
    before = shared.status()
    done = up(shared.environment, "--data-dir", str(shared.data), "--port", "0")
    assert done.returncode == 1
    assert f"process {shared.pid}, running since" in done.stderr
    assert f"endpoint {shared.endpoint}" in done.stderr
    assert shared.status() == before


def test_only_the_gateway_listens_on_tcp_and_only_on_the_loopback(shared: PlatformProcess) -> None:
    inodes = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes[fields[9]] = fields[1]
    listening: dict[str, set[str]] = {}
    for service in SERVICES:
        for entry in Path(f"/proc/{shared.service_pid(service)}/fd").iterdir():
            try:
                target = str(entry.readlink())
            except FileNotFoundError:  # connections come and go
                continue
            if target.startswith("socket:[") and target[8:-1] in inodes:
                listening.setdefault(service, set()).add(inodes[target[8:-1]])
    port = int(shared.endpoint.rpartition(":")[2])
    # 127.0.0.1, possibly as IPv6 writes it.
    assert listening.keys() == {"gateway"}
    assert listening["gateway"] <= {f"0100007F:{port:04X}", f"0000000000000000FFFF00000100007F:{port:04X}"}


def test_secrets_are_in_no_command_line(shared: PlatformProcess) -> None:
    for service in SERVICES:
        assert shared.api_key.encode() not in Path(f"/proc/{shared.service_pid(service)}/cmdline").read_bytes()


def test_a_later_start_keeps_data_key_and_profiles_and_can_speak_json(stopped: PlatformProcess) -> None:
    key = stopped.api_key
    profile = stopped.folder / "config" / "profile.json"
    profile.write_text('{"endpoint": "cluster:443", "api_key": "mine"}')
    stopped.start("--log-format", "json")
    assert stopped.profile == {"endpoint": stopped.endpoint, "api_key": key}
    assert json.loads(profile.with_name("profile.json.bak").read_text())["api_key"] == "mine"
    with psycopg.connect(f"postgresql://orchard@/postgres?host={stopped.run}/pg") as connection:
        assert connection.execute("SELECT count(*) FROM gateway.api_keys").fetchone() == (1,)
    assert stopped.stop() == 0
    stopped.wait_nothing_left()
    lines = [json.loads(line) for line in stopped.output().splitlines()]
    assert {"orchard", "postgres", "gateway", "node"} <= {line["service"] for line in lines}
    assert any("profile.json.bak" in line["event"] for line in lines)


def test_kill_9_of_the_supervisor_leaves_nothing_in_the_way(stopped: PlatformProcess) -> None:
    stopped.listen = f"127.0.0.1:{free_port()}"
    stopped.start()
    run, endpoint = stopped.run, stopped.endpoint
    stopped.kill_supervisor()
    # At once, while its processes still end; on the same port.
    stopped.start()
    assert (stopped.run, stopped.endpoint) == (run, endpoint)
    # Now the node daemon, which would end the sandboxes, is killed before it can notice.
    node = stopped.service_pid("node")
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(node, signal.SIGKILL)
    stopped.kill_supervisor()
    stopped.wait_no_process_left()
    # What is left are sockets, which the next start removes.
    stopped.start()
    # And it ends with whoever started it.
    stopped.note_processes()
    stopped.close()
    stopped.wait_nothing_left()


def test_a_signal_during_the_start_stops_what_was_started(stopped: PlatformProcess) -> None:
    for _ in range(5):
        said = len(stopped.output()) if (stopped.folder / "output.txt").exists() else 0
        ready = stopped.launch()
        wait_until(lambda said=said: "postgres  |" in stopped.output()[said:], "PostgreSQL to start")
        os.kill(stopped.pid, signal.SIGTERM)
        assert stopped.wait_end() == 0
        was_up = os.read(ready, 1) != b""
        os.close(ready)
        assert ("all is up" in stopped.output()[said:]) == was_up
        stopped.wait_nothing_left()
        if not was_up:
            break  # else the signal came when the start was over
    else:
        pytest.fail("every signal came when the start was over")


def test_a_second_ctrl_c_hurries(stopped: PlatformProcess) -> None:
    stopped.start()
    stopped.note_processes()
    # It cannot end by itself.
    os.kill(stopped.service_pid("gateway"), signal.SIGSTOP)
    os.kill(stopped.pid, signal.SIGINT)
    wait_until(lambda: "stopping gateway" in stopped.output(), "the stop to begin")
    assert "stopping scheduler" not in stopped.output()
    os.kill(stopped.pid, signal.SIGINT)
    # Unhurried it would be given 15 s.
    wait_until(lambda: "stopping scheduler" in stopped.output(), "the gateway to be killed", seconds=12)
    assert stopped.wait_end() == 0
    stopped.wait_nothing_left()


def test_a_port_in_use_stops_it_before_anything_starts(tmp_path: Path) -> None:
    platform = PlatformProcess(tmp_path)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = server.getsockname()[1]
        done = up(platform.environment, "--data-dir", str(platform.data), "--port", str(port))
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert "--port" in done.stderr
    assert {path.name for path in platform.data.iterdir()} == {"supervisor.lock", "processes.lock"}


def test_an_address_that_is_none_is_told_before_anything_starts(tmp_path: Path) -> None:
    platform = PlatformProcess(tmp_path)
    done = up(platform.environment, "--data-dir", str(platform.data), "--listen", "nonsense")
    assert done.returncode == 2
    assert "--listen: 'nonsense' is not host:port" in done.stderr


def test_damage_to_the_database_is_reported_and_nothing_runs_on(stopped: PlatformProcess) -> None:
    (stopped.data / "postgres" / "data" / "PG_VERSION").write_text("17\n")
    done = up(stopped.environment, "--data-dir", str(stopped.data), "--port", "0")
    assert done.returncode == 1
    assert "was written by PostgreSQL 17" in done.stderr


async def test_it_can_be_embedded(made: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    subprocess.run(["cp", "-a", str(made / "data"), str(data)], check=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    options = PlatformOptions(data_directory=data, listen="127.0.0.1:0", environment=environment)
    with (tmp_path / "log").open("w") as log:
        output = Output(log)
        async with Platform(options, output) as platform:
            assert platform.api_key
            gateway = identify(platform.process("gateway").pid)
            platform.kill("gateway", signal.SIGKILL)
            await platform.wait_ready("gateway")
            assert platform.process("gateway").pid != (gateway.pid if gateway else 0)
            with pytest.raises(PlatformError, match=f"process {os.getpid()}"):
                async with Platform(options, output):
                    pass
            processes = [identify(platform.process(name).pid) for name in SERVICES]
            run = platform.layout.run
        output.close()
    assert not any(process.lives() for process in processes if process)
    assert not run.exists()


async def test_servers_of_the_users_own_are_used(tmp_path: Path) -> None:
    children = Children()
    environment = {"PATH": "/usr/bin:/bin"}
    postgres = Postgres(tmp_path / "postgres", tmp_path / "s", account_of_servers())
    valkey = Valkey(tmp_path / "valkey", tmp_path / "v")
    try:
        assert postgres.prepare()
        assert (await children.run(postgres.initialise(environment), print, seconds=60))[0] == 0
        postgres.initialised()
        valkey.prepare()
        server = await children.start(postgres.command(environment), print)
        await children.start(valkey.command(environment), print)
        await postgres.wait_ready(server.pid)
        await valkey.wait_ready()
        own = {"DATABASE_URL": postgres.url, "REDIS_URL": valkey.url}
        platform = PlatformProcess(tmp_path, environment=own)
        try:
            await asyncio.to_thread(platform.start)
            assert set(platform.status()) == {"gateway", "judge", "trajectories", "scheduler", "watcher", "node"}
            assert {path.name for path in platform.data.iterdir()} & {"postgres", "valkey"} == set()
            with psycopg.connect(postgres.url) as connection:
                assert connection.execute("SELECT count(*) FROM gateway.api_keys").fetchone() == (1,)
                assert connection.execute("SELECT count(*) FROM trajectories.trajectories").fetchone() == (0,)
                assert connection.execute("SELECT count(*) FROM judge.verdicts").fetchone() == (0,)
            assert await asyncio.to_thread(platform.stop) == 0
            # Still there: they are not the platform's.
            await asyncio.wait_for(valkey.wait_ready(), 110)
            assert not server.exited.done()
        finally:
            await asyncio.to_thread(platform.close)
    finally:
        await children.close()
