"""`orchard ps`, `logs` and `kill`: what is to be known of commands that run on their own, and done to them."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from orchard import ExecEnd, ExecState, Process, Sandbox, SandboxClient

from tests.integration.client.cli import Cli
from tests.support.local_terminal import BACKSTOP
from tests.support.platform import wait_until

RETAINED = 64 << 10
WRITTEN = 300_000


@pytest.fixture(scope="module")
def box(client: SandboxClient) -> Iterator[Sandbox]:
    """A sandbox whose commands are those of this file."""
    with client.create() as box:
        yield box


@contextmanager
def detached(cli: Cli, box: Sandbox, command: str) -> Iterator[Process]:
    """A command that `orchard exec -d` has started."""
    code, out, err = cli("exec", "-d", box.sandbox_id, command)
    assert (code, err) == (0, b"")
    with box.process(out.decode().strip()) as process:
        yield process


def has_output(process: Process) -> bool:
    return process.info().output_size > 0


def test_commands_are_listed_newest_first(cli: Cli, box: Sandbox) -> None:
    name = box.sandbox_id
    mark = secrets.token_hex(4)
    for command in (f"echo {mark}; exit 3", "kill -9 $$", "for i in 1 2\ndo true\ndone"):
        box.exec(command, exec_id=f"ps-{secrets.token_hex(8)}")
    long = f"sleep 300 # {'x' * 180}-end"
    with detached(cli, box, long) as process:
        shown = cli("ps", name)[1].decode()
        lines = [line.split(maxsplit=4) for line in shown.splitlines() if line.strip()][2:6]
        assert [line[1] for line in lines] == ["running", "exited", "signalled", "exited"]
        # Whole where it is no terminal, and one line each.
        assert lines[0][0] == process.exec_id
        assert shown.splitlines()[3].rstrip().endswith(long)
        assert "for i in 1 2 do true done" in shown
        assert "exited 3" in shown and "signalled 9" in shown
        found = cli.json("ps", name)
        assert [one["exec_id"] for one in found[:4]] == [line[0] for line in lines]
        assert (found[0]["state"], found[0]["command"], found[0]["ended"]) == ("running", long, None)
        assert (found[3]["ended"], found[3]["exit_code"]) == ("exited", 3)
        assert (found[2]["ended"], found[2]["signal"]) == ("signalled", 9)
        assert found[3]["start_time"] < found[3]["end_time"]
        assert cli("ps", "--running", "-q", name) == (0, f"{process.exec_id}\n".encode(), b"")
        assert [one["exec_id"] for one in cli.json("ps", name, "-n", "2")] == [one["exec_id"] for one in found[:2]]


def test_what_waits_is_queued(cli: Cli, box: Sandbox) -> None:
    with box.start("sleep 300", concurrent=False), box.start("true", concurrent=False) as queued:
        (found,) = (one for one in cli.json("ps", "--running", box.sandbox_id) if one["exec_id"] == queued.exec_id)
        assert (found["state"], found["start_time"]) == ("queued", None)
        # A signal is for what runs, and the fix is told.
        code, out, err = cli("kill", "-s", "INT", box.sandbox_id, queued.exec_id)
        assert (code, out) == (1, b"")
        assert err.decode().endswith("[EXEC_NOT_STARTED]; `orchard kill` without --signal cancels it\n")
        assert cli("kill", box.sandbox_id, queued.exec_id)[0] == 0
        assert box.process(queued.exec_id).info().ended is ExecEnd.NOT_STARTED


def test_output_so_far_goes_where_it_was_written(cli: Cli, box: Sandbox) -> None:
    with detached(cli, box, r"printf 'out\377'; echo err >&2; sleep 300") as process:
        wait_until(lambda: process.info().output_size == 8, "its output")
        assert cli("logs", box.sandbox_id, process.exec_id) == (0, b"out\xff", b"err\n")
        assert process.info().state is ExecState.RUNNING


def test_the_exit_code_is_that_of_a_command_that_is_followed(cli: Cli, box: Sandbox) -> None:
    name = box.sandbox_id
    with detached(
        cli, box, "until test -e /tmp/go-on; do sleep 0.02; done; echo late; echo err >&2; exit 7"
    ) as process:
        with cli.start("logs", "-f", name, process.exec_id) as reader:
            box.write_file("/tmp/go-on", "")
            out, err = reader.communicate(timeout=BACKSTOP)
        assert (reader.returncode, out, err) == (7, b"late\n", b"err\n")
        # Without it, what it exited with is not asked for.
        assert cli("logs", name, process.exec_id) == (0, b"late\n", b"err\n")


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [("kill -TERM $$", 143, b""), ("sleep 300", 124, b"orchard: command 'sleep 300' timed out after ")],
)
def test_other_ends_are_told_as_exec_tells_them(cli: Cli, box: Sandbox, command: str, code: int, told: bytes) -> None:
    process = box.start(command, timeout=5.0)
    found, out, err = cli("logs", "--follow", box.sandbox_id, process.exec_id)
    assert (found, out) == (code, b"")
    assert err.startswith(told) and bool(err) == bool(told)


@pytest.mark.parametrize("options", [(), ("-f",)])
def test_output_that_is_no_longer_retained_is_counted(cli: Cli, box: Sandbox, options: tuple[str, ...]) -> None:
    process = box.start(f"head -c {WRITTEN} /dev/zero", retained_limit=RETAINED)
    wait_until(lambda: process.info().ended is not None, "its end")
    code, out, err = cli("logs", *options, box.sandbox_id, process.exec_id)
    missing = WRITTEN - len(out)
    assert 0 < len(out) <= RETAINED
    assert (code, err) == (
        0,
        f"orchard: {missing:,} bytes of the output are missing here: no longer retained\n".encode(),
    )
    # The SDK tells it with the chunk behind them, and need not read the output to know how it ended.
    assert next(iter(process.output())).missing == missing
    result = process.poll(output=False)
    assert result is not None
    assert (result.exit_code, result.output_size, result.dropped_bytes, result.chunks) == (0, WRITTEN, missing, ())


def test_a_reader_that_has_read_enough_ends_also_what_is_not_followed(cli: Cli, box: Sandbox) -> None:
    with detached(cli, box, "seq 1000000; sleep 300") as process:
        wait_until(lambda: process.info().output_size > 6_000_000, "its output")
        with cli.start("logs", box.sandbox_id, process.exec_id) as reader:
            assert reader.stdout is not None and reader.stderr is not None
            assert reader.stdout.readline() == b"1\n"
            reader.stdout.close()
            assert (reader.wait(BACKSTOP), reader.stderr.read()) == (1, b"")
        assert process.info().state is ExecState.RUNNING


@contextmanager
def following(cli: Cli, box: Sandbox, process: Process) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """`orchard logs -f` that has shown its first line, and its output."""
    with cli.start("logs", "-f", box.sandbox_id, process.exec_id) as reader:
        assert reader.stdout is not None
        try:
            assert reader.stdout.readline()
            yield reader, reader.stdout
        finally:
            reader.kill()


def assert_says_nothing_else(reader: subprocess.Popen[bytes]) -> None:
    """Than what it missed of a command that writes faster than anybody reads."""
    assert reader.stderr is not None
    told = reader.stderr.read()
    assert re.fullmatch(rb"(orchard: [0-9,]+ bytes of the output are missing here: no longer retained\n)*", told), told


@pytest.mark.parametrize("script", ["echo first; sleep 300", "yes", *["seq 3000000; sleep 300"] * 5])
def test_a_reader_that_has_read_enough_ends_it_and_not_the_command(cli: Cli, box: Sandbox, script: str) -> None:
    """Also where there is nothing to write any more, which is how one would learn of it."""
    with detached(cli, box, script) as process, following(cli, box, process) as (reader, output):
        output.close()
        assert reader.wait(BACKSTOP) == 1
        assert_says_nothing_else(reader)
        assert process.info().state is ExecState.RUNNING


@pytest.mark.parametrize("script", ["echo first; sleep 300"] * 3 + ["yes"])
def test_ctrl_c_ends_it_and_not_the_command(cli: Cli, box: Sandbox, script: str) -> None:
    """Also where nobody reads what it writes."""
    with detached(cli, box, script) as process, following(cli, box, process) as (reader, _output):
        reader.send_signal(signal.SIGINT)
        assert reader.wait(BACKSTOP) == 130
        assert_says_nothing_else(reader)
        assert process.info().state is ExecState.RUNNING


def test_output_may_go_to_a_file(cli: Cli, box: Sandbox, tmp_path: Path) -> None:
    process = box.start("echo one; sleep 0.3; echo two")
    with (tmp_path / "out").open("wb") as out:
        program = [*cli.program, "logs", "-f", box.sandbox_id, process.exec_id]
        assert subprocess.run(program, env=cli.environment, stdout=out, timeout=BACKSTOP).returncode == 0
    assert (tmp_path / "out").read_bytes() == b"one\ntwo\n"


def test_commands_are_ended_with_all_their_processes(cli: Cli, box: Sandbox) -> None:
    name = box.sandbox_id
    first, second = (box.start(f"setsid sleep 98764{n} & echo begun; sleep 98764{n}") for n in (1, 2))
    ended = box.start("exit 4")
    wait_until(lambda: has_output(first) and has_output(second) and ended.info().ended is not None, "all of them")
    code, out, err = cli("kill", name, first.exec_id, "not-known", ended.exec_id, second.exec_id, first.exec_id)
    assert code == 1
    assert out.decode().splitlines() == [
        f"{first.exec_id}: cancelled",
        f"{ended.exec_id}: had ended already: exited 4",
        f"{second.exec_id}: cancelled",
    ]
    told = "the sandbox has no exec 'not-known' [EXEC_NOT_FOUND]; `orchard ps SANDBOX` shows which there are"
    assert err.decode() == f"orchard: not-known: {told}\n"
    assert {one.wait(110).ended for one in (first, second)} == {ExecEnd.KILLED}
    assert box.exec("while pgrep -f '^sleep 98764[12]'; do sleep 0.02; done", timeout=110).ok
    # It was only asked for: what is not known is not kept from starting later.
    assert box.exec("true", exec_id="not-known").ok


@pytest.mark.parametrize("name", ["USR1", "sigusr1", "10"])
def test_a_signal_is_the_commands_own_affair(cli: Cli, box: Sandbox, name: str) -> None:
    process = box.start("trap 'echo got it; exit 9' USR1; echo ready; while :; do sleep 0.02; done")
    wait_until(lambda: has_output(process), "it to be ready")
    done = cli.json("kill", "--signal", name, box.sandbox_id, process.exec_id)
    assert done == {"signalled": [process.exec_id], "ended": [], "failed": {}}
    result = process.wait(110)
    assert result.stdout == "ready\ngot it\n"
    assert (result.ended, result.exit_code) in ((ExecEnd.EXITED, 9), (ExecEnd.KILLED, -1))
    done = cli.json("kill", "--signal", name, box.sandbox_id, process.exec_id)
    assert done == {"signalled": [], "ended": [process.exec_id], "failed": {}}


def test_an_id_that_cannot_be_one_is_told_before_anything_is_ended(cli: Cli, box: Sandbox) -> None:
    with box.start("sleep 300") as process:
        code, out, err = cli("kill", box.sandbox_id, process.exec_id, "no id")
        assert (code, out) == (2, b"")
        assert b"exec_id" in err and err.count(b"\n") == 1
        assert process.info().state is ExecState.RUNNING


@pytest.mark.parametrize(
    ("words", "code"),
    [(("logs", "SANDBOX", "none"), 1), (("logs", "-f", "SANDBOX", "none"), 125), (("kill", "SANDBOX", "none"), 1)],
)
def test_a_command_that_is_not_known_is_one_sentence(cli: Cli, box: Sandbox, words: tuple[str, ...], code: int) -> None:
    found, out, err = cli(*(box.sandbox_id if word == "SANDBOX" else word for word in words))
    assert (found, out) == (code, b"")
    assert err.decode().startswith("orchard: ")
    assert err.decode().endswith("[EXEC_NOT_FOUND]; `orchard ps SANDBOX` shows which there are\n")
    assert err.count(b"\n") == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("ps", "nowhere"), 1),
        (("logs", "nowhere", "e"), 1),
        (("logs", "-f", "nowhere", "e"), 125),
        (("kill", "nowhere", "e", "f"), 1),
    ],
)
def test_a_sandbox_that_is_not_known_is_one_sentence(cli: Cli, words: tuple[str, ...], code: int) -> None:
    found, out, err = cli(*words)
    assert (found, out) == (code, b"")
    assert err.decode().endswith("[SANDBOX_NOT_FOUND]; `orchard list --all` shows which there are\n")
    assert err.count(b"\n") == 1


def test_completion_knows_the_commands(cli: Cli, box: Sandbox) -> None:
    with box.start("sleep 300", exec_id=f"done-{secrets.token_hex(4)}") as process:
        for words in (("logs", box.sandbox_id, "done-"), ("kill", box.sandbox_id, "x", "done-")):
            assert process.exec_id in cli.completed(*words)
    assert cli.completed("logs", "nowhere", "") == []


def test_a_terminal_is_told_where_the_command_is(cli: Cli, box: Sandbox) -> None:
    """It has the id as its output, for programs, and a line for a person."""
    ours, theirs = os.openpty()
    program = [*cli.program, "exec", "-d", box.sandbox_id, "true"]
    done = subprocess.run(program, env=cli.environment, stdout=theirs, stderr=theirs, timeout=BACKSTOP)
    os.close(theirs)
    shown = os.read(ours, 65_536).decode().splitlines()
    os.close(ours)
    assert done.returncode == 0
    this = f"{box.sandbox_id} {shown[0]}"
    assert (
        shown[1] == f"orchard: it runs on; `orchard logs -f {this}` follows its output, `orchard kill {this}` ends it"
    )
    assert json.loads(cli("exec", "-d", "--json", box.sandbox_id, "true")[1])["exec_id"]
