"""Plans of datasets, and datasets that can be made again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from orchard.data import DataError, Record
from orchard.data.curation.manifest import make_dataset
from orchard.data.curation.plan import load_plan, schema
from orchard.data.sources import RecordSource
from orchard.trajectory.v1 import trajectory_pb2 as pb

from tests.unit.data.making import record, with_image

PLAN = """\
version: 1
name: swe
seed: 7
steps:
  - status: [completed, failed]
  - max_tokens: 65536
  - known_tools: [bash]
  - parsable_actions: true
  - has_rise: true
  - diverse_repo: {per_repo: 2, count: 3}
export:
  format: sft
  loss: rises
"""


def plan(folder: Path, text: str = PLAN) -> Path:
    path = folder / "plan.yaml"
    path.write_text(text)
    return path


def test_a_plan_is_the_curation_that_it_says(tmp_path: Path) -> None:
    made = load_plan(plan(tmp_path))
    assert [step.name for step in made.curation.steps] == [
        "status",
        "max_tokens",
        "known_tools",
        "parsable_actions",
        "has_rise",
        "diverse_repo",
    ]
    assert (made.name, made.curation.seed, made.format, made.options.loss) == ("swe", 7, "sft", "rises")
    assert made.curation.steps[-1].options == {"per_repo": 2, "count": 3, "of": "resolved"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version: 1\n", "", "plan.yaml:1: version: is missing; add it"),
        ("version: 1", "version: 2", "plan.yaml:1: version: is 2; write 1"),
        ("seed: 7", "sead: 7", "plan.yaml:3: sead: is not known; did you mean seed?"),
        ("seed: 7", "seed: many", 'plan.yaml:3: seed: is "many"; give a whole number'),
        (
            "max_tokens: 65536",
            "max_token: 1",
            r"plan.yaml:6: steps[1].max_token: is not known; did you mean max_tokens?",
        ),
        ("max_tokens: 65536", "max_tokens: 0", "plan.yaml:6: steps[1].max_tokens: is 0; give at least 1"),
        (
            "[completed, failed]",
            "[complete]",
            "plan.yaml:5: steps[0].status[0]: is 'complete'; use one of open, completed",
        ),
        ("[completed, failed]", "[]", "plan.yaml:5: steps[0].status: is empty; name at least one"),
        ("known_tools: [bash]", "known_tools: [1]", "plan.yaml:7: steps[2].known_tools[0]: is 1; give a text"),
        ("known_tools: [bash]", "known_tools: false", "plan.yaml:7: steps[2].known_tools: is false; write true, or"),
        (
            "  - has_rise: true",
            "    has_rise: true",
            "plan.yaml:8: steps[3]: has 2 steps in one item: parsable_actions, has_rise; begin",
        ),
        ("{per_repo: 2, count: 3}", "{count: 3}", "plan.yaml:10: steps[5].diverse_repo.per_repo: is missing; add it"),
        ("{per_repo: 2, count: 3}", "{per_repo: 2, of: best}", "steps[5].diverse_repo.of: is 'best'; use one of all"),
        (
            "has_rise: true",
            "near_duplicates: {above: 1.5}",
            "plan.yaml:9: steps[4].near_duplicates.above: is 1.5; give less than 1",
        ),
        (
            "has_rise: true",
            "where: {mood: [good]}",
            "plan.yaml:9: steps[4].where.mood: is no field of a trajectory; use dataset",
        ),
        (
            "has_rise: true",
            "large_diff: {of: all}",
            "plan.yaml:9: steps[4].large_diff: large_diff has no bound; give count or",
        ),
        ("format: sft", "format: csv", "plan.yaml:12: export.format: there is no format 'csv'; use one of orchard"),
        ("format: sft", "format: openhands", "plan.yaml:12: export.format: openhands can be read, not written"),
        ("loss: rises", "loss: some", "plan.yaml:13: export.loss: is 'some'; use one of resolved, rises, all"),
        ("seed: 7", "seed: 7\nseed: 8", "plan.yaml:4: seed: is there twice, first in line 3; keep one of them"),
        ("seed: 7", "seed: [7", "plan.yaml:4: is no YAML"),
        ("seed: 7", "tokenizer: none.json", "none.json: is not there; name a tokenizer.json"),
        (PLAN, "", "plan.yaml:1: is null; give keys and values"),
    ],
)
def test_a_mistake_in_a_plan_is_named_with_its_line_and_its_fix(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    assert old in PLAN
    with pytest.raises(DataError) as caught:
        load_plan(plan(tmp_path, PLAN.replace(old, new)))
    assert message in str(caught.value)


def test_the_schema_is_one_and_knows_every_step() -> None:
    Draft202012Validator.check_schema(schema())
    known = set(schema()["properties"]["steps"]["items"]["properties"])
    from orchard.data.curation.plan import _STEPS

    assert known == set(_STEPS)
    assert files("orchard.data.curation").joinpath("plan.schema.json").is_file()


def pool() -> list[Record]:
    made = [record(f"a{n}", repo=f"r{n % 2}", tokens=True) for n in range(8)]
    return [*made, record("rise", score=-1.0, values={0: 0.1, 1: 0.5}), record("bad", score=-1.0)]


def test_a_dataset_is_made_again_exactly(tmp_path: Path) -> None:
    source, chosen_plan = RecordSource.of(pool()), load_plan(plan(tmp_path))
    first = make_dataset(source, chosen_plan, tmp_path / "a" / "out.jsonl")
    again = make_dataset(source, chosen_plan, tmp_path / "b" / "out.jsonl", like=first.manifest)
    for name in ("out.jsonl", "out.jsonl.manifest.json", "out.jsonl.report.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    manifest = json.loads(first.manifest.read_text())
    assert manifest["plan"]["name"] == "swe"
    assert manifest["output"]["sha256"] == hashlib.sha256((tmp_path / "a" / "out.jsonl").read_bytes()).hexdigest()
    assert [one["id"] for one in manifest["kept"]] == list(again.chosen.kept)
    # Three successes are drawn, and the failure with a rise is not looked at by the selector.
    assert len(manifest["kept"]) == 4
    fates = [json.loads(line) for line in first.report.read_text().splitlines()]
    assert [fate["id"] for fate in fates] == [one.id for one in pool()]
    assert fates[-1] == {
        "id": "bad",
        "sha256": fates[-1]["sha256"],
        "step": "has_rise",
        "reason": "it is unresolved and has no values",
    }
    rows = [json.loads(line) for line in (tmp_path / "a" / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list(first.chosen.kept)
    assert rows[-1]["loss_mask"] == [0, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: made[:-1], None),
        (lambda made: [one for one in made if one.id != "rise"], "rise was kept, and it is not in the source"),
        (lambda made: [_relabelled(one) for one in made], "has changed since"),
        (lambda made: [*made, record("rise2", score=-1.0, values={0: 0.1, 1: 0.5})], "rise2 was not kept then"),
    ],
)
def test_a_dataset_that_differs_from_its_manifest(change: Any, message: str | None, tmp_path: Path) -> None:
    chosen_plan = load_plan(plan(tmp_path))
    first = make_dataset(RecordSource.of(pool()), chosen_plan, tmp_path / "a" / "out.jsonl")
    other = RecordSource.of(change(pool()))
    if message is None:
        # What was dropped does not matter.
        make_dataset(other, chosen_plan, tmp_path / "b" / "out.jsonl", like=first.manifest)
        return
    with pytest.raises(DataError, match=message):
        make_dataset(other, chosen_plan, tmp_path / "b" / "out.jsonl", like=first.manifest)
    assert not (tmp_path / "b" / "out.jsonl").exists()


def _relabelled(made: Record) -> Record:
    trajectory = pb.Trajectory()
    trajectory.CopyFrom(made.trajectory)
    trajectory.labels["new"] = "label"
    return replace(made, trajectory=trajectory)


def test_a_plan_without_a_format_makes_no_dataset(tmp_path: Path) -> None:
    made = load_plan(plan(tmp_path, "version: 1\nsteps: []\n"))
    with pytest.raises(DataError, match="the plan names no format"):
        make_dataset(RecordSource.of(pool()), made, tmp_path / "out.jsonl")


def test_browsers_as_the_paper_curates_them(tmp_path: Path) -> None:
    """Successes; the shortest of each task; at most 20 tasks a website; an example a response, loss on it alone."""
    text = """\
