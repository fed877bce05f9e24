"""`orchard` against the real platform."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from orchard import ExecEnd, Sandbox, SandboxClient, SandboxState

from tests.integration.client.cli import Cli
from tests.support.platform import wait_until


def test_the_life_of_a_sandbox(cli: Cli, client: SandboxClient) -> None:
    code, out, err = cli("create", "--label", "via=cli", "--env", "A=b", "--ttl", "10m")
    assert (code, err) == (0, b"")
    name = out.decode().strip()
    # It outlives the command that made it.
    assert client.get(name).info.state is SandboxState.READY
    assert cli("wait", name) == (0, b"ready\n", b"")
    assert cli("list", "--label", "via=cli", "--quiet") == (0, f"{name}\n".encode(), b"")
    assert name in cli("list")[1].decode()
    assert cli.json("get", name)["labels"] == {"via": "cli"}
    assert cli("exec", name, "echo $A")[1] == b"b\n"
    assert cli("rm", name) == (0, f"{name}\n".encode(), b"")
    assert client.attach(name).wait_ended(110).state is SandboxState.DELETED
    assert name in {found["sandbox_id"] for found in cli.json("list", "--all")}


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_sandbox_whose_id_nobody_was_told_is_deleted(cli: Cli, client: SandboxClient, form: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    label = f"told=nobody-{len(form)}"
    program = [sys.executable, "-m", "orchard._cli.main", "create", "--label", label, *form]
    done = subprocess.run(program, env=cli.environment, stdout=write, stderr=subprocess.PIPE, timeout=200)
    os.close(write)
    assert done.returncode == 1
    (made,) = client.list(labels=dict([label.split("=")]), all=True)
    assert client.attach(made.sandbox_id).wait_ended(110).reason == "REQUESTED"


def test_exec_passes_bytes_streams_and_the_exit_code(cli: Cli, sandbox: Sandbox) -> None:
    name = sandbox.sandbox_id
    assert cli("exec", name, r"printf '\000\377'; echo err >&2; exit 42") == (42, b"\x00\xff", b"err\n")
    assert cli("exec", name, "ls", "-d", "/tmp") == (0, b"/tmp\n", b"")
    assert cli("exec", "--stdin", "--workdir", "/tmp", "--env", "X=1", name, "pwd; echo $X; cat", stdin=b"in") == (
        0,
        b"/tmp\n1\nin",
        b"",
    )
    assert cli("exec", name, "kill -TERM $$")[0] == 143
    for timeout in ("500ms", "5s", "50s"):  # a busy machine needs longer to come to it
        code, out, err = cli("exec", "--timeout", timeout, name, "echo partial; sleep 600")
        if out:
            break
    assert (code, out) == (124, b"partial\n")
    assert b"timed out" in err
    assert cli("exec", name, "no-such-program", "x")[0] == 127
    code, out, err = cli("exec", "no-such-sandbox", "true")
    assert (code, out) == (125, b"")
    assert b"no-such-sandbox" in err


def test_exec_json_and_detach(cli: Cli, sandbox: Sandbox) -> None:
    code, out, _err = cli("exec", "--json", sandbox.sandbox_id, "echo out; echo err >&2; exit 5")
    document = json.loads(out)
    assert (code, document["exit_code"], document["ended"]) == (5, 5, "exited")
    assert (document["stdout"], document["stderr"]) == ("out\n", "err\n")
    code, out, _err = cli("exec", "--detach", sandbox.sandbox_id, "exit 6")
    assert code == 0
    assert sandbox.process(out.decode().strip()).wait(110).exit_code == 6


@pytest.mark.parametrize("attempt", range(5))
def test_ctrl_c_ends_the_remote_command(cli: Cli, sandbox: Sandbox, attempt: int) -> None:
    """Several times: it comes while the client is on its way from one wait to the next, and that takes microseconds."""
    process = cli.start("exec", "--concurrent", sandbox.sandbox_id, "echo $$ ready; sleep 300")
    assert process.stdout is not None
    assert process.stdout.readline().endswith(b"ready\n")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=110)
    assert process.returncode == 130
    newest = sandbox.list_execs()[0]
    assert newest.command.endswith("sleep 300")
    assert newest.ended is ExecEnd.KILLED


def test_copies(cli: Cli, sandbox: Sandbox, tmp_path: Path) -> None:
    name = sandbox.sandbox_id
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"\xffbytes")
    assert cli("cp", str(tmp_path / "folder"), f"{name}:/tmp/cli") == (0, b"", b"")
    assert cli("cp", f"{name}:/tmp/cli/file", str(tmp_path / "one")) == (0, b"", b"")
    assert (tmp_path / "one").read_bytes() == b"\xffbytes"
    assert cli.json("cp", f"{name}:/tmp/cli", str(tmp_path / "back"))
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["file"]
    code, out, err = cli("cp", f"{name}:/none", str(tmp_path / "none"))
    assert (code, out) == (1, b"")
    assert b"FILE_NOT_FOUND" in err


def test_administration(cli: Cli) -> None:
    assert cli.json("version")["platform"]["runtime"] == "process"
    made = cli.json("keys", "create", "--name", "from cli", "--ttl", "1h")
    assert made["secret"]
    key_id = made["key"]["key_id"]
    assert key_id in cli("keys", "list")[1].decode()
    assert cli("keys", "revoke", key_id) == (0, f"{key_id}\n".encode(), b"")
    assert isinstance(cli.json("usage", "--since", "1d"), list)
    code, _out, err = cli("keys", "create", "--role", "emperor")
    assert code == 2
    assert b"roles" in err
    narrow = cli.json("keys", "create", "--scope", "exec", "--scope", "files", "--ttl", "10m")["key"]
    assert (narrow["roles"], narrow["scopes"]) == ([], ["exec", "files"])
    assert "exec files" in cli("keys", "list")[1].decode()
    code, _out, err = cli("keys", "create", "--scope", "everything")
    assert code == 2
    assert b"scopes[0]: must be one of sandboxes:read" in err


def test_usage_by_label(cli: Cli) -> None:
    run = f"run-{secrets.token_hex(4)}"
    for _ in range(2):
        made = cli("create", "--label", f"run={run}", "--cpu", "2")[1].decode().strip()
        assert cli("rm", made)[0] == 0

    def found() -> list[dict[str, Any]]:
        return [one for one in cli.json("usage", "--since", "1h", "--group-by", "run") if one["label_value"] == run]

    wait_until(lambda: [one["sandboxes"] for one in found()] == [2], "what was used to be written")
    (used,) = found()
    assert used["sandbox_seconds"] > 0
    # A second of each is two of processors.
    assert used["cpu_hours"] == pytest.approx(used["sandbox_seconds"] * 2 / 3600, rel=0.01)
    lines = [line.split() for line in cli("usage", "-g", "run")[1].decode().splitlines()]
    assert ["TENANT", "RUN", "SANDBOXES"] in [line[:3] for line in lines]
    (row,) = (line for line in lines if run in line)
    assert row[:3] == ["default", run, "2"]


def test_the_audit_log(cli: Cli) -> None:
    key_id = cli.json("keys", "create", "--name", "audited")["key"]["key_id"]
    wait_until(lambda: bool(cli.json("audit", "--target", key_id)), "the entry")
    (entry,) = cli.json("audit", "--method", "CreateKey", "--target", key_id, "--since", "1h", "--limit", "5")
    assert (entry["status"], entry["client_address"]) == ("OK", "127.0.0.1")
    shown = cli("audit", "--target", key_id)[1].decode()
    assert "CreateKey" in shown
    assert key_id in shown


def test_tenants(cli: Cli) -> None:
    assert cli.json("tenants", "set", "cli-tenant", "--sandboxes", "5", "--memory", "1GiB", "--lifetime", "7d")
    # What is not given stays.
    made = cli.json("tenants", "set", "cli-tenant", "--cpu", "2.5", "--sandboxes", "unlimited")
    assert made["quota"] == {
        "sandboxes": None,
        "cpu": 2.5,
        "memory_bytes": 1 << 30,
        "creates_per_second": None,
        "maximum_lifetime": 604_800.0,
    }
    assert cli.json("tenants", "list", "--tenant", "cli-tenant") == [made]
    shown = cli("tenants", "list")[1].decode()
    assert "cli-tenant" in shown
    assert "1.0 GiB" in shown
    assert "7d" in shown
    code, _out, err = cli("tenants", "set", "cli-tenant", "--cpu", "many")
    assert code == 2
    assert b"--cpu" in err
    assert cli("tenants", "set", "cli-tenant")[0] == 2


def test_removing_what_is_not_there_fails_and_goes_on(cli: Cli) -> None:
    made = cli("create")[1].decode().strip()
    code, out, err = cli("rm", "not-there", made)
    assert (code, out) == (1, f"{made}\n".encode())
    assert b"not-there" in err


def test_completion_knows_the_sandboxes(cli: Cli, sandbox: Sandbox) -> None:
    assert sandbox.sandbox_id in cli.completed("get", "sb")
