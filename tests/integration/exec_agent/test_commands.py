"""What a command gets, and what comes back of it."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import pytest
from orchard.exec.v1 import exec_pb2, exec_service_pb2

from tests.integration.exec_agent.conftest import AgentProcess, Client, Output, new_id, problem, spec

KIB = 1 << 10


def result_of(output: Output) -> exec_pb2.ExecResult:
    assert output.result is not None
    return output.result


async def test_a_short_command_is_one_unary_call(client: Client) -> None:
    response = await client.start(spec(shell="echo out; echo err >&2"))
    assert response.output_complete
    assert response.exec.state == exec_pb2.EXEC_STATE_ENDED
    assert response.exec.result.ended == exec_pb2.EXEC_END_EXITED
    assert response.exec.output_bytes == response.exec.result.output_bytes == 8
    assert response.exec.create_time.ToNanoseconds() <= response.exec.result.start_time.ToNanoseconds()
    assert response.exec.result.start_time.ToNanoseconds() <= response.exec.result.end_time.ToNanoseconds()
    assert response.exec.pid > 0
    assert response.exec.command == "echo out; echo err >&2"


@pytest.mark.parametrize("code", [0, 1, 2, 124, 126, 127, 137, 143, 255])
async def test_every_exit_code_is_the_commands_own(client: Client, code: int) -> None:
    result = result_of(await client.run(spec(shell=f"exit {code}")))
    assert (result.ended, result.exit_code, result.signal) == (exec_pb2.EXEC_END_EXITED, code, 0)


async def test_exit_codes_are_not_stolen_when_many_end_at_once(client: Client) -> None:
    import asyncio

    async def one(code: int) -> tuple[int, int]:
        return code, result_of(await client.run(spec(shell=f"exit {code}", concurrent=True))).exit_code

    for wanted, found in await asyncio.gather(*(one(code % 256) for code in range(200))):
        assert found == wanted


async def test_streams_are_apart_unless_merged(client: Client) -> None:
    apart = await client.run(spec(shell="printf a; printf b >&2; printf c"))
    assert (apart.stdout, apart.stderr) == (b"ac", b"b")
    merged = await client.run(spec(shell="for i in 1 2 3 4; do printf o$i; printf e$i >&2; done", merge_stderr=True))
    assert (merged.stdout, merged.stderr) == (b"o1e1o2e2o3e3o4e4", b"")


async def test_argv_is_run_as_it_is(client: Client) -> None:
    output = await client.run(spec("printf", "%s|", "a b", "$HOME", "*", "", "ä"))
    assert output.stdout == "a b|$HOME|*||ä|".encode()


async def test_the_environment_is_the_configured_one_and_the_commands_own(client: Client) -> None:
    output = await client.run(spec("env", env={"MINE": "1", "FROM_CONFIG": "replaced", "EMPTY": "", "LINES_": "a\nb"}))
    lines = output.stdout.decode().split("\n")
    assert "MINE=1" in lines
    assert "FROM_CONFIG=replaced" in lines
    assert "EMPTY=" in lines
    assert b"LINES_=a\nb\n" in output.stdout
    assert b"AGENT_PRIVATE" not in output.stdout
    assert b"ORCHARD" not in output.stdout
    assert b"GRPC" not in output.stdout


async def test_the_process_state_is_the_default_one(client: Client) -> None:
    script = (
        "import os, signal, resource, sys;"
        "print(os.umask(0o22), resource.getrlimit(resource.RLIMIT_CORE), os.getsid(0) == os.getpid());"
        "print(sorted(int(f) for f in os.listdir('/proc/self/fd'))[:4]);"
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith(('SigBlk', 'ShdPnd'))]);"
        "print(open('/proc/self/comm').read().strip())"
    )
    output = await client.run(spec("/usr/bin/python3", "-c", script))
    umask, files, masks, _name = output.stdout.decode().splitlines()
    assert umask == f"{0o22} (0, 0) True"
    assert files == "[0, 1, 2, 3]", "3 is the listing itself"
    assert masks == f"['{0:016x}', '{0:016x}']"
    ignored = await client.run(spec("grep", "SigIgn", "/proc/self/status"))
    assert ignored.stdout.split()[1] == b"0" * 16


async def test_sigpipe_ends_a_writer(client: Client) -> None:
    output = await client.run(spec("bash", "-c", "yes | head -n 1; echo ${PIPESTATUS[0]}"))
    assert output.stdout == b"y\n141\n"
    assert output.stderr == b""


async def test_standard_input_is_empty_or_what_was_given(client: Client) -> None:
    assert (await client.run(spec("cat"))).stdout == b""
    given = bytes(range(256)) * 2048
    assert (await client.stream(spec("cat", stdin=given))).stdout == given
    # A command that does not read its input does not hang, and neither does one that reads part of it.
    assert result_of(await client.run(spec("true", stdin=given))).exit_code == 0
    assert (await client.run(spec("head", "-c", "3", stdin=given))).stdout == given[:3]


async def test_a_heredoc_is_no_trouble(client: Client) -> None:
    output = await client.run(spec(shell="cat <<'EOF'\n$not 'quoted'\nEOF\necho after"))
    assert output.stdout == b"$not 'quoted'\nafter\n"


async def test_a_login_shell_reads_the_profile(client: Client, work: Path) -> None:
    (work / ".bash_profile").write_text("export FROM_PROFILE=yes\n")
    env = {"HOME": str(work)}
    assert (await client.run(spec(shell="echo $FROM_PROFILE", env=env))).stdout == b"\n"
    assert (await client.run(spec(shell="echo $FROM_PROFILE", env=env, login_shell=True))).stdout == b"yes\n"


@pytest.mark.parametrize("size", [130_000, 200_000, 1 << 20])
async def test_a_long_shell_text_runs_whole(client: Client, size: int) -> None:
    ending = "\necho $# $0 ${10-unset}; exit 7"
    text = "x='" + "ä" * ((size - len(ending) - 20) // 2) + "'; echo ${#x}" + ending
    output = await client.run(spec(shell=text, env={"LANG": "C.UTF-8"}))
    assert output.stdout.decode().split() == [str((size - len(ending) - 20) // 2), "0", "bash", "unset"]
    assert result_of(output).exit_code == 7


async def test_a_mebibyte_of_arguments_and_one_of_environment(client: Client) -> None:
    argv = ["a" * 100_000] * 10 + ["b" * 47_000]
    env = {f"V{number}": "v" * 100_000 for number in range(10)} | {"LAST": "v" * 47_000}
    script = (
        "import sys, os; print(sum(map(len, sys.argv[1:])), sum(len(v) for v in os.environ.values() if v[0] == 'v'))"
    )
    output = await client.run(spec("/usr/bin/python3", "-c", script, *argv, env=env))
    assert output.stdout.split() == [b"1047000", b"1047000"]


async def test_many_small_arguments(client: Client) -> None:
    output = await client.run(spec("/usr/bin/python3", "-c", "import sys; print(len(sys.argv))", *["1"] * 65_533))
    assert output.stdout == b"65534\n"


async def test_the_stack_limit_is_left_alone_for_ordinary_commands(client: Client) -> None:
    import resource

    output = await client.run(spec(shell="ulimit -Ss"))
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    assert output.stdout.strip() == (b"unlimited" if soft == resource.RLIM_INFINITY else str(soft // KIB).encode())


async def test_working_directories(client: Client, work: Path, shared_agent: AgentProcess) -> None:
    assert (await client.run(spec("pwd"))).stdout.decode() == f"{shared_agent.work}\n"
    assert (await client.run(spec("pwd", cwd=work.name))).stdout.decode() == f"{work}\n"
    assert (await client.run(spec("/bin/pwd", cwd="/usr/bin/.."))).stdout == b"/usr\n"


async def test_a_deleted_working_directory_breaks_one_command_alone(client: Client, work: Path) -> None:
    gone = work / "gone"
    gone.mkdir()
    await client.run(spec(shell=f"rmdir {gone}", cwd=str(gone)))
    with problem() as found:
        await client.start(spec("true", cwd=str(gone)))
    assert found[0].reason == "CWD_NOT_FOUND"
    assert result_of(await client.run(spec("true"))).exit_code == 0


@pytest.mark.root
async def test_commands_run_as_another_user(client: Client) -> None:
    script = "id -un; id -G; grep CapEff /proc/self/status; echo $HOME"
    by_name = await client.run(spec(shell=script, user="nobody"))
    name, groups, capabilities, home = by_name.stdout.decode().splitlines()
    assert (name, groups, capabilities.split()[1]) == ("nobody", "65534", "0" * 16)
    assert home != "/root"
    by_number = await client.run(spec(shell="id -u; id -g; id -G", user="4321:1234"))
    assert by_number.stdout == b"4321\n1234\n1234\n"


async def test_usage_is_measured(client: Client) -> None:
    script = "x = bytearray(64 << 20)\nimport time\nwhile time.process_time() < 0.2: pass"
    result = result_of(await client.run(spec("/usr/bin/python3", "-c", script)))
    assert result.user_cpu.ToNanoseconds() + result.system_cpu.ToNanoseconds() >= 200_000_000
    assert 64 << 20 < result.peak_memory_bytes < 1 << 30


def write(path: Path, content: bytes, mode: int = 0o755) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


async def start_problem(client: Client, command: exec_pb2.ExecSpec, reason: str, *mentions: str) -> None:
    exec_id = new_id()
    for _ in range(2):  # a repeat, because the first answer was lost, gets the same one
        with problem() as found:
            await client.start(command, exec_id=exec_id)
        assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
        for mention in mentions:
            assert mention in found[0].message
    with problem() as found:
        await client.stream(command, exec_id=exec_id)
    assert found[0].reason == reason
    ended = await client.wait(exec_id)
    assert ended.result.ended == exec_pb2.EXEC_END_NOT_STARTED
    assert ended.result.message == found[0].message


async def test_what_cannot_start_says_why(client: Client, work: Path) -> None:
    plain = write(work / "plain", b"x", 0o644)
    text = write(work / "text", b"echo no interpreter\n")
    script = write(work / "script", b"#!/nowhere/bin/python\n")
    await start_problem(client, spec("true", cwd="/nowhere"), "CWD_NOT_FOUND", "/nowhere", "in cwd")
    await start_problem(client, spec("true", cwd="missing"), "CWD_NOT_FOUND", "/missing")
    await start_problem(client, spec("true", cwd=plain), "CWD_NOT_A_DIRECTORY", plain, "in cwd")
    await start_problem(client, spec("no-such-program"), "COMMAND_NOT_FOUND", "no-such-program", "PATH")
    await start_problem(client, spec("/nowhere/x"), "COMMAND_NOT_FOUND", "/nowhere/x")
    await start_problem(client, spec(f"{plain}/below"), "COMMAND_NOT_FOUND")
    await start_problem(client, spec(plain), "COMMAND_NOT_EXECUTABLE", "ermission")
    await start_problem(client, spec(str(work)), "COMMAND_NOT_EXECUTABLE")
    await start_problem(client, spec(text), "COMMAND_NOT_EXECUTABLE", "#!")
    await start_problem(client, spec(script), "COMMAND_NOT_EXECUTABLE", "interpreter")
    # An error travels in metadata of a few kilobytes, whatever it is about.
    await start_problem(client, spec("x" * 100_000), "COMMAND_NOT_FOUND", "xxx...")
    await start_problem(client, spec("true", cwd="/".join(["ä" * 50] * 40)), "CWD_NOT_FOUND", "ää")
    await start_problem(client, spec("true", user="nobody-here"), "USER_NOT_FOUND", "nobody-here")
    await start_problem(client, spec("true", user="nobody:no-group"), "USER_NOT_FOUND", "no-group")


@pytest.mark.root
async def test_a_directory_that_the_user_may_not_enter(client: Client, work: Path) -> None:
    (work / "private").mkdir(mode=0o700)
    await start_problem(client, spec("true", cwd=f"{work}/private", user="nobody"), "CWD_NOT_ACCESSIBLE", "in cwd")


async def test_path_is_the_commands_own(client: Client, work: Path) -> None:
    write(work / "tool", b"#!/bin/sh\necho found\n")
    write(work / "ls", b"not for execution", 0o644)
    env = {"PATH": f"{work}:/usr/bin:/bin"}
    assert (await client.run(spec("tool", env=env))).stdout == b"found\n"
    # One that may not be run is passed over, as by execvp.
    assert result_of(await client.run(spec("ls", "/", env=env))).exit_code == 0
    await start_problem(client, spec("tool"), "COMMAND_NOT_FOUND")


@pytest.mark.parametrize(
    ("field", "command"),
    [
        ("spec.argv", {}),
        ("spec.argv.args", {"argv": exec_pb2.Argv()}),
        ("spec.argv.args[0]", {"argv": exec_pb2.Argv(args=[""])}),
        ("spec.argv.args[1]", {"argv": exec_pb2.Argv(args=["a", "b\0c"])}),
        ("spec.argv.args[2]", {"argv": exec_pb2.Argv(args=["a", "b", "x" * (128 << 10)])}),
        ("spec.argv.args", {"argv": exec_pb2.Argv(args=["x" * 1000] * 1200)}),
        ("spec.argv.args", {"argv": exec_pb2.Argv(args=["x"] * 65_537)}),
        ("spec.shell", {"shell": "x" * ((1 << 20) + 1)}),
        ("spec.shell", {"shell": "a\0b"}),
        ("spec.shell", {"shell": ""}),
        ("spec.login_shell", {"argv": exec_pb2.Argv(args=["a"]), "login_shell": True}),
        ("spec.env['A=B']", {"shell": "true", "env": {"A=B": "c"}}),
        ("spec.env['A']", {"shell": "true", "env": {"A": "b\0"}}),
        ("spec.env['A']", {"shell": "true", "env": {"A": "x" * (128 << 10)}}),
        ("spec.env", {"shell": "true", "env": {f"A{n}": "x" * 1200 for n in range(900)}}),
        ("spec.cwd", {"shell": "true", "cwd": "x" * 4097}),
        ("spec.cwd", {"shell": "true", "cwd": "a\0"}),
        ("spec.user", {"shell": "true", "user": "x" * 257}),
        ("spec.stdin", {"shell": "true", "stdin": b"x" * ((512 << 10) + 1)}),
        ("spec.output_limit_bytes", {"shell": "true", "output_limit_bytes": -1}),
        ("spec.retained_limit_bytes", {"shell": "true", "retained_limit_bytes": 1000}),
        ("spec.retained_limit_bytes", {"shell": "true", "retained_limit_bytes": (1 << 30) + 1}),
    ],
)
async def test_bad_specs_name_the_field(client: Client, field: str, command: dict[str, object]) -> None:
    with problem() as found:
        await client.start(exec_pb2.ExecSpec(**command))  # type: ignore[arg-type]
    assert found[0].code == grpc.StatusCode.INVALID_ARGUMENT
    assert found[0].fields == (field,)


@pytest.mark.parametrize("name", ["timeout", "queue_timeout", "orphan_timeout", "kill_grace"])
@pytest.mark.parametrize("seconds", [-1.0, 31 * 86_400.0])
async def test_absurd_durations_name_the_field(client: Client, name: str, seconds: float) -> None:
    with problem() as found:
        await client.start(spec("true", **{name: seconds}))  # type: ignore[arg-type]
    assert found[0].fields == (f"spec.{name}",)


@pytest.mark.parametrize("exec_id", ["", "..", "a b", "x" * 65, "ä", "start"])
async def test_bad_exec_ids(client: Client, exec_id: str) -> None:
    with problem() as found:
        await client.stub.StartExec(
            exec_service_pb2.StartExecRequest(sandbox_id="box", exec_id=exec_id, spec=spec("true")),
            metadata=client.metadata,
        )
    assert found[0].fields == ("exec_id",)


async def test_both_timeouts_and_all_faults_at_once(client: Client) -> None:
    with problem() as found:
        await client.start(spec("true", timeout=1, no_timeout=True, cwd="a\0", output_limit_bytes=-1))
    assert set(found[0].fields) == {"spec.no_timeout", "spec.cwd", "spec.output_limit_bytes"}


async def test_a_command_line_for_people_is_cut(client: Client) -> None:
    response = await client.start(spec("echo", "x" * 1000))
    assert len(response.exec.command) == 256
    assert response.exec.command.endswith("...")


async def test_the_agent_leaves_no_descriptor_behind(client: Client, shared_agent: AgentProcess) -> None:
    folder = Path(f"/proc/{shared_agent.process.pid}/fd")
    for command in (spec("true"), spec(shell="head -c 100000 /dev/zero"), spec("cat", stdin=b"x")):
        await client.run(command)
    before = len(list(folder.iterdir()))
    for _ in range(20):
        await client.run(spec("true"))
        with problem():
            await client.start(spec("no-such-program"))
        await client.run(spec("true", stdin=b"x" * 100_000))
    end = time.monotonic() + 110
    while len(list(folder.iterdir())) > before:
        assert time.monotonic() < end
        time.sleep(0.005)
