"""Trajectories between files and the platform: stored, read back, exported, curated."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from orchard import AlreadyExists, SandboxClient, Task, TrajectoryOptions, TrajectorySealed, WriterConflict
from orchard._cli.main import app
from orchard.data import Record, codec, read
from orchard.data.export import export
from orchard.data.record import text_of
from orchard.data.server import ServerSource, store
from orchard.data.sources import RecordSource
from orchard.trajectory.v1 import trajectory_pb2 as pb
from typer.testing import CliRunner

from tests.support.platform import PlatformProcess
from tests.unit.data.making import record, with_image

SAMPLES = Path(__file__).parents[2] / "unit" / "data" / "samples"
runner = CliRunner()


@pytest.fixture
def dataset() -> str:
    """A dataset of this test alone."""
    return f"d-{secrets.token_hex(6)}"


@pytest.fixture
def shell(platform: PlatformProcess) -> Iterator[Any]:
    """Runs commands against the platform."""
    environment = {**os.environ, "ORCHARD_ENDPOINT": platform.endpoint, "ORCHARD_API_KEY": platform.api_key}

    def run(*arguments: str | Path) -> Any:
        result = runner.invoke(app, ["trajectories", *map(str, arguments), "--json"], env=environment)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


def unique(made: Record, dataset: str) -> Record:
    """A trajectory under an id and in a dataset of its own."""
    trajectory = pb.Trajectory()
    trajectory.CopyFrom(made.trajectory)
    trajectory.trajectory_id = f"{dataset}-{made.id}"
    trajectory.task.dataset = dataset
    return Record(trajectory, made.steps, made.values, made.bodies)


def told(made: Record) -> dict[str, Any]:
    """What a file says of a trajectory, without what only a platform knows."""
    value = MessageToDict(made.trajectory)
    for key in ("tenant", "totals", "createTime", "sealTime", "contentHash"):
        value.pop(key, None)
    for reward in [*value.get("rewards", []), value.get("outcome", {})]:
        reward.pop("time", None)
    # The same JSON, whatever the spaces.
    value["metadataJson"] = json.loads(value.get("metadataJson", "{}"))
    return value


def from_platform(client: SandboxClient, dataset: str) -> list[Record]:
    return [found for found, _ in ServerSource(client, {"datasets": dataset}).records()]


def test_what_is_stored_comes_back(client: SandboxClient, dataset: str) -> None:
    long = record("long", score=-1.0, values={0: 0.1, 1: 0.5}, tokens=True, repo="a/b")
    long.steps[3].content[0].text = "x" * 2_000_000
    long.trajectory.metadata_json = '{"own":[1]}'
    made = [unique(one, dataset) for one in (long, with_image("seen", 2, 1.0))]
    assert [store(client, one).new for one in made] == [True, True]
    back = from_platform(client, dataset)
    assert [told(one) for one in back] == [told(one) for one in made]
    for one, other in zip(back, made, strict=True):
        assert [text_of(step, one.bodies) for step in one.steps] == [
            text_of(step, other.bodies) for step in other.steps
        ]
        assert [step.model_call for step in one.steps] == [step.model_call for step in other.steps]
        assert [(v.index, v.name, v.value) for v in one.values] == [(v.index, v.name, v.value) for v in other.values]
    image = back[1].steps[2].content[1].blob
    assert back[1].bodies[image.sha256] == b"\x89PNG\r\n\x1a\n"


def test_a_repeat_stores_nothing_twice_and_goes_on_where_it_was(client: SandboxClient, dataset: str) -> None:
    made = unique(record("once", actions=3), dataset)
    half = Record(pb.Trajectory(), made.steps[:3])
    half.trajectory.CopyFrom(made.trajectory)
    half.trajectory.status = pb.TRAJECTORY_STATUS_OPEN
    assert store(client, half).steps == 3
    first = store(client, made)
    again = store(client, made)
    assert (first.new, again.new, again.steps) == (True, False, 8)
    (back,) = from_platform(client, dataset)
    assert len(back.steps) == 8
    # One of the half, one of the whole.
    assert len(list(client.trajectories.annotations(made.id))) == 2


def test_another_trajectory_of_the_same_id_is_refused(client: SandboxClient, dataset: str) -> None:
    store(client, unique(record("one"), dataset))
    other = unique(record("one", repo="x/y"), dataset)
    with pytest.raises(AlreadyExists):
        store(client, other)


def opened(made: Record) -> Record:
    """The same as it was before it ended."""
    trajectory = pb.Trajectory()
    trajectory.CopyFrom(made.trajectory)
    trajectory.status = pb.TRAJECTORY_STATUS_OPEN
    return Record(trajectory, made.steps)


@pytest.mark.parametrize("written", [0, 2])
@pytest.mark.parametrize("sealed", [False, True])
def test_an_import_leaves_a_live_recording_alone(
    client: SandboxClient, dataset: str, written: int, sealed: bool
) -> None:
    """Whatever the file says of its end, and however little was recorded so far."""
    made = unique(record("live", actions=1), dataset)
    with client.record(trajectory_id=made.id, model="m", task=Task(dataset=dataset)) as live:
        live.append(*made.steps[:written])
        for _ in range(2):
            with pytest.raises(WriterConflict) as caught:
                store(client, made if sealed else opened(made))
            assert made.id in caught.value.message
            assert "--take-over" in caught.value.message
        live.append(*made.steps[written:3])
    info = client.trajectories.get(made.id)
    assert (info.status, info.totals.steps, info.rewards) == ("completed", 3, ())


def test_a_recording_is_taken_over_by_who_asks_for_it(
    client: SandboxClient, shell: Any, dataset: str, tmp_path: Path
) -> None:
    made = unique(record("live", actions=1), dataset)
    live = client.trajectories.create(trajectory_id=made.id, model="m", task=Task(dataset=dataset))
    live.append(*made.steps[:2])
    export(RecordSource.of([made]), codec("orchard"), tmp_path / "live.jsonl")
    environment_free = runner.invoke(app, ["trajectories", "import", "--help"])
    assert "--take-over" in environment_free.stdout
    assert shell("import", tmp_path / "live.jsonl", "--take-over")["new"] == 1
    with pytest.raises(TrajectorySealed):
        live.append(*made.steps[2:3])
    (back,) = from_platform(client, dataset)
    assert len(back.steps) == len(made.steps)


def test_an_export_of_the_platform_is_that_of_the_file(client: SandboxClient, dataset: str, tmp_path: Path) -> None:
    made = [
        unique(record(f"t{n}", score=1.0 if n % 2 else -1.0, group=f"{dataset}-g", tokens=True), dataset)
        for n in range(4)
    ]
    for one in made:
        store(client, one)
    for name in ("sft", "grpo", "slime", "prime-rl", "value"):
        ours = export(ServerSource(client, {"datasets": dataset}), codec(name), tmp_path / f"{name}.jsonl")
        theirs = export(RecordSource.of(made), codec(name), tmp_path / f"{name}-file.jsonl")
        assert ours.rows > 0
        assert (ours.rows, ours.sha256) == (theirs.rows, theirs.sha256)


def test_an_export_is_taken_back_where_it_came_from(
    client: SandboxClient, shell: Any, dataset: str, tmp_path: Path
) -> None:
    """With whatever a description can have."""
    options: TrajectoryOptions = {
        "trajectory_id": f"{dataset}-t",
        "rollout_id": "r-1",
        "group_id": f"{dataset}-g",
        "attempt": 3,
        "harness": "h",
        "model": "m",
        "policy_version": "p7",
        "teacher": "t",
        "tools": [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}],
        "labels": {"run": dataset},
        "sandbox_id": "sb-1",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "metadata": {"ünicode": [1, 2.5, None]},
    }
    assert set(options) == set(TrajectoryOptions.__annotations__)
    task = Task("instance", dataset, "repo", "site.example", "train")
    writing = client.trajectories.create(task, **options)
    writing.append(*record("any").steps)
    client.trajectories.seal(writing.trajectory_id, "completed")
    file = tmp_path / "back.jsonl"
    shell("export", "--label", f"run={dataset}", "--to", "orchard", "--output", file)
    found = shell("import", file)
    assert (found["trajectories"], found["new"]) == (1, 0)
    assert len(from_platform(client, dataset)) == 1


def test_import_export_and_curate_in_the_shell(shell: Any, dataset: str, tmp_path: Path) -> None:
    (sample,) = read(SAMPLES / "mini_swe_agent" / "calc__calc-1.traj.json")
    made = unique(sample, dataset)
    made.trajectory.outcome.CopyFrom(pb.Reward(name="outcome", state=pb.REWARD_STATE_SCORED, value=1.0))
    export(RecordSource.of([made]), codec("orchard"), tmp_path / "in.jsonl")
    found = shell("import", tmp_path / "in.jsonl")
    assert (found["trajectories"], found["new"]) == (1, 1)
    assert shell("import", tmp_path / "in.jsonl")["new"] == 0
    exported = shell("export", "--dataset", dataset, "--to", "swebench", "-o", tmp_path / "preds.json")
    assert exported["rows"] == 1
    (prediction,) = json.loads((tmp_path / "preds.json").read_text())
    assert prediction["instance_id"] == "calc__calc-1"
    assert prediction["model_patch"].startswith("diff --git")
    plan = tmp_path / "plan.yaml"
    plan.write_text("version: 1\nsteps:\n  - outcome: resolved\nexport: {format: sft}\n")
    curated = shell("curate", plan, "--dataset", dataset, "-o", tmp_path / "sft.jsonl")
    assert (curated["read"], curated["kept"], curated["rows"]) == (1, 1, 1)


def test_what_is_added_meanwhile_changes_nothing(client: SandboxClient, dataset: str) -> None:
    store(client, unique(record("early"), dataset))
    source = ServerSource(client, {"datasets": dataset})
    store(client, unique(record("late"), dataset))
    assert [one.id for one, _ in source.records()] == [f"{dataset}-early"]
    assert [one.trajectory_id for one in source.headers()] == [f"{dataset}-early"]
    later = source.at(ServerSource(client, {}).as_of)
    assert len(list(later.records())) == 2
    assert later.identity == source.identity
