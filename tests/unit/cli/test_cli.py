"""The command line without a platform."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated

import orchard
import pytest
import typer
from orchard import ExecEnd
from orchard._cli import output, plugins
from orchard._cli.copying import parse_place
from orchard._cli.execution import command_words, exit_code
from orchard._cli.main import app
from typer.testing import CliRunner

from tests.unit.client.test_values import result

runner = CliRunner()


def cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "orchard._cli.main", *arguments],
        env={**os.environ, "ORCHARD_CONFIG_DIR": "/nowhere", "NO_COLOR": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("sb-1:/work", ("sb-1", "/work")),
        ("sb-1:", ("sb-1", "")),
        ("sb-1:a:b", ("sb-1", "a:b")),
        ("./sb-1:x", ("", "./sb-1:x")),
        ("/tmp/a:b", ("", "/tmp/a:b")),
        ("plain", ("", "plain")),
        ("Upper:x", ("", "Upper:x")),
    ],
)
def test_places(text: str, place: tuple[str, str]) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize(
    ("ended", "code", "signal", "expected"),
    [
        (ExecEnd.EXITED, 0, 0, 0),
        (ExecEnd.EXITED, 42, 0, 42),
        (ExecEnd.SIGNALLED, -1, 15, 143),
        (ExecEnd.TIMED_OUT, -1, 0, 124),
        (ExecEnd.KILLED, -1, 15, 137),
        (ExecEnd.OUT_OF_MEMORY, -1, 9, 137),
        (ExecEnd.UNKNOWN, -1, 0, 125),
    ],
)
def test_exit_codes(ended: ExecEnd, code: int, signal: int, expected: int) -> None:
    assert exit_code(result(ended=ended, exit_code=code, signal=signal)) == expected


def test_json_of_values() -> None:
    moment = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    value = {"bytes": b"\xff", "text": b"t", "enum": ExecEnd.EXITED, "when": moment, "list": (1, None)}
    assert output.to_json(value) == {
        "bytes": {"base64": "/w=="},
        "text": "t",
        "enum": "exited",
        "when": "2026-01-02T00:00:00+00:00",
        "list": [1, None],
    }


def test_errors_are_one_sentence_with_reason_and_fix() -> None:
    text = output.describe(orchard.SandboxNotFound("there is no sandbox 'x'"))
    assert text == "there is no sandbox 'x' [SANDBOX_NOT_FOUND]; `orchard list --all` shows which there are"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (orchard.CommandNotStarted("no", reason="CWD_NOT_FOUND", metadata={"cwd": "/no"}), "cwd is --workdir"),
        (orchard.InvalidArgument.of("spec.cwd", "has a NUL byte"), "cwd is --workdir"),
        (orchard.InvalidArgument.of("spec.working_directory", "no"), "working_directory is --workdir"),
        (orchard.InvalidArgument.of("quota.creates_per_second", "no"), "creates_per_second is --create-rate"),
        (orchard.InvalidArgument.of("quota.maximum_lifetime", "no"), "maximum_lifetime is --lifetime"),
        (orchard.InvalidArgument.of("group_by_label", "no"), "group_by_label is --group-by"),
    ],
)
def test_a_field_that_has_another_name_here_is_told_by_its_option(error: orchard.OrchardError, told: str) -> None:
    assert output.describe(error).endswith(f"]; {told}")


def test_help_is_fast_and_lists_every_command() -> None:
    cli("--help")
    before = os.times()
    done = cli("--help")
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    for name in ("create", "list", "get", "exec", "cp", "rm", "wait", "usage", "keys", "version"):
        assert f" {name} " in done.stdout
    # Processor time, since other work on the machine must not fail a test.
    assert spent < 1.0, f"{spent:.2f} s"


def test_help_loads_no_client() -> None:
    code = (
        "import sys, orchard._cli.main;assert not [m for m in sys.modules if m.startswith(('grpc', 'orchard._client'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)


@pytest.mark.parametrize(
    "arguments",
    [
        ("exec",),
        ("exec", "sb"),
        ("cp", "a", "b"),
        ("cp", "sb:/a", "sb:/b"),
        ("rm",),
        ("create", "--env", "novalue"),
        ("create", "--ttl", "soon"),
        ("list", "--watch", "--json"),
        ("no-such-command",),
    ],
)
def test_wrong_usage_exits_with_2_and_says_so_on_stderr(arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("list", "--json"), 1), (("create",), 1), (("exec", "sb", "true"), 125), (("version",), 1)],
)
def test_no_platform_is_one_clear_sentence(arguments: tuple[str, ...], code: int) -> None:
    done = cli(*arguments)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "orchard up" in done.stderr


def test_an_endpoint_where_nobody_listens() -> None:
    done = cli("list", ORCHARD_ENDPOINT="127.0.0.1:1", ORCHARD_API_KEY="k")
    assert done.returncode == 1
    assert done.stderr.startswith("orchard: cannot reach Orchard at 127.0.0.1:1 (")
    assert "Traceback" not in done.stderr


# Plugins


def hello(name: Annotated[str, typer.Option(help="Whom.")] = "you") -> None:
    """Say hello."""
    typer.echo(f"hello {name}")


group = typer.Typer(help="A group.")


@group.command("one")
def one() -> None:
    """The first."""
    typer.echo("one")


@group.command("two")
def two() -> None:
    """The second."""
    raise orchard.SandboxNotFound("no such thing")


single = typer.Typer()
single.command()(hello)
BROKEN = "not callable"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "plugin_under_test", module)
    entries = [
        EntryPoint(name, f"plugin_under_test:{attribute}", plugins.GROUP)
        for name, attribute in {"hello": "hello", "group": "group", "single": "single", "broken": "BROKEN"}.items()
    ]
    entries.append(EntryPoint("absent", "no_such_module:x", plugins.GROUP))

    def entry_points(group: str, name: str = "") -> list[EntryPoint]:
        assert group == plugins.GROUP
        return [entry for entry in entries if not name or entry.name == name]

    monkeypatch.setattr(plugins, "entry_points", entry_points)


@pytest.mark.usefixtures("found")
def test_functions_and_typers_become_commands() -> None:
    assert runner.invoke(app, ["hello", "--name", "me"]).stdout == "hello me\n"
    assert runner.invoke(app, ["single"]).stdout == "hello you\n"
    assert runner.invoke(app, ["group", "one"]).stdout == "one\n"
    shown = runner.invoke(app, ["--help"]).stdout
    assert "Say hello." in shown
    assert "A group." in shown


@pytest.mark.usefixtures("found")
def test_errors_of_plugins_look_like_all_others() -> None:
    done = runner.invoke(app, ["group", "two"])
    assert done.exit_code == 1
    assert done.stderr.startswith("orchard: no such thing [SANDBOX_NOT_FOUND]")


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("name", ["absent", "broken"])
def test_a_broken_plugin_says_so_and_harms_no_other(name: str) -> None:
    done = runner.invoke(app, [name])
    assert done.exit_code == 1
    assert "cannot be loaded" in done.stderr
    assert runner.invoke(app, ["--help"]).exit_code == 0
    assert runner.invoke(app, ["hello"]).exit_code == 0


def test_completion_without_a_platform_is_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORCHARD_CONFIG_DIR", str(tmp_path))
    monkeypatch.delenv("ORCHARD_ENDPOINT", raising=False)
    assert output.complete_sandbox("sb") == []
    (tmp_path / "profile.json").write_text(json.dumps({"endpoint": "127.0.0.1:1", "api_key": "k"}))
    assert output.complete_sandbox("sb") == []


@pytest.mark.parametrize(
    ("words", "command"),
    [(["--", "ls", "/"], ["ls", "/"]), (["ls", "-l"], ["ls", "-l"]), (["ls", "--", "x"], ["ls", "--", "x"])],
)
def test_a_command_may_stand_behind_two_dashes(words: list[str], command: list[str]) -> None:
    assert command_words(words) == command


@pytest.mark.parametrize("option", ["--json", "-d", "--timeout", "--help"])
def test_an_option_behind_the_sandbox_is_told_where_it_belongs(option: str) -> None:
    done = cli("exec", "box", option, "ls")
    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    assert f"{option} stands where the command begins" in told
    # As it stands it may be typed: an example with the option alone would take the sandbox's id as its value.
    assert "options go before the sandbox, as in `orchard exec OPTIONS SANDBOX COMMAND`" in told


def test_two_images_are_one_too_many() -> None:
    done = cli("create", "one", "--image", "two")
    assert done.returncode == 2
    assert "--image" in done.stderr


@pytest.mark.parametrize("key", ["bad key ü", "line\nend"])
@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "127.0.0.1:99999", "nonsense"])
def test_nonsense_in_the_environment_is_one_sentence(endpoint: str, key: str) -> None:
    done = cli("list", ORCHARD_ENDPOINT=endpoint, ORCHARD_API_KEY=key)
    assert done.returncode == 1
    assert done.stderr.startswith("orchard: ")
    assert "Traceback" not in done.stderr
    assert key not in done.stderr


@pytest.mark.parametrize(
    ("places", "instead"),
    [(("box:/x", "-"), "orchard exec SANDBOX cat PATH"), (("-", "box:/x"), "orchard exec -i SANDBOX 'cat > PATH'")],
)
def test_standard_streams_are_no_files(places: tuple[str, str], instead: str) -> None:
    done = cli("cp", *places)
    assert done.returncode == 2
    assert f"'-' is no file: write `{instead}`" in " ".join(done.stderr.split())


INTERRUPTED = """
import sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
if sys.argv[1] == "the commands":
    import typer.main
    def get_command(app):
        raise KeyboardInterrupt
    typer.main.get_command = get_command
from orchard._cli.main import main
main()
"""


@pytest.mark.parametrize("moment", ["typer", "typer.core", "orchard._cli.judge", "orchard._cli.usage", "the commands"])
def test_ctrl_c_while_it_starts_leaves_no_traceback(moment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, moment], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_full_disk_behind_the_output_is_said_in_words() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "orchard._cli.main", "trajectories", "formats"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=100,
        )
    assert done.returncode == 1
    assert done.stderr == "orchard: no space left on device\n"
