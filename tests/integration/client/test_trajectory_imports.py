"""Imports: small trajectories share calls, and what breaks one off or is wrong with one loses none before it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import pty
import secrets
import socket
import struct
import subprocess
import sys
import termios
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from orchard import AlreadyExists, InvalidArgument, OrchardError, SandboxClient, Task, WriterConflict
from orchard.data import Record, codec
from orchard.data.export import export
from orchard.data.server import ServerSource, store, store_all
from orchard.data.sources import RecordSource
from orchard.trajectory.v1 import trajectory_pb2 as pb

from tests.integration.client.cli import Cli
from tests.support.platform import PlatformProcess
from tests.unit.data.making import record, with_image


@pytest.fixture
def dataset() -> str:
    """A dataset of this test alone."""
    return f"d-{secrets.token_hex(6)}"


def many(dataset: str, count: int, first: int = 0) -> list[Record]:
    """Small trajectories in their order."""
    return [record(f"{dataset}-{number}", dataset=dataset) for number in range(first, first + count)]


def ids(client: SandboxClient, dataset: str) -> list[str]:
    """Of a dataset's whole trajectories, in the order in which they were made."""
    found = [one for one, _ in ServerSource(client, {"datasets": dataset}).records()]
    assert all(len(one.steps) == one.trajectory.totals.steps for one in found)
    return [one.id for one in found]


def test_small_and_long_ones_come_in_their_order(client: SandboxClient, dataset: str) -> None:
    long = record(f"{dataset}-long", dataset=dataset)
    for step in long.steps:
        step.content[0].text = "x" * 60_000
    long.steps[2].reasoning = "r" * 900_000
    large = record(f"{dataset}-large", dataset=dataset)
    large.steps[3].content[0].text = "y" * 100_000
    seen = with_image(f"{dataset}-seen", 2, 1.0, dataset=dataset)
    judged = record(f"{dataset}-judged", dataset=dataset, values=dict.fromkeys(range(3), 0.5))
    judged = Record(judged.trajectory, judged.steps, [*judged.values] * 3400)
    small = many(dataset, 1200)
    records = [*small[:700], long, *small[700:], large, small[3], seen, judged]
    stored = list(store_all(client, records))
    assert [one.id for one in stored] == [one.id for one in records]
    assert [one.new for one in stored] == [one is not small[3] or place < 700 for place, one in enumerate(records)]
    assert ids(client, dataset) == [one.id for place, one in enumerate(records) if place != 1202]
    assert not any(store(client, one).new for one in (large, seen))
    back = {one.id: one for one, _ in ServerSource(client, {"datasets": dataset}).records()}
    blob = back[large.id].steps[3].content[0].blob
    assert back[large.id].bodies[blob.sha256] == b"y" * 100_000
    assert back[long.id].steps[2].reasoning == long.steps[2].reasoning
    assert not any(one.new for one in store_all(client, records))
    assert len(list(client.trajectories.annotations(small[0].id))) == 1


def test_what_was_read_before_a_mistake_is_stored(client: SandboxClient, dataset: str) -> None:
    made = many(dataset, 90)

    def reading() -> Iterator[Record]:
        yield from made[:70]
        raise ValueError("line 71 is no trajectory")

    stored = []
    with pytest.raises(ValueError, match="line 71"):
        stored.extend(store_all(client, reading()))
    assert ids(client, dataset) == [one.id for one in made[:70]]
    assert [one.new for one in store_all(client, made)] == [False] * 70 + [True] * 20


def test_the_shell_says_how_many_were_stored_before_a_mistake(
    platform: PlatformProcess, dataset: str, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    export(RecordSource.of(many(dataset, 9)), codec("orchard"), path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:7], "{\n", *lines[7:]]))
    command = [sys.executable, "-m", "orchard._cli.main", "trajectories", "import", str(path)]
    environment = platform.client_environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    told, mistake = done.stderr.splitlines()
    assert told == "stored 7 trajectories, 7 of them new, until it broke off; the same command goes on"
    assert f"{path}:8: is no JSON" in mistake
    assert (done.returncode, done.stdout) == (1, "")
    path.write_text("".join(lines))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stdout) == (0, "stored 9 trajectories, 2 of them new\n")


