"""`orchard shell` and `orchard exec -it` on a real terminal, and `orchard exec -i` in a pipe."""

from __future__ import annotations

import array
import fcntl
import hashlib
import os
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from orchard import ExecEnd, Sandbox

from tests.integration.client.proxy import Proxy
from tests.support.local_terminal import BACKSTOP, LocalTerminal
from tests.support.platform import PlatformProcess, wait_until

ORCHARD = str(Path(sys.executable).with_name("orchard"))
READY = b"ready> "
MIB = 1 << 20
Terminals = Callable[..., LocalTerminal]
# Draws its window anew with each key and each new size.
FULL_SCREEN = """
import curses

def main(screen):
    told = "begun"
    while True:
        screen.clear()
        rows, columns = screen.getmaxyx()
        screen.addstr(rows - 1, 0, f"{rows} by {columns}: {told}", curses.A_REVERSE)
        key = screen.getch()
        if key == ord("q"):
            return
        told = {curses.KEY_UP: "up", curses.KEY_F3: "f3", curses.KEY_RESIZE: "resized", 3: "ctrl-c"}.get(key, "other")

curses.wrapper(lambda screen: (curses.raw(), main(screen)))
"""


@pytest.fixture
def terminal(platform: PlatformProcess) -> Iterator[Terminals]:
    """Runs orchard on a terminal of its own."""
    with ExitStack() as stack:

        def start(*arguments: str, **options: object) -> LocalTerminal:
            environment = {**platform.client_environment(), **options.pop("environment", {})}  # type: ignore[dict-item]
            return stack.enter_context(LocalTerminal(ORCHARD, *arguments, environment=environment, **options))  # type: ignore[arg-type]

        yield start


def shell(terminal: Terminals, sandbox: Sandbox, **options: object) -> LocalTerminal:
    """A shell whose prompt is known."""
    window = terminal("exec", "-it", "--env", f"PS1={READY.decode()}", sandbox.sandbox_id, "bash", "--norc", **options)
    window.until(READY)
    return window


def test_a_shell_is_like_one_here(terminal: Terminals, sandbox: Sandbox) -> None:
    window = terminal(
        "shell", sandbox.sandbox_id, "--workdir", "/tmp", "--env", "X=y", rows=31, columns=97, term="vt220"
    )
    window.type(b"echo $((6*7)) $PWD $X $TERM $(stty size); printf '\\033[31mred\\033[0m\\n'\r")
    window.until(b"42 /tmp y vt220 31 97\r\n")
    window.until(b"\x1b[31mred\x1b[0m")
    window.type(b"exit 7\r")
    assert window.exit() == 7
    assert window.is_as_before


def test_keys_go_inside_one_by_one(terminal: Terminals, sandbox: Sandbox) -> None:
    window = shell(terminal, sandbox)
    assert not window.is_as_before, "keys are not kept until Enter"
    window.type(b"read -rsn2 keys; printf 'k''eys=%q\\n' \"$keys\"\r")
    at = window.until(b"\n", window.until(READY))
    window.type(b"~")
    window.type(b"x")
    at = window.until(b"keys=\\~x\r\n", at)
    at = window.until(READY, at)
    window.type(b"sh -c 'echo run''ning; exec sleep 1000'\r")
    # Only once it runs: bash itself may exit when Ctrl-C meets it between two commands.
    at = window.until(b"running\r\n", at)
    window.type(b"\x03")
    at = window.until(READY, at)
    window.type(b"sh -c 'kill -STOP $$'; echo st''opped\r")
    at = window.until(b"stopped\r\n", at)
    at = window.until(READY, at)
    window.type(b"kill %1; fg\r")
    at = window.until(b"Terminated", at)
    # Typed before the prompt it would be the end of nothing.
    window.until(READY, at)
    window.type(b"\x04")
    window.exit()
    assert window.is_as_before


