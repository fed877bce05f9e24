"""Exports: whole rows, broken off and taken up again, into every container."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchard.data import DataError, Record, codec, codecs, read
from orchard.data import export as exports
from orchard.data.codecs.base import Container, rows_of
from orchard.data.counting import Estimate, TokenizerFile
from orchard.data.export import export, hash_of_path
from orchard.data.options import ExportOptions
from orchard.data.record import text_of
from orchard.data.report import Report
from orchard.data.sources import FileSource, RecordSource
from orchard.trajectory.v1 import trajectory_pb2 as pb

from tests.unit.data.making import branching, record, with_image
from tests.unit.data.strategies import SLOW, records, same

GROUPED = ("grpo", "preference", "slime", "verl", "prime-rl")


def some(count: int = 7) -> list[Record]:
    """Attempts at two prompts, in turns, with tokens."""
    made = [record(f"t{n}", n % 3 + 1, 1.0 if n % 4 else -1.0, group=f"g{n % 2}", tokens=True) for n in range(count)]
    for number, one in enumerate(made):
        one.trajectory.attempt = number
        one.trajectory.task.instance_id = f"i{number}"
    return made


class BrokenOffError(Exception):
    """The machine went away."""


@dataclass(frozen=True)
class Breaking:
    """A source that goes away after some trajectories."""

    inner: RecordSource
    after: int

    @property
    def identity(self) -> str:
        return self.inner.identity

    as_of = ""

    def at(self, as_of: str) -> Breaking:
        return self

    def records(self, after: str = "") -> Iterator[tuple[Record, str]]:
        for number, found in enumerate(self.inner.records(after)):
            if number == self.after:
                raise BrokenOffError
            yield found

    def headers(self) -> Iterator[pb.Trajectory]:
        return self.inner.headers()


@pytest.mark.parametrize("name", [name for name, one in codecs().items() if one.writes])
@pytest.mark.parametrize("broken", [0, 1, 4, 6])
def test_a_broken_off_export_goes_on_and_is_the_same(
    name: str, broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "_CHECKPOINT_UNITS", 2)
    source, one = RecordSource.of(some()), codec(name)
    suffix = one.containers[0].value
    whole = export(source, one, tmp_path / "whole" / f"out{suffix}")
    output = tmp_path / "broken" / f"out{suffix}"
    with pytest.raises(BrokenOffError):
        export(Breaking(source, broken), one, output)
    assert not output.exists()
    partial = output.with_name(output.name + ".partial")
    if partial.is_file():
        # A kill can tear the last line; what the cursor has is whole.
        with partial.open("ab") as file:
            file.write(b'{"torn": ')
    again = export(source, one, output)
    assert again.sha256 == whole.sha256 == hash_of_path(output)
    assert (again.rows, again.records, again.losses) == (whole.rows, whole.records, whole.losses)
    assert again.resumed <= broken
    left = [path.name for path in output.parent.iterdir() if path.suffix != ".files"]
    assert left == [output.name]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("name", ["sft", "atif"])
def test_two_exports_to_one_place_do_not_mix(name: str, restart: bool, tmp_path: Path) -> None:
    one = codec(name)
    output = tmp_path / f"out{one.containers[0].value}"
    whole = export(RecordSource.of(some()), one, tmp_path / "whole" / output.name)

    class Busy(Breaking):
        """In the middle of it another one begins."""

        def records(self, after: str = "") -> Iterator[tuple[Record, str]]:
            for number, found in enumerate(self.inner.records(after)):
                if number == self.after:
                    with pytest.raises(DataError, match="somebody else is writing it"):
                        export(self.inner, one, output, restart=restart)
                yield found

    assert export(Busy(RecordSource.of(some()), 3), one, output).sha256 == whole.sha256


def test_an_export_that_ends_leaves_one_that_begins_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, output = codec("sft"), tmp_path / "out.jsonl"
    under_way, go_on = Event(), Event()

    class Slow(Breaking):
        def records(self, after: str = "") -> Iterator[tuple[Record, str]]:
            for number, found in enumerate(self.inner.records(after)):
                if number == self.after:
                    under_way.set()
                    assert go_on.wait(110)
                yield found

    real = exports._sync_folder
    with ThreadPoolExecutor(1) as pool:
        others: list[Future[exports.Exported]] = []

        def sync(folder: Path) -> None:
            """Between an output's name and the end of its export another one begins."""
            if not others:
                others.append(pool.submit(export, Slow(RecordSource.of(some()), 3), one, output, overwrite=True))
                assert under_way.wait(110)
            real(folder)

        monkeypatch.setattr(exports, "_sync_folder", sync)
        first = export(RecordSource.of(some()), one, output)
        go_on.set()
        second = others[0].result()
    assert first.sha256 == second.sha256 == hash_of_path(output)
    assert [path.name for path in tmp_path.iterdir()] == [output.name]


