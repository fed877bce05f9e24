"""The launcher where it could not be built: a Python process, forked from the agent, that does what launcher.c does.

It speaks the same protocol and keeps what that keeps: each command has a reaper that is the child subreaper of all that
the command starts, so every descendant is known, killed when the platform ends the command, and reaped; the reaper ends
the command when the agent is gone. What it costs is a fork of a Python process for the reaper and one for the command,
and the memory that they do not share.

In here only system calls are made and nothing is imported or logged: the agent may have had threads when it was forked.
"""

from __future__ import annotations

import array
import contextlib
import gc
import os
import select
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NoReturn

from services.exec_agent.launcher.calls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    plain_fork,
    prctl,
    reset_internal_signals,
)
from services.exec_agent.launcher.descendants import Descendants
from services.exec_agent.launcher.program_start import Program, StartError
from services.exec_agent.launcher.protocol import (
    CHILD_KILLED,
    EMPTY,
    EVENT,
    EXITED,
    FAILED,
    FDS_LEAST,
    FDS_MOST,
    ORDER,
    SPEC,
    SPEC_MEMFD,
    STAGE_FORK,
    STAGE_SPEC,
    STARTED,
    TARGET_LEADER,
    TREE_EMPTY,
)

_MESSAGE_BYTES: Final = 65_536
_FAILURE_BYTES: Final = 64
_RETRY_FIRST_MS: Final = 2
_RETRY_LAST_MS: Final = 50
_PAST_LAST_DESCRIPTOR: Final = 1 << 30


def start(channel: int, cgroup_procs: Sequence[int]) -> int:
    """Fork the server of `channel`; returns its pid. It and all below it join the control groups.

    Raises:
        OSError: no process is left.
    """
    return _fork(lambda: _serve(channel, cgroup_procs))