def test_the_window_may_change(terminal: Terminals, sandbox: Sandbox) -> None:
    script = "trap 'stty size' WINCH; echo waiting; while :; do sleep 0.01; done"
    window = terminal("exec", "-it", sandbox.sandbox_id, "--", "sh", "-c", script)
    window.until(b"waiting\r\n")
    window.resize(44, 132)
    window.until(b"44 132\r\n")
    window.process.terminate()
    window.exit()


def test_a_program_that_takes_the_whole_screen_is_at_home(terminal: Terminals, sandbox: Sandbox) -> None:
    window = terminal("exec", "-it", sandbox.sandbox_id, "--", "python3", "-c", FULL_SCREEN, rows=24, columns=80)
    at = window.until(b"24 by 80: begun", window.until(b"\x1b[?1049h"))  # the other screen (ctlseqs, private mode 1049)
    # As keys come while an application asked for them (terminfo: kcuu1, kf3).
    for keys, told in ((b"\x1bOA", b"up"), (b"\x1bOR", b"f3"), (b"\x03", b"ctrl-c")):
        window.type(keys)
        at = window.until(b"24 by 80: " + told, at)
    window.resize(50, 132)
    at = window.until(b"50 by 132: resized", at)
    window.type(b"q")
    window.until(b"\x1b[?1049l", at)
    assert window.exit() == 0
    assert window.is_as_before


def test_exit_codes_are_passed_on(terminal: Terminals, sandbox: Sandbox) -> None:
    window = terminal("exec", "-it", sandbox.sandbox_id, "--", "sh", "-c", "exit 9")
    assert window.exit() == 9
    window = terminal("exec", "-t", sandbox.sandbox_id, "tty; kill -9 $$")
    assert window.exit() == 137
    assert b"/dev/pts/" in window.seen
    assert terminal("exec", "-it", sandbox.sandbox_id, "--", "no-such-program").exit() == 127


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_restores_the_terminal_and_ends_the_command(
    terminal: Terminals, sandbox: Sandbox, number: signal.Signals
) -> None:
    mark = f"/tmp/pid-{number}"
    window = terminal("exec", "-it", sandbox.sandbox_id, f"echo $$ >{mark}; echo run''ning; exec sleep 1000")
    window.until(b"running")
    window.process.send_signal(number)
    assert window.exit() == 128 + number
    assert window.is_as_before
    assert sandbox.exec(f"while kill -0 $(cat {mark}); do sleep 0.02; done", timeout=110).ok


def test_it_can_be_paused(terminal: Terminals, sandbox: Sandbox) -> None:
    window = shell(terminal, sandbox)
    window.process.send_signal(signal.SIGTSTP)
    wait_until(lambda: b"T (stopped)" in Path(f"/proc/{window.process.pid}/status").read_bytes(), "it stops")
    assert window.is_as_before
    window.process.send_signal(signal.SIGCONT)
    window.type(b"echo go''es-on; exit\r")
    window.until(b"goes-on")
    assert window.exit() == 0


def test_who_leaves_can_come_back(terminal: Terminals, sandbox: Sandbox) -> None:
    window = shell(terminal, sandbox)
    window.type(b"x=kept\r")
    window.until(READY, window.until(b"x=kept\r\n"))
    window.type(b"~.")
    assert window.exit() == 0
    assert window.is_as_before
    found = re.search(rb"orchard shell \S+ --attach (\S+)`", window.seen)
    assert found is not None, window.seen
    again = terminal("shell", sandbox.sandbox_id, "--attach", found[1].decode())
    again.type(b"echo still-$x; exit 5\r")
    again.until(b"still-kept")
    assert again.exit() == 5


def test_a_lost_connection_loses_no_byte(
    terminal: Terminals, sandbox: Sandbox, proxy: Proxy, platform: PlatformProcess
) -> None:
    through = {"ORCHARD_ENDPOINT": proxy.endpoint, "ORCHARD_API_KEY": platform.api_key}
    window = shell(terminal, sandbox, environment=through)
    window.type(b"for i in $(seq 300); do echo line-$i.; sleep 0.01; done; read x; echo got-$x\r")
    for number in (50, 120, 200):
        window.until(b"line-%d." % number)
        proxy.cut()
    at = window.until(b"line-300.\r\n")
    proxy.cut()
    window.type(b"typed\r")
    window.until(b"got-typed", at)
    window.type(b"exit 3\r")
    assert window.exit() == 3
    assert b"orchard: connection lost" in window.seen
    shown = re.sub(rb"\x1b\[2[23];2t|\x1b\]2;[^\x07]*\x07", b"", window.seen)  # the window's title
    assert re.findall(rb"line-(\d+)\.\r\n", shown) == [b"%d" % n for n in range(1, 301)]
    assert proxy.cuts == 4