def test_an_output_that_another_one_has_made_meanwhile_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"

    class Late(Breaking):
        def records(self, after: str = "") -> Iterator[tuple[Record, str]]:
            yield from self.inner.records(after)
            output.write_text("precious")

    with pytest.raises(DataError, match="is there already"):
        export(Late(RecordSource.of(some()), 0), codec("sft"), output)
    assert output.read_text() == "precious"


def test_an_export_that_was_broken_off_is_not_continued_as_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "_CHECKPOINT_UNITS", 2)
    output = tmp_path / "out.jsonl"
    with pytest.raises(BrokenOffError):
        export(Breaking(RecordSource.of(some()), 3), codec("sft"), output)
    for source, name, options in (
        (RecordSource.of(some(5)), "sft", ExportOptions()),
        (RecordSource.of(some()), "openai", ExportOptions()),
        (RecordSource.of(some()), "sft", ExportOptions(max_tokens=100)),
    ):
        with pytest.raises(DataError, match="was broken off here; repeat it as it was, or begin again with restart"):
            export(source, codec(name), output, options)
    assert export(RecordSource.of(some(5)), codec("sft"), output, restart=True).resumed == 0


@pytest.mark.parametrize("output", ["out.jsonl", "out"])
def test_an_export_that_came_to_nothing_is_in_nobodys_way(output: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="is of no format that is known"):
        export(FileSource((tmp_path / "bad.jsonl",)), codec("atif"), tmp_path / output)
    with pytest.raises(BrokenOffError):
        export(Breaking(RecordSource.of(some()), 1), codec("atif"), tmp_path / output)
    made = export(RecordSource.of(some(3)), codec("atif"), tmp_path / output)
    assert (made.records, made.rows, made.resumed) == (3, 3, 0)
    assert len(list(read(tmp_path / output))) == 3