def test_a_call_that_nobody_waits_for_any_more_ends_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """Ctrl-C may come between its beginning and the one who waits for it: the client is closed, and that is all."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = SandboxClient(f"127.0.0.1:{silent.getsockname()[1]}", api_key="k")
        client.trajectories.begin_store([])
        client.close()
        gc.collect()
    assert not caplog.records


class _Bodies(dict[str, bytes]):
    """Of one trajectory; tells whether they are still in memory."""


def test_few_bodies_are_in_memory(client: SandboxClient, dataset: str) -> None:
    """Screenshots, where a file has them in its lines: those of hundreds of trajectories would fill it."""
    held: list[weakref.ref[_Bodies]] = []
    most = 0

    def reading() -> Iterator[Record]:
        nonlocal most
        for number in range(60):
            made = with_image(f"{dataset}-{number}", 1, 1.0, bytes(2 << 20), dataset=dataset)
            bodies = _Bodies(made.bodies)
            held.append(weakref.ref(bodies))
            yield Record(made.trajectory, made.steps, (), bodies)
            del bodies
            most = max(most, sum(one() is not None for one in held))

    assert len(list(store_all(client, reading()))) == 60
    assert most <= 20
    assert ids(client, dataset) == [f"{dataset}-{number}" for number in range(60)]


def _other(made: Record) -> Record:
    trajectory = pb.Trajectory()
    trajectory.CopyFrom(made.trajectory)
    trajectory.task.repo = "x/y"
    return Record(trajectory, made.steps)


def _labelled(made: Record) -> Record:
    trajectory = pb.Trajectory()
    trajectory.CopyFrom(made.trajectory)
    trajectory.labels["no label"] = ""
    return Record(trajectory, made.steps)


def _without_role(made: Record) -> Record:
    return Record(made.trajectory, [*made.steps[:-1], pb.Step(index=len(made.steps) - 1)])


@pytest.mark.parametrize(
    ("spoil", "kind", "word"),
    [
        (_other, AlreadyExists, "another description"),
        (_labelled, InvalidArgument, "trajectory.labels['no label']"),
        (_without_role, InvalidArgument, "steps[5].role"),
    ],
)
def test_the_first_that_is_refused_ends_it_and_is_named(
    client: SandboxClient, dataset: str, spoil: type, kind: type[OrchardError], word: str
) -> None:
    # With those behind it in a call of their own, which is ready as this one is refused.
    made = many(dataset, 700)
    if spoil is _other:
        store(client, made[20])
    with pytest.raises(kind) as caught:
        list(store_all(client, [*made[:20], spoil(made[20]), *made[21:]]))
    assert made[20].id in caught.value.message
    assert word in caught.value.message
    assert caught.value.metadata["trajectory_id"] == made[20].id
    assert set(ids(client, dataset)) == {one.id for one in made[: 21 if spoil is _other else 20]}


@pytest.mark.parametrize("written", [0, 2])
def test_a_live_recording_is_left_alone(client: SandboxClient, dataset: str, written: int) -> None:
    made = many(dataset, 9)
    live = client.trajectories.create(Task(dataset=dataset), trajectory_id=made[4].id, model="m")
    live.append(*made[4].steps[:written])
    with pytest.raises(WriterConflict, match="--take-over") as caught:
        list(store_all(client, made))
    assert made[4].id in caught.value.message
    live.append(*made[4].steps[written : written + 1])
    assert [one.new for one in store_all(client, made, take_over=True)] == [False] * 4 + [True] * 5


def _in_a_terminal(command: Sequence[str], environment: dict[str, str]) -> str:
    """What a command says where its standard error is a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with subprocess.Popen(command, env=environment, stderr=theirs, stdout=subprocess.DEVNULL) as process:
        os.close(theirs)
        with os.fdopen(ours, "rb", 0) as terminal:
            said = b""
            with contextlib.suppress(OSError):  # its other end is closed
                while data := terminal.read(65536):
                    said += data
        assert process.wait(110) == 0
    return said.decode()