version: 1
steps:
  - outcome: resolved
  - shortest_per_task: true
  - cap: {by: website, most: 20}
export: {format: sft-turns}
"""
    made = [
        with_image(f"w{task}.{attempt}", attempt + 1, 1.0 if attempt else -1.0, website="w", instance_id=f"i{task}")
        for task in range(22)
        for attempt in range(3)
    ]
    dataset = make_dataset(RecordSource.of(made), load_plan(plan(tmp_path, text)), tmp_path / "out.jsonl")
    assert len(dataset.chosen.kept) == 20
    assert {name.split(".")[1] for name in dataset.chosen.kept} == {"1"}
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 40
    assert all(sum(row["loss_mask"]) == row["loss_mask"][-1] == 1 for row in rows)


def test_pairs_as_the_paper_curates_claw(tmp_path: Path) -> None:
    """Only what completes its task; an example for each recorded pair; longer ones are cut on their left."""
    text = """\
version: 1
steps:
  - outcome: resolved
export: {format: trl-tokens, max_tokens: 6, truncate: left}
"""
    good = record("good", actions=3, tokens=True)
    # Each call was recorded with a prompt of its own.
    for step in good.steps[2::2]:
        del step.model_call.prompt_token_ids[:]
        step.model_call.prompt_token_ids.extend(range(step.index, step.index + 9))
    dataset = make_dataset(
        RecordSource.of([good, record("bad", score=-1.0, tokens=True)]),
        load_plan(plan(tmp_path, text)),
        tmp_path / "out.jsonl",
    )
    assert list(dataset.chosen.kept) == ["good"]
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(row["input_ids"]) for row in rows] == [6, 6, 6]
    assert [row["labels"] for row in rows] == [
        [-100, -100, -100, -100, 100, 101],
        [-100, -100, -100, -100, 110, 111],
        [-100, -100, -100, -100, 120, 121],
    ]


class Changing:
    """A source that is another one from the second reading on."""

    as_of = identity = ""

    def __init__(self, *readings: list[Record]) -> None:
        self.readings = [RecordSource.of(reading) for reading in readings]
        self.read = 0

    def at(self, as_of: str) -> Changing:
        return self

    def records(self, after: str = "") -> Iterator[tuple[Record, str]]:
        source = self.readings[min(self.read, len(self.readings) - 1)]
        self.read += 1
        yield from source.records(after)

    def headers(self) -> Iterator[pb.Trajectory]:
        return self.readings[-1].headers()


def rewarded(made: list[Record], place: int) -> list[Record]:
    one = made[place]
    trajectory = pb.Trajectory()
    trajectory.CopyFrom(one.trajectory)
    trajectory.rewards.add(name="style", state=pb.REWARD_STATE_SCORED, value=1)
    return [*made[:place], Record(trajectory, one.steps, one.values, one.bodies), *made[place + 1 :]]


def longer(made: list[Record], place: int) -> list[Record]:
    one = made[place]
    return [*made[:place], Record(one.trajectory, [*one.steps, one.steps[-1]], one.values), *made[place + 1 :]]


@pytest.mark.parametrize("format_name", ["sft", "grpo"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: rewarded(made, 1), "'t1' has changed since it was chosen"),
        (lambda made: longer(made, 2), "'t2' has changed since it was chosen"),
        (lambda made: made[:-1], "'t3' was chosen, and is not there any more"),
        (lambda made: [], "'t0' was chosen, and is not there any more"),
    ],
)
def test_what_changes_between_the_choice_and_the_writing_makes_no_dataset(
    change: Callable[[list[Record]], list[Record]], message: str, format_name: str, tmp_path: Path
) -> None:
    made = [record(f"t{n}", score=1.0 if n % 2 else -1.0, group="g") for n in range(4)]
    text = f"version: 1\nname: n\nsteps:\n  - status: [completed]\nexport:\n  format: {format_name}\n  loss: all\n"
    chosen_plan, output = load_plan(plan(tmp_path, text)), tmp_path / "out.jsonl"
    with pytest.raises(DataError, match=message):
        make_dataset(Changing(made, change(made)), chosen_plan, output)
    assert not output.exists()
    assert not list(tmp_path.glob("*.manifest.json"))
    # The same command, once nothing changes any more, is another choice and says so; begun again it goes through.
    make_dataset(Changing(change(made) or made), chosen_plan, output, restart=True)
    # What was not chosen may change.
    added = record("new", score=1.0, group="g")
    make_dataset(Changing(made, [*made, added]), chosen_plan, tmp_path / "more.jsonl")
