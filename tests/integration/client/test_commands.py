"""exec, exec_stream and start against the real platform."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import threading
from typing import Any

import orchard
import pytest
from orchard import AsyncSandbox, ExecEnd, ExecState, Sandbox, SandboxClient
from orchard._client import execs


def test_result_has_both_streams_and_the_exit_code(sandbox: Sandbox) -> None:
    result = sandbox.exec("echo out; echo err >&2; exit 7")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 7)
    assert result.ended is ExecEnd.EXITED
    assert not result.ok
    assert sorted(result.output.splitlines()) == ["err", "out"]


def test_argv_is_run_without_a_shell(sandbox: Sandbox) -> None:
    assert sandbox.exec(["printf", "%s|", "a b", "$HOME", "*"]).stdout == "a b|$HOME|*|"


def test_bytes_come_through_untouched(sandbox: Sandbox) -> None:
    result = sandbox.exec(r"printf '\x00\xff\xfe\r\nno newline'")
    assert result.stdout_bytes == b"\x00\xff\xfe\r\nno newline"
    assert result.stdout == "\x00\ufffd\ufffd\r\nno newline"


def test_options_reach_the_command(sandbox: Sandbox) -> None:
    result = sandbox.exec('pwd; echo "$COLOUR"; cat', cwd="/tmp", env={"COLOUR": "bl\u00fc"}, input="from stdin")
    assert result.stdout == "/tmp\nbl\u00fc\nfrom stdin"


def test_merged_stderr_keeps_its_order(sandbox: Sandbox) -> None:
    result = sandbox.exec("for i in 1 2 3; do echo o$i; echo e$i >&2; done", merge_stderr=True)
    assert result.stdout == "o1\ne1\no2\ne2\no3\ne3\n"
    assert result.stderr == ""


def test_output_that_is_not_inline_is_complete(sandbox: Sandbox) -> None:
    result = sandbox.exec("seq 1 500000")
    expected = "".join(f"{i}\n" for i in range(1, 500001)).encode()
    assert hashlib.sha256(result.stdout_bytes).digest() == hashlib.sha256(expected).digest()
    assert result.output_size == len(expected)
    assert result.dropped_bytes == 0


@pytest.mark.parametrize("given", [b"", b"x" * (1 << 20)], ids=["none", "long"])
def test_output_of_many_times_what_is_retained_is_complete(sandbox: Sandbox, given: bytes) -> None:
    """However fast the command is and however slow this reader: it is followed from its beginning."""
    size = 24 << 20
    result = sandbox.exec(f"cat; head -c {size} /dev/zero", input=given, retained_limit=64 << 10)
    assert (len(result.stdout_bytes), result.dropped_bytes, result.ok) == (len(given) + size, 0, True)


def test_a_command_longer_than_the_first_wait_is_followed(sandbox: Sandbox) -> None:
    result = sandbox.exec("echo early; sleep 1.5; echo late")
    assert result.stdout == "early\nlate\n"


def test_timeout_is_a_result_with_the_partial_output(sandbox: Sandbox) -> None:
    for timeout in (0.5, 5.0, 50.0):  # a busy machine needs longer to come to it
        result = sandbox.exec("echo partial; sleep 600", timeout=timeout, kill_grace=0.2)
        if result.stdout:
            break
    assert (result.ended, result.exit_code, result.stdout) == (ExecEnd.TIMED_OUT, -1, "partial\n")
    assert result.timed_out


def test_timeout_raises_on_request(sandbox: Sandbox) -> None:
    for timeout in (0.5, 5.0, 50.0):  # a busy machine needs longer to come to it
        with pytest.raises(orchard.CommandTimeout) as caught:
            sandbox.exec("echo partial; sleep 600", timeout=timeout, kill_grace=0.2, raise_on_timeout=True)
        if caught.value.result.stdout:
            break
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.result.stdout == "partial\n"


def test_exit_124_and_143_are_no_timeouts(sandbox: Sandbox) -> None:
    assert sandbox.exec("exit 124", raise_on_timeout=True).exit_code == 124
    assert sandbox.exec("exit 143", raise_on_timeout=True).exit_code == 143


def test_check_raises_with_the_result(sandbox: Sandbox) -> None:
    with pytest.raises(orchard.CommandFailed, match="exited with 3: why") as caught:
        sandbox.exec("echo why >&2; exit 3", check=True)
    assert caught.value.result.exit_code == 3


def test_output_limit_ends_the_command(sandbox: Sandbox) -> None:
    result = sandbox.exec("yes", output_limit=100_000)
    assert result.ended is ExecEnd.OUTPUT_LIMIT
    with pytest.raises(orchard.OutputLimitExceeded):
        result.check()


@pytest.mark.parametrize(
    ("command", "options", "reason"),
    [
        (["no-such-program"], {}, "COMMAND_NOT_FOUND"),
        (["/etc/passwd"], {}, "COMMAND_NOT_EXECUTABLE"),
        ("true", {"cwd": "/no/such"}, "CWD_NOT_FOUND"),
        ("true", {"cwd": "/etc/passwd"}, "CWD_NOT_A_DIRECTORY"),
        ("true", {"user": "no-such-user"}, "USER_NOT_FOUND"),
    ],
)
def test_a_command_that_cannot_start_says_why(
    sandbox: Sandbox, command: str | list[str], options: dict[str, str], reason: str
) -> None:
    with pytest.raises(orchard.CommandNotStarted) as caught:
        sandbox.exec(command, **options)  # type: ignore[arg-type]
    assert caught.value.reason == reason
    assert caught.value.request_id


@pytest.mark.parametrize(
    ("command", "options", "field"),
    [
        ("a\0b", {}, "spec.shell"),
        ([], {}, "command"),
        ("true", {"env": {"A=B": "x"}}, "spec.env"),
        ("true", {"timeout": -1}, "timeout"),
        ("true", {"timeout": 1e9}, "spec.timeout"),
    ],
)
def test_bad_input_names_the_field(
    sandbox: Sandbox, command: str | list[str], options: dict[str, object], field: str
) -> None:
    with pytest.raises(orchard.InvalidArgument) as caught:
        sandbox.exec(command, **options)  # type: ignore[arg-type]
    assert caught.value.violations[0].field.startswith(field)


def test_an_option_that_does_not_exist_is_a_type_error(sandbox: Sandbox) -> None:
    with pytest.raises(TypeError, match="tiemout"):
        sandbox.exec("true", tiemout=3)  # type: ignore[call-arg]


def test_a_repeated_exec_id_runs_once(sandbox: Sandbox) -> None:
    first = sandbox.exec("echo $RANDOM$RANDOM$RANDOM", exec_id="once-1")
    assert sandbox.exec("echo $RANDOM$RANDOM$RANDOM", exec_id="once-1").stdout == first.stdout
    with pytest.raises(orchard.AlreadyExists):
        sandbox.exec("echo other", exec_id="once-1")


def test_unknown_sandbox(client: SandboxClient) -> None:
    with pytest.raises(orchard.SandboxNotFound):
        client.attach("no-such-sandbox").exec("true")


def test_ended_sandbox_is_lost(client: SandboxClient) -> None:
    with client.create() as sandbox:
        sandbox.delete()
        sandbox.wait_ended(110)
        with pytest.raises((orchard.SandboxLost, orchard.SandboxNotFound)):
            sandbox.exec("true")


# exec_stream


def test_stream_yields_while_the_command_runs(sandbox: Sandbox) -> None:
    stream = sandbox.exec_stream("echo one; until test -e /tmp/go; do sleep 0.02; done; echo two >&2; exit 4")
    seen = []
    for chunk in stream:
        seen.append((chunk.stream, chunk.text))
        if chunk.text == "one\n":
            sandbox.write_file("/tmp/go", "")
    assert seen == [("stdout", "one\n"), ("stderr", "two\n")]
    assert stream.result.exit_code == 4


def test_characters_split_over_chunks_come_whole(sandbox: Sandbox) -> None:
    stream = sandbox.exec_stream(r"printf '\xe2\x82'; sleep 0.3; printf '\xac|'; printf '\xf0\x9f'")
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == "\u20ac|\ufffd"
    assert b"".join(chunk.data for chunk in chunks) == b"\xe2\x82\xac|\xf0\x9f"


def test_leaving_a_stream_ends_the_command(sandbox: Sandbox) -> None:
    stream = sandbox.exec_stream("echo started; sleep 300", concurrent=True)
    for _chunk in stream:
        break
    ended = sandbox.process(stream.exec_id).wait(110)
    assert ended.ended is ExecEnd.KILLED


def test_a_stream_can_be_iterated_once(sandbox: Sandbox) -> None:
    stream = sandbox.exec_stream("true")
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="once"):
        list(stream)


async def test_leaving_an_async_stream_ends_the_command(asandbox: AsyncSandbox) -> None:
    stream = asandbox.exec_stream("echo started; sleep 300", concurrent=True)
    async for _chunk in stream:
        break
    assert (await asandbox.process(stream.exec_id).wait(110)).ended is ExecEnd.KILLED


# start


def test_process_runs_beside_others_and_is_waited_for(sandbox: Sandbox) -> None:
    process = sandbox.start("echo before; until test -e /tmp/stop; do sleep 0.02; done; echo after; exit 5")
    assert process.pid > 0
    assert process.poll() is None
    assert sandbox.exec("echo beside").stdout == "beside\n"
    with pytest.raises(orchard.DeadlineExceeded):
        process.wait(0.1)
    sandbox.write_file("/tmp/stop", "")
    result = process.wait(110)
    assert (result.exit_code, result.stdout) == (5, "before\nafter\n")
    assert process.poll() == result
    assert b"".join(chunk.data for chunk in process) == b"before\nafter\n"
    assert process.info().state is ExecState.ENDED


def test_process_gets_signals(sandbox: Sandbox) -> None:
    process = sandbox.start("trap 'echo got it; exit 9' USR1; echo ready; while :; do sleep 0.02; done")
    for chunk in process:
        if chunk.text == "ready\n":
            process.signal(signal.SIGUSR1, leader_only=True)
    assert process.wait(110).exit_code == 9


def test_kill_reaches_the_whole_tree(sandbox: Sandbox) -> None:
    process = sandbox.start("setsid sleep 987654 & sleep 987654")
    process.kill()
    assert process.wait(110).ended in (ExecEnd.SIGNALLED, ExecEnd.KILLED)
    # The end is told after a bounded time, also where a busy machine has not caught the last of them by then.
    assert sandbox.exec("while pgrep -f '^sleep 98765[4]'; do sleep 0.02; done", timeout=110).ok


def test_leaving_a_process_block_cancels_it(sandbox: Sandbox) -> None:
    with sandbox.start("sleep 300") as process:
        pass
    assert process.wait(110).ended is ExecEnd.KILLED


def test_list_execs_has_what_ran(sandbox: Sandbox) -> None:
    sandbox.exec("exit 2", exec_id="listed-1")
    found = next(e for e in sandbox.list_execs() if e.exec_id == "listed-1")
    assert (found.state, found.exit_code, found.command) == (ExecState.ENDED, 2, "exit 2")


async def test_whoever_takes_long_over_output_stays_attached(
    asandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off because nothing is taken, the command would have nobody, and be ended as an orphan."""
    watchdogs: list[execs._Watchdog] = []

    class Watchdog(execs._Watchdog):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            watchdogs.append(self)

    monkeypatch.setattr(execs, "_Watchdog", Watchdog)
    seen = ""
    command = "echo one; until test -e /tmp/taken; do sleep 0.02; done; echo two"
    async for chunk in asandbox.exec_stream(command, exec_id="unread-1", concurrent=True):
        seen += chunk.text
        if seen == "one\n":
            await asandbox.write_file("/tmp/taken", "")
            assert (await asandbox.process("unread-1").wait(110)).ok
            with monkeypatch.context() as patch:
                patch.setattr(execs, "_STALL_SECONDS", 0.0)
                watchdogs[0]._timer.cancel()
                watchdogs[0]._look()
            assert watchdogs[0]._task is None
    assert seen == "one\ntwo\n"