def test_an_import_in_the_shell_shows_how_far_it_is(platform: PlatformProcess, dataset: str, tmp_path: Path) -> None:
    export(RecordSource.of(many(dataset, 1000)), codec("orchard"), tmp_path / "in.jsonl")
    command = [sys.executable, "-m", "orchard._cli.main", "trajectories", "import", str(tmp_path / "in.jsonl")]
    said = _in_a_terminal(command, {**platform.client_environment(), "TERM": "xterm"})
    shown = [part for part in said.split("importing: ")[1:] if " trajectories" in part]
    counts = {int(part.split(" ")[0].replace(",", "")) for part in shown}
    assert len(counts) > 1
    assert max(counts) <= 1000


def _openai(path: Path, *given: dict[str, object]) -> Path:
    """A file of conversations in OpenAI's form, a line for each of what else they say."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    path.write_text("".join(json.dumps({"messages": messages, **more}) + "\n" for more in given))
    return path


def test_what_is_imported_is_put_into_a_dataset_and_labelled(
    cli: Cli, client: SandboxClient, dataset: str, tmp_path: Path
) -> None:
    task = {"instance_id": "i", "dataset": "another"}
    given = [{"id": f"{dataset}-{number}", "orchard": {"task": task, "labels": {"own": "1"}}} for number in range(2)]
    path = _openai(tmp_path / "in.jsonl", *given)
    command = ("trajectories", "import", str(path), "--dataset", dataset, "--label", "run=7", "-l", "kind=a/b")
    assert cli.json(*command)["new"] == 2
    assert cli.json(*command)["new"] == 0
    found = list(client.trajectories.list(datasets=dataset, labels={"run": "7"}))
    assert {one.trajectory_id for one in found} == {f"{dataset}-0", f"{dataset}-1"}
    assert all((one.task.instance_id, one.labels) == ("i", {"own": "1", "run": "7", "kind": "a/b"}) for one in found)
    code, out, err = cli("trajectories", "import", str(_openai(tmp_path / "more.jsonl", {})), "--label", "a b=c")
    assert (code, out) == (2, b"")
    assert "labels['a b']: keys and values must be at most 63" in err.decode()


def test_what_the_platform_refuses_is_told_by_file_and_line(
    cli: Cli, client: SandboxClient, dataset: str, tmp_path: Path
) -> None:
    good = {"id": f"{dataset}-0", "orchard": {"task": {"dataset": dataset}}}
    for bad, word in (
        ({"labels": {"a b": "c"}}, "labels['a b']: keys and values must be at most 63"),
        ({"harness": "h" * 200}, "harness"),
    ):
        described = {"id": f"{dataset}-1", "orchard": {"task": {"dataset": dataset}, **bad}}
        path = _openai(tmp_path / "in.jsonl", good, described)
        code, out, err = cli("trajectories", "import", str(path))
        assert (code, out) == (1, b"")
        assert f"orchard: {path}:2: trajectory '{dataset}-1': " in err.decode()
        assert word in err.decode()
    # So it is where the platform has another of this id, or has it open.
    taken = _openai(tmp_path / "taken.jsonl", {}, {**good, "tools": [{"type": "function"}]})
    live = client.trajectories.create(Task(dataset=dataset), trajectory_id=f"{dataset}-live")
    open_there = _openai(tmp_path / "open.jsonl", {"id": live.trajectory_id, "orchard": {"task": {"dataset": dataset}}})
    for path, line, word in ((taken, 2, "exists with another description"), (open_there, 1, "--take-over")):
        code, _out, err = cli("trajectories", "import", str(path))
        assert (code, f"orchard: {path}:{line}: " in err.decode(), word in err.decode()) == (1, True, True)


def test_an_export_of_nothing_says_so(cli: Cli, dataset: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    code, _out, err = cli("trajectories", "export", "--dataset", dataset, "--to", "openai", "-o", str(output))
    assert (code, err, output.read_bytes()) == (0, b"no trajectory matches\n", b"")
    output = tmp_path / "no" / "out.jsonl"
    code, _out, err = cli("trajectories", "export", "--dataset", dataset, "--to", "openai", "-o", str(output))
    assert (code, f"--output: there is no folder '{output.parent}'" in " ".join(err.decode().split())) == (2, True)
    assert not output.parent.exists()
