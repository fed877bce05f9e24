"""What harnesses write is read, and what we write is accepted by who defines the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from hypothesis import HealthCheck, Phase, given, seed, settings
from orchard.data import Record, Report, codec, read
from orchard.data.export import export
from orchard.data.sources import FileSource, RecordSource

from tests.conformance.environments import run
from tests.unit.data.making import branching, record, with_image
from tests.unit.data.strategies import records

SAMPLES = Path(__file__).parents[1] / "unit" / "data" / "samples"
# What differs from run to run.
CHANGING = frozenset({"time", "trajectoryId", "timestamp", "id"})


def shape(value: Any) -> Any:
    """A value without what differs from run to run."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items() if key not in CHANGING}
    return [shape(item) for item in value] if isinstance(value, list) else value


def shapes(found: list[Record]) -> list[Any]:
    """Trajectories and steps without what differs from run to run."""
    made = []
    for one in found:
        steps = [shape(MessageToDict(step)) for step in one.steps]
        for step in steps:
            step["extraJson"] = shape(json.loads(step.get("extraJson", "{}")))
        trajectory = shape(MessageToDict(one.trajectory))
        trajectory["metadataJson"] = json.loads(trajectory.get("metadataJson", "{}"))
        made.append([trajectory, steps])
    return made


def test_harbor_accepts_our_atif(tmp_path: Path) -> None:
    made = [record("plain"), record("tokens", actions=3, tokens=True, values={0: 0.1}), branching()]
    made += [with_image("images", 2, 1.0), *read(SAMPLES / "openhands")]
    made += read(SAMPLES / "mini_swe_agent" / "calc__calc-1.traj.json")
    done = export(RecordSource.of(made), codec("atif"), tmp_path / "out")
    assert int(run("harbor", "validate_atif.py", tmp_path / "out")) == done.rows == len(made)


def test_harbor_accepts_whatever_a_trajectory_is(tmp_path: Path) -> None:
    made: list[Record] = []

    @seed(1)
    @settings(
        max_examples=200,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(records(least=1))
    def collect(one: Record) -> None:
        one.trajectory.trajectory_id = f"t{len(made)}"
        made.append(one)

    collect()
    assert len(made) >= 200
    done = export(RecordSource.of(made), codec("atif"), tmp_path / "out")
    assert int(run("harbor", "validate_atif.py", tmp_path / "out")) == done.rows == len(made)


def test_harbor_accepts_its_own_documents_again(tmp_path: Path) -> None:
    run("harbor", "write_atif.py", tmp_path / "in")
    for path in (tmp_path / "in").glob("*.json"):
        assert path.read_bytes() == (SAMPLES / "atif" / path.name).read_bytes()
    source = FileSource((tmp_path / "in" / "full.json",))
    export(source, codec("atif"), tmp_path / "out")
    assert int(run("harbor", "validate_atif.py", tmp_path / "out")) == 2
    assert source.report.losses == ()


def test_mini_swe_agent_writes_what_we_read(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    run("mini-swe-agent", "write_mini_swe_agent.py", tmp_path / "calc__calc-1.traj.json", tmp_path / "work")
    report = Report()
    found = list(read(tmp_path / "calc__calc-1.traj.json", report=report))
    assert report.losses == ()
    ours, theirs = shapes(found), shapes(list(read(SAMPLES / "mini_swe_agent" / "calc__calc-1.traj.json")))
    for made in (ours, theirs):
        # The folder of the run, and the times in the scripted answers.
        del made[0][0]["metadataJson"]["mini_swe_agent"]["info"]["config"]
    assert ours == theirs


def test_openhands_writes_what_we_read(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    run("openhands", "write_openhands.py", tmp_path / "state", tmp_path / "work")
    found = list(read(tmp_path / "state"))
    assert shapes(found) == shapes(list(read(SAMPLES / "openhands")))
