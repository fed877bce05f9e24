"""Makes one sandbox, or gives one a fresh agent; runs in the zygote.

Each is a generator that yields the descriptor whose readability it waits for, so that one single-threaded process, as
setns and fork want it, makes several at a time. The order makes a death at any point harmless: bwrap finds no upper
layers and fails unless the processes have been recorded, and the agent waits until it has been.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import traceback
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from services.local.runtime import claim, linux
from services.local.runtime.harden import close_others, harden
from services.local.runtime.identity import Identity
from services.local.runtime.namespaces import run_map_tools, start_namespaces
from services.local.runtime.plan import Plan
from services.local.runtime.removal import remove_tree
from services.local.runtime.seccomp import program
from services.local.runtime.steps import (
    LOG_FILE,
    SOCKET_NAME,
    Clock,
    Given,
    Made,
    StartError,
    Tools,
    fork_into,
    hold,
    record,
)

_NAMESPACES: Final = (
    linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
)
# What a starter does next: wait for a descriptor.
Steps = Generator[int, None, Made]


def make(plan: Plan, given: Given, tools: Tools) -> Steps:
    """Do it. In the agent's process this returns never.

    Raises:
        StartError: it cannot be done; what was begun has ended.
        OSError: likewise.
    """
    clock = Clock()
    with contextlib.ExitStack() as held:
        folder = hold(held, os.open(plan.folder, os.O_RDONLY | os.O_DIRECTORY))
        # Until this is done or dead: a restarted daemon then knows that the record is complete.
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        init = plan.init or (yield from start_namespaces(plan, given, tools, folder, clock))
        init_fd = init.open(tools.proc)
        if plan.agent is None:
            return Made(init, init_fd, None, None, None, clock.milliseconds)
        ours, theirs = claim.channel() if plan.waits else (None, None)
        if theirs is not None:
            held.callback(theirs.close)
        try:
            own = _Own.open(plan, folder, theirs, held)
            agent, agent_fd = yield from _start_agent(plan, given, tools, own, folder, init=init, init_fd=init_fd)
        except BaseException:
            if plan.init is None:
                signal.pidfd_send_signal(init_fd, signal.SIGKILL)
            os.close(init_fd)
            if ours is not None:
                ours.close()
            raise
        clock.mark("fork")
        return Made(init, init_fd, agent, agent_fd, None if ours is None else ours.detach(), clock.milliseconds)


# Removing


def remove(plan: Plan) -> Generator[int, None, None]:
    """Remove folders with files of ids that an ordinary user only has inside of a user namespace.

    Raises:
        StartError: something could not be removed.
    """
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    with contextlib.ExitStack() as held:
        hold(held, ready_read)
        hold(held, go_write)
        child = fork_into(lambda: _remove_as_root(plan.remove, ready_write, go_read, go_write))
        os.close(ready_write)
        os.close(go_read)
        yield ready_read
        if os.read(ready_read, 1) != b"1":
            raise StartError("the kernel refuses a user namespace to remove files in")
        yield from run_map_tools(plan.ids, child)
        os.write(go_write, b"1")
        yield ready_read
        answer = os.read(ready_read, 1000)
        if answer != b"1":
            raise StartError(f"files could not be removed: {answer.decode(errors='replace') or 'the remover died'}")


def _remove_as_root(paths: tuple[str, ...], answer: int, go: int, other_end: int) -> None:
    os.close(other_end)
    linux.unshare(linux.CLONE_NEWUSER)
    # As an ordinary user's, /proc files of a process that is not dumpable are root's: newuidmap would refuse.
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
    os.write(answer, b"1")
    if os.read(go, 1) != b"1":
        return
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    try:
        for path in paths:
            remove_tree(Path(path))
    except OSError as error:
        os.write(answer, f"{error.filename}: {error.strerror}".encode())
    else:
        os.write(answer, b"1")


# The agent


@dataclass(frozen=True, slots=True)
class _Own:
    """Descriptors that the agent takes along; opened while the machine's files can be seen."""

    state: int
    socket_folder: int
    log: int
    claim: socket.socket | None

    @classmethod
    def open(cls, plan: Plan, folder: int, claim: socket.socket | None, held: contextlib.ExitStack) -> _Own:
        socket_folder = hold(held, os.open(plan.socket_folder, os.O_PATH | os.O_DIRECTORY))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET_NAME, dir_fd=socket_folder)
        state = hold(held, os.open("state", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder))
        log = os.open(LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600, dir_fd=folder)
        return cls(state, socket_folder, hold(held, log), claim)


@dataclass(frozen=True, slots=True)
class _Birth:
    """All that an agent is born with. It reads a byte from `recorded` before it goes on."""

    plan: Plan
    given: Given
    tools: Tools
    own: _Own
    recorded: int