def piped(platform: PlatformProcess, *arguments: str, data: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [ORCHARD, *arguments], env=platform.client_environment(), input=data, capture_output=True, timeout=BACKSTOP
    )


def test_a_pipe_goes_in_and_comes_out(platform: PlatformProcess, sandbox: Sandbox) -> None:
    data = os.urandom(4 * MIB)
    counted = piped(platform, "exec", "-i", sandbox.sandbox_id, "--", "wc", "-c", data=data)
    assert (counted.returncode, counted.stdout, counted.stderr) == (0, b"%d\n" % len(data), b"")
    through = piped(platform, "exec", "-i", sandbox.sandbox_id, "cat; echo err >&2; exit 4", data=data)
    assert (through.returncode, through.stderr) == (4, b"err\n")
    assert hashlib.sha256(through.stdout).digest() == hashlib.sha256(data).digest()
    unread = piped(platform, "exec", "-i", sandbox.sandbox_id, "--", "true", data=data)
    assert (unread.returncode, unread.stdout, unread.stderr) == (0, b"", b"")


def test_input_that_stays_open_does_not_hold_up_the_end(platform: PlatformProcess, sandbox: Sandbox) -> None:
    process = subprocess.Popen(
        [ORCHARD, "exec", "-i", sandbox.sandbox_id, "read line; echo got-$line"],
        env=platform.client_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"word\n")
    process.stdin.flush()
    assert process.wait(BACKSTOP) == 0
    assert process.stdout.read() == b"got-word\n"
    process.stdin.close()
    process.stdout.close()


def test_ctrl_c_ends_a_piped_command(platform: PlatformProcess, sandbox: Sandbox) -> None:
    process = subprocess.Popen(
        [ORCHARD, "exec", "-i", sandbox.sandbox_id, "echo $$; exec sleep 1000"],
        env=platform.client_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    assert process.wait(BACKSTOP) == 130
    process.stdin.close()
    process.stdout.close()
    (exec_id,) = (one.exec_id for one in sandbox.list_execs() if one.pid == pid)
    assert sandbox.process(exec_id).wait().ended is ExecEnd.KILLED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_though_nobody_reads_what_it_writes(
    platform: PlatformProcess, sandbox: Sandbox, number: signal.Signals
) -> None:
    arguments = (ORCHARD, "exec", "-i", sandbox.sandbox_id, "yes")
    environment = platform.client_environment()
    with subprocess.Popen(arguments, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        unread, room = array.array("i", (0,)), fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ)

        def is_full() -> bool:
            fcntl.ioctl(process.stdout, termios.FIONREAD, unread)  # type: ignore[arg-type]
            return unread[0] > room - select.PIPE_BUF

        try:
            wait_until(is_full, "its pipe to be full")
            process.send_signal(number)
            assert process.wait(BACKSTOP) == 128 + number
        finally:
            process.kill()


def test_what_cannot_be_meant_is_refused(platform: PlatformProcess, sandbox: Sandbox) -> None:
    for arguments in (("exec", "-it", sandbox.sandbox_id, "true"), ("shell", sandbox.sandbox_id)):
        refused = piped(platform, *arguments, data=b"")
        assert refused.returncode == 2
        assert b"no terminal here" in refused.stderr
        # A shell has no options of the kind.
        assert (b"--tty" in refused.stderr) is (arguments[0] == "exec")
        assert b"-i" in refused.stderr
    assert piped(platform, "exec", "-t", "--json", sandbox.sandbox_id, "true", data=b"").returncode == 2