def _fork(work: Callable[[], int]) -> int:
    """Fork a child that does `work` and exits with its result. No signal reaches a handler of ours in between."""
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        pid = plain_fork()
        if pid == 0:
            _run(work)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _run(work: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        gc.disable()
        signal.set_wakeup_fd(-1)
        code = work()
    except BaseException as error:  # noqa: BLE001 (nothing of the agent's may run on here)
        os.write(2, f"launcher: {error!r}\n".encode("utf-8", "replace"))
    finally:
        os._exit(code)


# ---------------------------------------------------------------- the fork server


def _serve(channel: int, cgroup_procs: Sequence[int]) -> int:
    for descriptor in cgroup_procs:  # from here on this process and all below it are inside the limits
        os.write(descriptor, b"0")
    prctl(PR_SET_DUMPABLE, 0)
    _quiet_signals()
    os.setsid()
    _keep_only([channel])
    agent = socket.socket(fileno=channel)
    agent.setblocking(False)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    children = _watch_children()
    poll = select.poll()
    poll.register(agent, select.POLLIN)
    poll.register(children, select.POLLIN)
    while True:
        poll.poll()
        _drain(children)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        received = _receive(agent)
        if received is None:
            return 0
        message, descriptors = received
        if len(descriptors) >= FDS_LEAST:
            _start_reaper(message, descriptors, proc)
        for descriptor in descriptors:
            os.close(descriptor)


def _receive(agent: socket.socket) -> tuple[bytes, list[int]] | None:
    """One message with its descriptors, nothing if there is none; None when the agent is gone."""
    numbers = array.array("i")
    try:
        message, ancillary, _, _ = agent.recvmsg(
            _MESSAGE_BYTES, socket.CMSG_SPACE(FDS_MOST * numbers.itemsize), socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        return b"", []
    except OSError:
        return None
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
    return (message, list(numbers)) if message else None


def _start_reaper(message: bytes, descriptors: list[int], proc: int) -> None:
    try:
        _fork(lambda: _reap(message, descriptors, proc))
    except OSError as error:  # tell whoever asks, instead of leaving it waiting
        _report(descriptors[3], FAILED, STAGE_FORK, error.errno or 0)


# ---------------------------------------------------------------- the reaper of one command


def _reap(message: bytes, descriptors: list[int], proc: int) -> int:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.setsid()
    _keep_only([*descriptors, proc])
    control = descriptors[3]
    children = _watch_children()
    try:
        program = Program.parse(_whole_message(message, descriptors))
        leader = _start_command(program, descriptors[:3])
    except StartError as error:
        _report(control, FAILED, error.stage, error.number)
        return 0
    for descriptor in (*descriptors[:3], *descriptors[4:]):
        os.close(descriptor)
    _report(control, STARTED, leader, os.getpid())
    _Watch(leader, control, children, Descendants(proc)).run()
    return 0


def _whole_message(message: bytes, descriptors: list[int]) -> bytes:
    size, flags, *_ = SPEC.unpack_from(message)
    if not flags & SPEC_MEMFD or len(descriptors) < FDS_MOST:
        return message
    try:
        return os.pread(descriptors[4], size, 0)
    except OSError as error:
        raise StartError(STAGE_SPEC, error) from None


def _start_command(program: Program, standard: Sequence[int]) -> int:
    """Fork the command; returns its pid once it has been executed.

    Raises:
        StartError: it could not be.
    """
    told, failed = os.pipe2(os.O_CLOEXEC)
    reaper = os.getpid()

    def become() -> int:
        try:
            program.become(standard, failed, reaper)
        except StartError as error:
            os.write(failed, f"{error.stage} {error.number}".encode())
        except OSError as error:
            os.write(failed, f"{STAGE_SPEC} {error.errno}".encode())
        return 127

    try:
        pid = _fork(become)
    except OSError as error:
        raise StartError(STAGE_FORK, error) from None
    os.close(failed)
    answer = os.read(told, _FAILURE_BYTES)
    os.close(told)
    if answer:
        os.waitpid(pid, 0)
        stage, number = map(int, answer.split())
        raise StartError(stage, OSError(number, ""))
    return pid


class _Watch:
    """Follows a command until no descendant of it is left."""

    def __init__(self, leader: int, control: int, children: int, descendants: Descendants) -> None:
        self._leader = leader
        self._control: socket.socket | None = socket.socket(fileno=control)
        self._control.setblocking(False)
        self._children = children
        self._descendants = descendants
        self._leader_done = False
        self._killing = False
        self._child_killed = False

    def run(self) -> None:
        """To the end."""
        wait_ms = _RETRY_FIRST_MS
        poll = select.poll()
        poll.register(self._children, select.POLLIN)
        if self._control is not None:
            poll.register(self._control, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(wait_ms if self._killing else None)}
            _drain(self._children)
            if self._bury():
                return
            was_killing = self._killing
            control = self._control
            if control is not None and control.fileno() in ready and not self._obey(control):
                poll.unregister(control)
                control.close()
                self._control = None
            if not self._killing:
                continue
            if was_killing and not ready:
                wait_ms = min(wait_ms * 2, _RETRY_LAST_MS)
            self._descendants.kill()

    def _bury(self) -> bool:
        """Reap what has ended and tell of it; whether nothing is left."""
        exited: tuple[int, int, int, int] | None = None
        empty = False
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                empty = True
                break
            if pid == 0:
                break
            if pid == self._leader and not self._leader_done:
                self._leader_done = True
                exited = (status, round(usage.ru_utime * 1e6), round(usage.ru_stime * 1e6), usage.ru_maxrss)
            elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and not self._killing:
                self._child_killed = True
        if self._control is not None:
            descriptor = self._control.fileno()
            if exited is not None:
                status, user_us, system_us, peak_kb = exited
                flags = (TREE_EMPTY if empty else 0) | (CHILD_KILLED if self._child_killed else 0)
                _report(descriptor, EXITED, status, 0, flags, user_us, system_us, peak_kb)
            elif empty:
                _report(descriptor, EMPTY, 0, 0)
        return empty

    def _obey(self, control: socket.socket) -> bool:
        """Obey the agent; False without one: then a command that runs is killed, and what it left behind lives on."""
        while True:
            try:
                order = control.recv(ORDER.size)
            except BlockingIOError:
                return True
            except OSError:
                order = b""
            if len(order) != ORDER.size:
                self._killing = self._killing or not self._leader_done
                return False
            target, number = ORDER.unpack(order)
            if target == TARGET_LEADER:
                if not self._leader_done:
                    os.kill(self._leader, number)
            elif number == signal.SIGKILL:
                self._killing = True
            else:
                self._descendants.signal(number)


def _report(control: int, *fields: int) -> None:
    padded = (*fields, *[0] * (7 - len(fields)))
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(control)) as sender:
        sender.send(EVENT.pack(*padded), socket.MSG_NOSIGNAL)


# ---------------------------------------------------------------- descriptors and signals


def _keep_only(kept: Iterable[int]) -> None:
    """Keep the standard three, opened if need be, and these."""
    while (null := os.open("/dev/null", os.O_RDWR)) <= 2:
        pass
    os.close(null)
    low = 3
    for descriptor in sorted(set(kept) - {0, 1, 2}):
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, _PAST_LAST_DESCRIPTOR)


def _quiet_signals() -> None:
    """Every disposition to its default, every signal blocked but the one that says that a child has ended."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    reset_internal_signals()


def _watch_children() -> int:
    """A descriptor that is readable when a child has ended."""
    wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - {signal.SIGCHLD})
    return wake


def _drain(pipe: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(pipe, 4096):
            pass