# Sync and async, threads and loops


async def test_the_synchronous_client_works_within_a_running_loop(sandbox: Sandbox) -> None:
    assert sandbox.exec("echo in a notebook").stdout == "in a notebook\n"


def test_many_threads_share_a_client(sandbox: Sandbox) -> None:
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(sandbox.exec(f"echo {i}", concurrent=True).stdout))
        for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(110)
    assert sorted(results) == sorted(f"{i}\n" for i in range(20))


async def test_cancelling_a_task_ends_its_command(asandbox: AsyncSandbox) -> None:
    task = asyncio.create_task(asandbox.exec("touch /tmp/runs; sleep 300", exec_id="cancelled-1", concurrent=True))
    while not await asandbox.exists("/tmp/runs"):
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await asandbox.process("cancelled-1").wait(110)).ended is ExecEnd.KILLED


async def test_cancelling_before_the_command_arrives_keeps_it_from_running(asandbox: AsyncSandbox) -> None:
    task = asyncio.create_task(asandbox.exec("sleep 600; touch /tmp/never", exec_id="cancelled-2", concurrent=True))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    try:
        ended = (await asandbox.process("cancelled-2").wait(110)).ended
    except (orchard.CommandNotStarted, orchard.ExecNotFound):
        ended = ExecEnd.NOT_STARTED
    assert ended in (ExecEnd.KILLED, ExecEnd.NOT_STARTED)
    assert not await asandbox.exists("/tmp/never")
