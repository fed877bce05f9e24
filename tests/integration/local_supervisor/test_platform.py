"""`orchard up` itself: the real services, killed in every way."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from services.local.supervisor import Platform, PlatformError, PlatformOptions
from services.local.supervisor.output import Output
from tests.support.platform import ROOT, SERVICES, PlatformProcess, identify, wait_until


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
    for path in (made / "data", made / "data" / "keys", made / "config" / "profile.json"):
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
            target = str(entry.readlink())
            if target.startswith("socket:[") and target[8:-1] in inodes:
                listening.setdefault(service, set()).add(inodes[target[8:-1]])
    port = int(shared.endpoint.rpartition(":")[2])
    # 127.0.0.1, possibly as IPv6 writes it.
    assert listening.keys() == {"gateway"}
    assert listening["gateway"] <= {f"0100007F:{port:04X}", f"0000000000000000FFFF00000100007F:{port:04X}"}


def test_secrets_are_in_no_command_line(shared: PlatformProcess) -> None:
    for service in SERVICES:
        assert shared.api_key.encode() not in Path(f"/proc/{shared.service_pid(service)}/cmdline").read_bytes()


def test_the_data_survive_and_the_key_stays(stopped: PlatformProcess) -> None:
    key = stopped.api_key
    stopped.start()
    assert stopped.api_key == key
    with psycopg.connect(f"postgresql://orchard@/postgres?host={stopped.run}/pg") as connection:
        count = connection.execute("SELECT count(*) FROM gateway.api_keys").fetchone()
    assert count == (1,)
    assert stopped.stop() == 0
    stopped.wait_nothing_left()


def test_kill_9_of_the_supervisor_leaves_nothing_in_the_way(stopped: PlatformProcess) -> None:
    stopped.start()
    run, endpoint = stopped.run, stopped.endpoint
    stopped.kill_supervisor()
    # At once, while its processes still end; on the same port.
    stopped.listen = endpoint
    stopped.start()
    assert stopped.run == run
    assert stopped.endpoint == endpoint
    stopped.kill_supervisor()
    stopped.wait_no_process_left()
    # What it left are sockets, which the next start removes.
    stopped.start()
    assert stopped.stop() == 0
    stopped.wait_nothing_left()


def test_kill_9_of_supervisor_and_node_leaves_nothing(stopped: PlatformProcess) -> None:
    stopped.start()
    node = stopped.service_pid("node")
    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(node, signal.SIGKILL)
    stopped.kill_supervisor()
    stopped.wait_no_process_left()
    stopped.start()
    assert stopped.stop() == 0
    stopped.wait_nothing_left()


def test_the_end_of_whoever_started_it_ends_it(stopped: PlatformProcess) -> None:
    stopped.start()
    stopped.note_processes()
    stopped.close()
    stopped.wait_nothing_left()


def test_a_signal_during_the_start_stops_what_was_started(stopped: PlatformProcess) -> None:
    ready = stopped.launch()
    wait_until(lambda: "postgres  |" in stopped.output(), "PostgreSQL to start")
    os.kill(stopped.pid, signal.SIGTERM)
    assert stopped.wait_end() == 0
    assert os.read(ready, 1) == b""
    os.close(ready)
    assert "all is up" not in stopped.output()
    stopped.wait_nothing_left()


def test_a_second_ctrl_c_hurries(stopped: PlatformProcess) -> None:
    stopped.start()
    stopped.note_processes()
    # It cannot end by itself.
    os.kill(stopped.service_pid("gateway"), signal.SIGSTOP)
    os.kill(stopped.pid, signal.SIGINT)
    wait_until(lambda: "stopping gateway" in stopped.output(), "the stop to begin")
    assert "stopping scheduler" not in stopped.output()
    os.kill(stopped.pid, signal.SIGINT)
    wait_until(lambda: "stopping scheduler" in stopped.output(), "the gateway to be killed", seconds=5)
    assert stopped.wait_end() == 0
    stopped.wait_nothing_left()


def test_lines_can_be_json(stopped: PlatformProcess) -> None:
    (stopped.folder / "output.txt").unlink(missing_ok=True)
    ready = stopped.launch("--log-format", "json")
    assert os.read(ready, 1)
    os.close(ready)
    os.kill(stopped.pid, signal.SIGTERM)
    assert stopped.wait_end() == 0
    lines = [json.loads(line) for line in stopped.output().splitlines()]
    assert {"orchard", "postgres", "gateway", "node"} <= {line["service"] for line in lines}


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


def test_another_profile_is_kept(stopped: PlatformProcess) -> None:
    profile = stopped.folder / "config" / "profile.json"
    profile.write_text('{"endpoint": "cluster:443", "api_key": "mine"}')
    stopped.start()
    assert stopped.profile["endpoint"] == stopped.endpoint
    assert json.loads(profile.with_name("profile.json.bak").read_text())["api_key"] == "mine"
    assert "profile.json.bak" in stopped.output()
    assert stopped.stop() == 0


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
