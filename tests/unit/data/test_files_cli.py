"""The commands for trajectories in files, without a platform."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from orchard._cli.main import app
from orchard.data import codec, codecs, read
from orchard.data import export as exports
from orchard.data.export import export
from orchard.data.sources import RecordSource
from typer.testing import CliRunner

from tests.unit.data.making import record

SAMPLES = Path(__file__).parent / "samples"
runner = CliRunner()


def run(*arguments: str | Path) -> Any:
    return runner.invoke(app, ["trajectories", *map(str, arguments)])


def said(*arguments: str | Path) -> Any:
    """What a command printed as JSON."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Trajectories in a file of our own format."""
    made = [record(f"t{n}", score=1.0 if n % 2 else -1.0, group="g", repo=f"r{n}", tokens=True) for n in range(6)]
    export(RecordSource.of(made), codec("orchard"), tmp_path / "in.jsonl")
    return tmp_path / "in.jsonl"


def test_formats() -> None:
    assert [one["name"] for one in said("formats")] == list(codecs())
    assert "SWE-bench predictions" in run("formats").output


def test_convert(archive: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    found = said("convert", archive, "--to", "sft", "-o", output)
    assert (found["read"], found["rows"], found["resumed"]) == (6, 3, 0)
    assert [(loss["what"], loss["count"]) for loss in found["losses"]] == [("record", 3)]
    result = run("convert", archive, "--to", "sft", "-o", output)
    assert result.exit_code == 2
    assert (
        f"{output}: is there already; choose another name, or replace it with overwrite (--overwrite)" in result.stderr
    )
    shown = run("convert", archive, "--to", "sft", "-o", output, "--overwrite")
    assert "read 6, wrote 3 rows" in shown.stdout
    assert "left out: it is unresolved: rise segments would train on what helped (3 times, first t0)" in shown.stderr


def test_convert_from_what_others_wrote(tmp_path: Path) -> None:
    paths = [SAMPLES / "atif" / "full.json", *(SAMPLES / "mini_swe_agent").iterdir(), SAMPLES / "openhands"]
    found = said("convert", *paths, "--to", "atif", "-o", tmp_path / "out")
    assert (found["read"], found["rows"]) == (4, 4)
    assert {loss["what"] for loss in found["losses"]} == {"timestamp", "tools.parameters"}
    assert (tmp_path / "out" / "calc__calc-1.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "parchment", "-o", "x.jsonl"], "there is no format 'parchment'; use one of orchard"),
        (["--to", "sft", "-o", "x.txt"], "sft is not written into 'x.txt'; write *.jsonl, *.parquet"),
        (["--to", "sft", "-o", "x.jsonl", "--loss", "some"], "loss is 'some'; use one of resolved, rises, all"),
        (["--to", "grpo", "-o", "x.jsonl", "--recipe", "chess"], "recipe is 'chess'; use one of swe, gui, claw"),
        (["--to", "sft", "-o", "x.jsonl", "--tokenizer", "none.json"], "none.json: is not there"),
        (
            ["--to", "sft", "-o", "x.jsonl", "--from", "parchment"],
            "public-gui, openai, mini-swe-agent, openhands, swebench [BAD_DATA]",
        ),
        (["--to", "sft", "-o", "x.jsonl", "--from", "swebench"], "in.jsonl:1: instance_id: is missing"),
    ],
)
def test_bad_input_leaves_one_sentence(
    arguments: list[str], message: str, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("convert", archive, *arguments)
    # What a file says is no fault of what was typed.
    assert result.exit_code == (1 if "in.jsonl:1" in message else 2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "x.jsonl").exists()


def test_what_a_bad_line_broke_off_goes_on_when_it_is_mended(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "_CHECKPOINT_UNITS", 2)
    lines = archive.read_text().splitlines(keepends=True)
    archive.write_text("".join([*lines[:3], "{\n", *lines[3:]]))
    result = run("convert", archive, "--to", "openai", "-o", tmp_path / "out.jsonl")
    assert f"{archive}:4: is no JSON" in result.stderr
    archive.write_text("".join(lines))
    # The file is another now: going on could mix two.
    result = run("convert", archive, "--to", "openai", "-o", tmp_path / "out.jsonl")
    assert "repeat it as it was, or begin again with restart (--restart)" in result.stderr
    assert said("convert", archive, "--to", "openai", "-o", tmp_path / "out.jsonl", "--restart")["rows"] == 6


def test_import_only_reads_when_told_so() -> None:
    found = said("import", SAMPLES / "openhands", "--dry-run")
    assert (found["trajectories"], found["new"]) == (1, 0)
    assert {loss["what"] for loss in found["losses"]} == {"timestamp", "tools.parameters"}


def test_curate(archive: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("version: 1\nsteps:\n  - outcome: resolved\n  - random: {count: 2}\nexport: {format: sft}\n")
    found = said("curate", plan, archive, "-o", tmp_path / "out.jsonl")
    assert (found["read"], found["kept"], found["rows"]) == (6, 2, 2)
    assert [step["after"] for step in found["steps"]] == [3, 2]
    again = said("curate", plan, archive, "-o", tmp_path / "again.jsonl", "--like", found["manifest"])
    assert again["sha256"] == found["sha256"]
    shown = run("curate", plan, archive, "-o", tmp_path / "third.jsonl")
    assert "kept 2 of 6 trajectories, 2 rows" in shown.stdout
    assert "3 it is unresolved" in shown.stdout
    plan.write_text("version: 1\nsteps:\n  - outcome: good\n")
    result = run("curate", plan, archive, "-o", tmp_path / "bad.jsonl")
    assert f"{plan}:3: steps[0].outcome: is 'good'; use one of resolved" in result.stderr


def test_curate_takes_filters_of_the_platform_alone(archive: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("version: 1\nsteps: []\nexport: {format: sft}\n")
    result = run("curate", plan, archive, "-o", tmp_path / "out.jsonl", "--repo", "r1")
    assert result.exit_code == 2
    assert "a plan's `where` does the same" in result.stderr


def test_what_was_written_is_read(archive: Path) -> None:
    assert [one.id for one in read(archive)] == [f"t{n}" for n in range(6)]


def test_importing_the_client_and_its_commands_loads_nothing_of_this() -> None:
    code = (
        "import sys, orchard, orchard._cli.main, orchard.trajectory.v1.trajectory_pb2\n"
        "heavy = ('pyarrow', 'yaml', 'jsonschema', 'datasketch', 'tokenizers', 'numpy', 'orchard.data')\n"
        "assert not [name for name in heavy if name in sys.modules], sorted(sys.modules)\n"
        "import orchard.data\n"
        "assert not [name for name in heavy[:-1] if name in sys.modules], sorted(sys.modules)\n"
        "orchard.data.codecs()\n"
        "assert not [name for name in heavy[:-1] if name in sys.modules], sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("pyarrow", ["convert", "in.jsonl", "--to", "sft", "-o", "o.parquet"], "Parquet needs pyarrow; pip install"),
        ("yaml", ["curate", "plan.yaml", "in.jsonl", "-o", "o.jsonl"], "a plan file needs PyYAML; pip install"),
        ("jsonschema", ["curate", "plan.yaml", "in.jsonl", "-o", "o.jsonl"], "a plan file needs jsonschema"),
        (
            "tokenizers",
            ["convert", "in.jsonl", "--to", "sft", "-o", "o.jsonl", "--tokenizer", "plan.yaml"],
            "[tokenizers]",
        ),
        ("datasketch", ["curate", "plan.yaml", "in.jsonl", "-o", "o.jsonl"], "near_duplicates needs datasketch"),
    ],
)
def test_what_is_missing_is_named_with_its_extra(
    module: str, arguments: list[str], message: str, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(archive.parent)
    Path("plan.yaml").write_text("version: 1\nsteps:\n  - near_duplicates: true\nexport: {format: sft}\n")
    monkeypatch.setitem(sys.modules, module, None)
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr
