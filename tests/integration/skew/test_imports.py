"""Imports between this build and the one before it, both ways: of which only this one stores several in a call."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orchard
import pytest
from orchard.data import codec
from orchard.data.export import export
from orchard.data.server import ServerSource
from orchard.data.sources import RecordSource

from tests.integration.skew.conftest import BACKSTOP, PREVIOUS_AGENT, only
from tests.support.platform import ROOT, PlatformProcess, running_platform
from tests.unit.data.making import record, with_image

pytestmark = only(PREVIOUS_AGENT)
COUNT = 30


def _paths(tree: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{tree}:{tree}/clients/python/src"}


@pytest.fixture(scope="module", params=["old-platform", "old-client"])
def trees(request: pytest.FixtureRequest, old_tree: Path) -> tuple[Path, Path]:
    """Whose platform, and whose client."""
    return (old_tree, ROOT) if request.param == "old-platform" else (ROOT, old_tree)


@pytest.fixture(scope="module")
def platform(trees: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlatformProcess]:
    tree, _client = trees
    folder = tmp_path_factory.mktemp("imports")
    with running_platform(folder, environment=_paths(tree), prefix=("env", "--chdir", str(tree))) as platform:
        yield platform


def _import(tree: Path, file: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "orchard._cli.main", "trajectories", "import", str(file), "--json"]
    environment = {**environment, **_paths(tree)}
    done = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, timeout=BACKSTOP, check=True)
    return dict(json.loads(done.stdout))


def test_a_file_is_imported_once_by_either(platform: PlatformProcess, trees: tuple[Path, Path], tmp_path: Path) -> None:
    _tree, of_client = trees
    dataset = f"d-{secrets.token_hex(6)}"
    made = [record(f"{dataset}-{number}", values={0: 0.5}, dataset=dataset) for number in range(COUNT)]
    made.append(with_image(f"{dataset}-seen", 2, 1.0, dataset=dataset))
    for one in made:
        # As exports of another program write them; each build must send them in the same words.
        one.trajectory.metadata_json, one.trajectory.tools_json = '{"b":1, "a":2}', '[ {"type":"function"} ]'
        one.trajectory.rewards[0].details_json = '{"b":1,"a":[2.50]}'
    file, half = tmp_path / "in.jsonl", tmp_path / "half.jsonl"
    export(RecordSource.of(made), codec("orchard"), file)
    export(RecordSource.of(made[: COUNT // 2]), codec("orchard"), half)
    environment = platform.client_environment()
    first = _import(ROOT, half, environment)
    assert (first["trajectories"], first["new"]) == (COUNT // 2, COUNT // 2)
    assert _import(of_client, file, environment)["new"] == COUNT + 1 - COUNT // 2
    assert _import(ROOT, file, environment)["new"] == 0
    with orchard.SandboxClient(platform.endpoint, api_key=platform.api_key) as client:
        found = [one for one, _ in ServerSource(client, {"datasets": dataset}).records()]
        assert [one.id for one in found] == [one.id for one in made]
        assert [len(one.steps) for one in found] == [len(one.steps) for one in made]
        assert all(len(list(client.trajectories.annotations(one.id))) == 1 for one in found)
