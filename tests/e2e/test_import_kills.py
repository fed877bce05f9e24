"""Imports while the platform, or the import itself, is killed: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import orchard
import pytest
from orchard.data import codec
from orchard.data.export import export
from orchard.data.server import ServerSource
from orchard.data.sources import RecordSource

from tests.support.platform import PlatformProcess, running_platform, wait_until
from tests.unit.data.making import record

COUNT = 1500
PATIENCE = 300.0


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    with running_platform(tmp_path_factory.mktemp("imports")) as platform:
        yield platform


@pytest.fixture
def client(platform: PlatformProcess) -> Iterator[orchard.SandboxClient]:
    with orchard.SandboxClient(platform.endpoint, api_key=platform.api_key, retry_timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def dataset() -> str:
    return f"d-{secrets.token_hex(6)}"


@pytest.fixture
def file(dataset: str, tmp_path: Path) -> Path:
    """A file of many small trajectories."""
    records = [record(f"{dataset}-{number}", values={0: 0.5}, dataset=dataset) for number in range(COUNT)]
    export(RecordSource.of(records), codec("orchard"), tmp_path / "in.jsonl")
    return tmp_path / "in.jsonl"


def importing(file: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orchard._cli.main", "trajectories", "import", str(file), "--json"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def count(client: orchard.SandboxClient, dataset: str) -> int:
    return sum(row.trajectories for row in client.trajectories.stats(datasets=dataset))


def wait_begun(client: orchard.SandboxClient, dataset: str) -> None:
    wait_until(lambda: count(client, dataset) > 0, "the import to have begun")


def check_all_once(client: orchard.SandboxClient, dataset: str) -> None:
    """Each is there, whole, in its place, and judged once."""
    found = [one for one, _ in ServerSource(client, {"datasets": dataset}).records()]
    assert [one.id for one in found] == [f"{dataset}-{number}" for number in range(COUNT)]
    assert all(len(one.steps) == one.trajectory.totals.steps == 6 for one in found)
    assert all(one.resolved and len(one.values) == len(one.trajectory.rewards) == 1 for one in found)
    assert not list(client.trajectories.list(datasets=dataset, statuses="open"))
    for one in found[::100]:
        assert len(list(client.trajectories.annotations(one.id))) == 1


@pytest.mark.parametrize("service", ["trajectories", "gateway"])
def test_a_service_that_is_killed_in_the_middle(
    platform: PlatformProcess, client: orchard.SandboxClient, dataset: str, file: Path, service: str
) -> None:
    with importing(file, platform.client_environment()) as process:
        wait_begun(client, dataset)
        for _ in range(2):
            killed = platform.kill_service(service)
            platform.wait_ready(service, not_pid=killed)
        told, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert json.loads(told)["trajectories"] == COUNT
    check_all_once(client, dataset)


def test_an_import_that_is_killed_in_the_middle_is_gone_on_with(
    platform: PlatformProcess, client: orchard.SandboxClient, dataset: str, file: Path
) -> None:
    with importing(file, platform.client_environment()) as process:
        wait_begun(client, dataset)
        process.kill()
    before = count(client, dataset)
    assert 0 < before < COUNT
    with importing(file, platform.client_environment()) as process:
        told, _ = process.communicate(timeout=PATIENCE)
    # What was under way as it was killed may have come in since it was counted.
    assert 0 < json.loads(told)["new"] <= COUNT - before
    check_all_once(client, dataset)