def _start_agent(
    plan: Plan, given: Given, tools: Tools, own: _Own, folder: int, *, init: Identity, init_fd: int
) -> Generator[int, None, tuple[Identity, int]]:
    with contextlib.ExitStack() as held:
        recorded_read, recorded_write = os.pipe()
        hold(held, recorded_read)
        hold(held, recorded_write)
        birth = _Birth(plan, given, tools, own, recorded_read)
        if plan.ids.privileged:
            agent, agent_fd = _fork_once(birth, init_fd)
        else:
            agent, agent_fd = yield from _fork_twice(birth, init_fd)
        record(folder, init, agent)
        os.write(recorded_write, b"1")
    return agent, agent_fd


def _fork_once(birth: _Birth, init_fd: int) -> tuple[Identity, int]:
    """With privilege over our own pid namespace too: for a moment children of the zygote are born in the sandbox's."""
    linux.setns(init_fd, linux.CLONE_NEWPID)
    pid = fork_into(lambda: _become_agent(birth, init_fd))
    linux.setns(birth.tools.own_pids, linux.CLONE_NEWPID)
    return Identity.of(pid, birth.tools.proc), os.pidfd_open(pid)


def _fork_twice(birth: _Birth, init_fd: int) -> Generator[int, None, tuple[Identity, int]]:
    """Without: a child joins, is allowed everything there, and forks the agent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        fork_into(lambda: _join_and_fork(birth, init_fd, theirs))
        theirs.close()
        yield ours.fileno()
        data, descriptors, _, _ = socket.recv_fds(ours, 1024, 1)
    if not descriptors:
        raise StartError(
            f"the namespaces cannot be joined: {data.decode(errors='replace') or 'the joining process died'}"
        )
    return Identity(**json.loads(data)), descriptors[0]


def _join_and_fork(birth: _Birth, init_fd: int, answer: socket.socket) -> None:
    try:
        _join(birth.plan, init_fd, linux.CLONE_NEWPID)
        pid = os.fork()
    except OSError as error:
        answer.send(str(error).encode())
        return
    if pid == 0:
        _become_agent(birth, None)
    else:
        identity = asdict(Identity.of(pid, birth.tools.proc))
        socket.send_fds(answer, [json.dumps(identity).encode()], [os.pidfd_open(pid)])


def _join(plan: Plan, init_fd: int, more: int = 0) -> None:
    # Memory, environment and descriptors must be out of reach before anything inside can see this process.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    linux.setns(init_fd, _NAMESPACES | more | (0 if plan.host_network else linux.CLONE_NEWNET))


def _become_agent(birth: _Birth, init_fd: int | None) -> None:
    plan, given, own = birth.plan, birth.given, birth.own
    if init_fd is not None:
        _join(plan, init_fd)
    null = os.open("/dev/null", os.O_RDWR)
    for number, descriptor in enumerate((null, null, own.log)):
        os.dup2(descriptor, number)
    keep = [own.state, own.socket_folder, *given.all(), *(() if own.claim is None else (own.claim.fileno(),))]
    # First of all our copies of the zygote's sockets: as long as they are open, nobody sees it die.
    close_others([*keep, birth.recorded])
    if os.read(birth.recorded, 1) != b"1":
        return  # nobody would know of us
    os.setsid()
    harden(
        keep,
        filter_program=program(ignore_chown=not plan.ids.switchable),
        no_new_privileges=not plan.ids.switchable,
        switch_user=plan.ids.switchable,
    )
    if plan.most_processes:
        # Counted for the sandbox's user namespace alone.
        resource.setrlimit(resource.RLIMIT_NPROC, (plan.most_processes, plan.most_processes))
    fields = dict(plan.agent or {})
    if own.claim is not None:
        _rehearse(birth)
        told = claim.wait(own.claim)
        if told is None:
            return  # the daemon is gone, and with it whoever would have wanted this sandbox
        fields = told
    fields.update(
        listen=f"unix:/proc/self/fd/{own.socket_folder}/{SOCKET_NAME}",
        state_fd=own.state,
        launcher_fd=given.launcher if given.whole_launcher else None,
        cgroup_procs_fds=given.cgroup_procs,
        oom_event_fd=given.oom_event,
        oom_counter_fd=given.oom_counter,
    )
    os._exit(birth.tools.run_agent(fields))


def _rehearse(birth: _Birth) -> None:
    """While nobody waits, take the page faults of a first run in this process."""
    if not birth.given.whole_launcher:
        return  # what starts commands then is forked from the agent itself
    folder = Path(f"/proc/self/fd/{birth.own.state}/rehearsal")
    try:
        folder.mkdir(mode=0o700)
        try:
            birth.tools.rehearse_agent(folder, birth.given.launcher)
        finally:
            remove_tree(folder)
    except Exception:  # noqa: BLE001 (the agent itself may do better)
        traceback.print_exc()