def test_an_output_that_is_there_is_kept_unless_told(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("precious")
    with pytest.raises(DataError, match="is there already"):
        export(RecordSource.of(some()), codec("sft"), output)
    assert output.read_text() == "precious"
    export(RecordSource.of(some()), codec("sft"), output, overwrite=True)
    assert output.read_text() != "precious"


def test_a_folder_with_files_is_never_replaced(tmp_path: Path) -> None:
    output = tmp_path / "results"
    output.mkdir()
    (output / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match="remove it, or choose another name"):
        export(RecordSource.of(some()), codec("atif"), output, overwrite=True)
    assert (output / "thesis.tex").read_text() == "precious"
    (output / "thesis.tex").unlink()
    export(RecordSource.of(some()), codec("atif"), output, overwrite=True)
    assert list(output.iterdir())


@pytest.mark.parametrize(
    ("name", "output", "message"),
    [
        ("sft", "out.txt", r"sft is not written into 'out.txt'; write \*.jsonl, \*.parquet"),
        ("atif", "out.parquet", r"atif is not written into 'out.parquet'; write a folder, \*.jsonl"),
        ("openhands", "out.jsonl", r"the format 'openhands' can be read, not written; use one of orchard"),
    ],
)
def test_what_a_format_is_not_written_into(name: str, output: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        export(RecordSource.of(some()), codec(name), tmp_path / output)


@pytest.mark.parametrize("name", [name for name, one in codecs().items() if Container.PARQUET in one.containers])
def test_parquet_has_the_rows_of_lines(name: str, tmp_path: Path) -> None:
    source = RecordSource.of([*some(), branching()])
    if name == "public-gui":
        source = RecordSource.of([with_image("a", 2, 1.0), with_image("b", 1, -1.0)])
    lines = export(source, codec(name), tmp_path / "out.jsonl")
    table = export(source, codec(name), tmp_path / "out.parquet")
    assert lines.rows == table.rows > 0
    wanted = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    for row in wanted:
        if "images" in row:
            row["images"] = [{"bytes": base64.b64decode(one.split(",")[1]), "path": None} for one in row["images"]]
    assert [_bare(row) for row in found] == [_bare(row) for row in wanted]


def _bare(value: Any) -> Any:
    """Without the empty fields that columns give every row."""
    if isinstance(value, dict):
        return {key: _bare(item) for key, item in value.items() if item is not None and item != []}
    return [_bare(item) for item in value] if isinstance(value, list) else value


@settings(SLOW, max_examples=15)
@given(made=st.lists(records(), min_size=1, max_size=3))
def test_every_format_takes_any_trajectory(made: list[Record]) -> None:
    for one in codecs().values():
        if one.rows is None:
            continue
        for found in made:
            for row in rows_of(one, found, ExportOptions(), Report()):
                json.dumps(row.value, allow_nan=False)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_the_public_layout_of_software_engineering_comes_back(suffix: str, tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    rows = [
        {
            "tools": '[{"type": "function"}]',
            "messages": [
                {"role": "user", "content": "Fix it."},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "calc.py", "tool_call_id": "c1"},
            ],
            "metadata": json.dumps({"verify_status": status, "repo": "a/b", "own": [1]}, separators=(",", ":")),
        }
        for status in ("passed", "failed", "timeout")
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = FileSource((tmp_path / "in.jsonl",))
    found = [record for record, _ in source.records()]
    assert [one.resolved for one in found] == [True, False, None]
    assert found[0].trajectory.task.repo == "a/b"
    assert [loss.what for loss in source.report.losses] == ["metadata.verify_status"]
    output = tmp_path / f"out{suffix}"
    export(source, codec("public-swe"), output)
    again = [record for record, _ in FileSource((output,)).records()]
    for one, other in zip(found, again, strict=True):
        assert list(one.steps) == list(other.steps)
        assert one.trajectory.metadata_json == other.trajectory.metadata_json
        assert one.trajectory.outcome == other.trajectory.outcome
    if suffix == ".jsonl":
        written = [_bare(json.loads(line)) for line in output.read_text().splitlines()]
        assert written == [_bare(row) for row in rows]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_the_public_layout_of_browsers_comes_back(suffix: str, tmp_path: Path) -> None:
    output = tmp_path / f"out{suffix}"
    export(RecordSource.of([with_image("gui", 2, 1.0)]), codec("public-gui"), output)
    first, second = read(output)
    assert [len(first.steps), len(second.steps)] == [4, 6]
    assert first.resolved is True
    blob = second.steps[4].content[1].blob
    assert (blob.media_type, second.bodies[blob.sha256]) == ("image/png", b"\x89PNG\r\n\x1a\n")
    assert text_of(second.steps[4], {}) == "See "
    # Earlier decisions have rows of their own, so each is trained once.
    assert [step.copied_context for step in second.steps] == [False, False, False, True, False, False]
    again = tmp_path / f"again{suffix}"
    export(FileSource((output,)), codec("public-gui"), again)
    assert again.read_bytes() == output.read_bytes()


@settings(SLOW, max_examples=20)
@given(made=st.lists(records(), min_size=1, max_size=3))
def test_an_archive_of_our_own_comes_back(made: list[Record], tmp_path_factory: pytest.TempPathFactory) -> None:
    output = tmp_path_factory.mktemp("own") / "out.jsonl"
    export(RecordSource.of(made), codec("orchard"), output)
    for one, other in zip(made, read(output), strict=True):
        same(one, other)


def test_a_body_that_was_changed_or_lost_is_named(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    export(RecordSource.of([with_image("gui", 1, 1.0)]), codec("orchard"), output)
    (body,) = (tmp_path / "out.files").iterdir()
    body.write_bytes(b"other")
    with pytest.raises(DataError, match="is not what its name says"):
        export(FileSource((output,)), codec("sft"), tmp_path / "a.jsonl")
    body.unlink()
    with pytest.raises(DataError, match=r"the body .* \(image/png, 8 bytes\) is missing"):
        export(FileSource((output,)), codec("sft"), tmp_path / "b.jsonl")


def test_a_folder_has_a_file_for_each_trajectory(tmp_path: Path) -> None:
    export(RecordSource.of([record("a"), with_image("b", 1, 1.0)]), codec("atif"), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.json", "b.json", "files"]
    (back,) = read(tmp_path / "out" / "b.json")
    same(back, with_image("b", 1, 1.0))


def test_a_folder_that_was_written_is_read(tmp_path: Path) -> None:
    made = [record("a"), with_image("b", 1, 1.0), record("c", actions=3)]
    export(RecordSource.of(made), codec("atif"), tmp_path / "out")
    for name in ("", "atif"):
        for one, other in zip(made, read(tmp_path / "out", format=name), strict=True):
            same(one, other)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"is a folder without \*\.json files"):
        list(read(tmp_path / "empty", format="atif"))
    with pytest.raises(DataError, match="is of no format that is known"):
        list(read(tmp_path / "empty"))


def test_two_trajectories_of_one_id_are_not_written_over_each_other(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two trajectories have this id"):
        export(RecordSource.of([record("a"), record("a", actions=3)]), codec("atif"), tmp_path / "out")


def test_predictions_as_one_array(tmp_path: Path) -> None:
    export(RecordSource.of(some(3)), codec("swebench"), tmp_path / "preds.json")
    assert [row["instance_id"] for row in json.loads((tmp_path / "preds.json").read_text())] == ["i0", "i1", "i2"]


@pytest.mark.parametrize("name", GROUPED)
def test_what_has_no_group_is_reported(name: str, tmp_path: Path) -> None:
    lone = record("lone", tokens=True)
    made = export(RecordSource.of([*some(), lone]), codec(name), tmp_path / "out.jsonl")
    assert [(loss.first, loss.why) for loss in made.losses if loss.first == "lone"] == [
        ("lone", "it names neither a group nor an instance")
    ]
    assert made.rows > 0


@dataclass(frozen=True)
class Moving(Breaking):
    """A source whose descriptions were read before or after its trajectories came and went."""

    described: tuple[Record, ...] = ()

    def headers(self) -> Iterator[pb.Trajectory]:
        return (one.trajectory for one in self.described)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(
    ("before", "after", "torn"),
    [
        (7, 6, ["g0"]),  # one was deleted
        (6, 7, ["g0"]),  # one was added
        (7, 5, ["g0", "g1"]),
        (7, 0, ["g0", "g1"]),
        (7, 7, []),
    ],
)
def test_groups_that_do_not_become_whole_are_reported(
    name: str, before: int, after: int, torn: list[str], tmp_path: Path
) -> None:
    everything = some()
    source = Moving(RecordSource.of(everything[:after]), 100, tuple(everything[:before]))
    made = export(source, codec(name), tmp_path / "out.jsonl")
    told = [loss for loss in made.losses if "not all of its attempts came" in loss.why]
    assert [(loss.what, loss.first, loss.count) for loss in told] == [("record", *torn[:1], len(torn))] * bool(torn)


def test_members_of_a_group_need_not_come_together(tmp_path: Path) -> None:
    export(RecordSource.of(some()), codec("grpo"), tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    # g0 has t0, t2, t4, t6; g1 is all successes and dropped.
    assert [(row["group"], [one["trajectory_id"] for one in row["members"]]) for row in rows] == [
        ("g0", ["t0", "t2", "t4", "t6"])
    ]


def test_the_estimate_and_a_tokenizer(tmp_path: Path) -> None:
    assert [Estimate().count("x" * length) for length in (0, 1, 4, 5)] == [0, 1, 1, 2]
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    made = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    assert TokenizerFile(tmp_path / "tokenizer.json").count("a b  c") == 3
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad\.json: is no tokenizer"):
        TokenizerFile(tmp_path / "bad.json")
    with pytest.raises(DataError, match="is not there"):
        TokenizerFile(tmp_path / "none.json")
