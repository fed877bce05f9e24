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
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from services.local.runtime import linux
from services.local.runtime.harden import close_others, harden
from services.local.runtime.identity import Identity
from services.local.runtime.plan import RUN_MAP_TOOLS, Ids, Plan, Range
from services.local.runtime.removal import remove_tree
from services.local.runtime.seccomp import program

PROCESSES_FILE: Final = "processes.json"
LOG_FILE: Final = "agent.log"
SOCKET_NAME: Final = "s"
DEADLINE_SECONDS: Final = 30.0
_RECORD_BYTES: Final = 256
_STOP_SECONDS: Final = 0.5
_STOP_POLL_SECONDS: Final = 0.0005
_NAMESPACES: Final = (
    linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
)
# What a starter does next: wait for a descriptor.
Steps = Generator[int, None, "Made"]


class StartError(Exception):
    """The sandbox cannot be made; the message is for people."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the zygote prepared.

    Attributes:
        bwrap: path of the binary, as seen where bwrap is started.
        run_agent: runs the agent with AgentConfig's fields until it ends.
        lifeline: the descriptor whose end of file ends every sandbox.
        proc: a descriptor of the machine's proc file system.
        own_pids: a descriptor of the zygote's own pid namespace.
    """

    bwrap: str
    run_agent: Callable[[dict[str, Any]], int]
    lifeline: int
    proc: int
    own_pids: int


@dataclass(frozen=True, slots=True)
class Given:
    """Descriptors that came with a request; closed when it has been answered."""

    launcher: int
    cgroup_procs: tuple[int, ...]
    oom_event: int | None
    oom_counter: int | None

    def all(self) -> list[int]:
        """Every one."""
        return [self.launcher, *self.cgroup_procs, *(d for d in (self.oom_event, self.oom_counter) if d is not None)]


@dataclass(frozen=True, slots=True)
class Made:
    """What was made, with its pidfds."""

    init: Identity
    init_fd: int
    agent: Identity | None
    agent_fd: int | None
    milliseconds: dict[str, float]


def make(plan: Plan, given: Given, tools: Tools) -> Steps:
    """Do it. In the agent's process this returns never.

    Raises:
        StartError: it cannot be done; what was begun has ended.
        OSError: likewise.
    """
    clock = _Clock()
    with contextlib.ExitStack() as held:
        folder = _hold(held, os.open(plan.folder, os.O_RDONLY | os.O_DIRECTORY))
        # Until this is done or dead: a restarted daemon then knows that the record is complete.
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        init = plan.init or (yield from _start_namespaces(plan, given, tools, folder, clock))
        init_fd = init.open(tools.proc)
        if plan.agent is None:
            return Made(init, init_fd, None, None, clock.milliseconds)
        try:
            agent, agent_fd = yield from _start_agent(plan, given, tools, folder, init=init, init_fd=init_fd)
        except BaseException:
            if plan.init is None:
                signal.pidfd_send_signal(init_fd, signal.SIGKILL)
            os.close(init_fd)
            raise
        clock.mark("fork")
        return Made(init, init_fd, agent, agent_fd, clock.milliseconds)


def _hold(held: contextlib.ExitStack, descriptor: int) -> int:
    held.callback(os.close, descriptor)
    return descriptor


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.milliseconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.milliseconds[name] = round((now - self._last) * 1e3, 2)
        self._last = now


# The namespaces


def _start_namespaces(
    plan: Plan, given: Given, tools: Tools, folder: int, clock: _Clock
) -> Generator[int, None, Identity]:
    """Start bwrap up to the point where our init runs as process 1 of the new root."""
    with contextlib.ExitStack() as held:
        info_read, info_write = os.pipe()
        block_read, block_write = os.pipe()
        ready_read, ready_write = os.pipe()
        for descriptor in (info_read, block_write, ready_read):
            _hold(held, descriptor)
        errors = _hold(held, os.memfd_create("bwrap-errors"))
        null = _hold(held, os.open("/dev/null", os.O_RDWR))
        arguments = [
            "bwrap",
            *("--info-fd", str(info_write), "--userns-block-fd", str(block_read)),
            *plan.bwrap,
            *("--as-pid-1", "--", f"/proc/self/fd/{given.launcher}", "init", str(tools.lifeline)),
        ]
        passed = (info_write, block_read, ready_write, given.launcher, tools.lifeline)
        outer = _spawn_as(plan.ids.own_user, tools.bwrap, arguments, passed, (null, null, errors))
        for descriptor in (info_write, block_read, ready_write):
            os.close(descriptor)
        outer_fd = _hold(held, os.pidfd_open(outer))
        clock.mark("spawn")
        try:
            init = Identity.of((yield from _read_child_pid(info_read, errors)), tools.proc)
            clock.mark("namespaces")
            _record(folder, init, None)
            _make_uppers(plan, folder)
            yield from _write_maps(plan.ids, init.pid)
            os.write(block_write, b"1")
            clock.mark("maps")
            # Our init's first act is to close what it need not have; bwrap's monitor has closed its own by then, or
            # has ended.
            yield ready_read
            _check_init(init.pid, errors)
            clock.mark("mounts")
        except BaseException:
            # GeneratorExit included: the request was given up.
            _kill_with_children(outer, outer_fd)
            raise
    return init


def _spawn_as(
    user: int | None, path: str, arguments: list[str], passed: tuple[int, ...], standard: tuple[int, int, int]
) -> int:
    """posix_spawn, which unlike fork copies no page tables, as another user."""
    for descriptor in passed:
        os.set_inheritable(descriptor, True)
    actions = [(os.POSIX_SPAWN_DUP2, descriptor, number) for number, descriptor in enumerate(standard)]
    if user is not None:
        # Saved ids stay ours, to come back; exec sets the child's from its effective ones.
        os.setgroups([])
        os.setresgid(user, user, 0)
        os.setresuid(user, user, 0)
    try:
        return os.posix_spawn(path, arguments, {}, file_actions=actions, setsigdef=[signal.SIGPIPE, signal.SIGCHLD])
    finally:
        if user is not None:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
        for descriptor in passed:
            os.set_inheritable(descriptor, False)


def _kill_with_children(pid: int, pidfd: int) -> None:
    """End a bwrap that is at work, and its child, which would wait for ever for word from it.

    It is stopped first, so that it has no other child by the time it is killed.
    """
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        deadline = time.monotonic() + _STOP_SECONDS
        while _state(pid) not in "TZX" and time.monotonic() < deadline:
            time.sleep(_STOP_POLL_SECONDS)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            os.kill(int(child), signal.SIGKILL)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()


def _read_child_pid(info: int, errors: int) -> Generator[int, None, int]:
    text = b""
    # Up to the closing brace: bwrap keeps the descriptor open.
    while b"}" not in text:
        yield info
        data = os.read(info, 4096)
        if not data:
            raise StartError(_complaint(errors))
        text += data
    return int(json.loads(text)["child-pid"])


def _complaint(errors: int) -> str:
    text = os.pread(errors, 2000, 0).decode(errors="replace").strip()
    return text or "bwrap ended without a word"


def _make_uppers(plan: Plan, folder: int) -> None:
    for name in ("u", "w"):
        os.mkdir(name, 0o711, dir_fd=folder)
        paths = [name, *(f"{name}/{layer}" for layer in range(plan.layers))]
        for path in paths[1:]:
            os.mkdir(path, 0o755, dir_fd=folder)
        if plan.ids.privileged:
            for path in paths:
                os.chown(path, plan.ids.owner, plan.ids.owner, dir_fd=folder)


def _write_maps(ids: Ids, pid: int) -> Generator[int, None, None]:
    if ids.how == RUN_MAP_TOOLS:
        yield from _run_map_tools(ids, pid)
        return
    if not ids.privileged:
        # The kernel's condition for a map that is written without privilege.
        Path(f"/proc/{pid}/setgroups").write_text("deny")
    Path(f"/proc/{pid}/uid_map").write_text(_map_text(ids, _outside_user))
    Path(f"/proc/{pid}/gid_map").write_text(_map_text(ids, _outside_group))


def _map_text(ids: Ids, outside: Callable[[Range], int]) -> str:
    return "\n".join(f"{r.inside} {outside(r)} {r.count}" for r in ids.ranges)


def map_commands(ids: Ids, pid: int) -> list[list[str]]:
    """The two set-user-id programs that write maps for an ordinary user."""
    commands = []
    for tool, outside in (("newuidmap", _outside_user), ("newgidmap", _outside_group)):
        numbers = [str(number) for r in ids.ranges for number in (r.inside, outside(r), r.count)]
        commands.append([tool, str(pid), *numbers])
    return commands


def _outside_user(r: Range) -> int:
    return r.outside_user


def _outside_group(r: Range) -> int:
    return r.outside_group


def _run_map_tools(ids: Ids, pid: int) -> Generator[int, None, None]:
    for command, kind in zip(map_commands(ids, pid), ("uid", "gid"), strict=True):
        errors = os.memfd_create("map-errors")
        child = os.posix_spawnp(
            command[0],
            command,
            {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
            file_actions=[(os.POSIX_SPAWN_DUP2, errors, 2)],
            setsigdef=[signal.SIGCHLD],
        )
        ended = os.pidfd_open(child)
        yield ended
        os.close(ended)
        text = os.pread(errors, 1000, 0).decode(errors="replace").strip()
        os.close(errors)
        # The exit code is the zygote's to reap; a tool that refuses says why and leaves the map empty.
        if not Path(f"/proc/{pid}/{kind}_map").read_text(encoding="ascii").strip():
            raise StartError(f"{command[0]} refused the id map: {text or 'it did not say why'}")


def _check_init(pid: int, errors: int) -> None:
    try:
        name, state = Path(f"/proc/{pid}/comm").read_bytes().strip(), _state(pid)
    except (FileNotFoundError, ProcessLookupError):
        name, state = b"", "X"
    if name == b"bwrap" or state in "ZX":
        raise StartError(_complaint(errors))


def _record(folder: int, init: Identity, agent: Identity | None) -> None:
    """Write down which processes the sandbox has: one write of one length, so that a death leaves the old or the
    new.
    """
    text = json.dumps({"init": asdict(init), "agent": None if agent is None else asdict(agent)})
    descriptor = os.open(PROCESSES_FILE, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=folder)
    os.pwrite(descriptor, text.ljust(_RECORD_BYTES).encode(), 0)
    os.close(descriptor)


# Removing


def remove(plan: Plan) -> Generator[int, None, None]:
    """Remove folders with files of ids that an ordinary user only has inside of a user namespace.

    Raises:
        StartError: something could not be removed.
    """
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    with contextlib.ExitStack() as held:
        _hold(held, ready_read)
        _hold(held, go_write)
        child = _fork_into(lambda: _remove_as_root(plan.remove, ready_write, go_read, go_write))
        os.close(ready_write)
        os.close(go_read)
        yield ready_read
        if os.read(ready_read, 1) != b"1":
            raise StartError("the kernel refuses a user namespace to remove files in")
        yield from _run_map_tools(plan.ids, child)
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

    @classmethod
    def open(cls, plan: Plan, folder: int, held: contextlib.ExitStack) -> _Own:
        socket_folder = _hold(held, os.open(plan.socket_folder, os.O_PATH | os.O_DIRECTORY))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET_NAME, dir_fd=socket_folder)
        state = _hold(held, os.open("state", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder))
        log = os.open(LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600, dir_fd=folder)
        return cls(state, socket_folder, _hold(held, log))


@dataclass(frozen=True, slots=True)
class _Birth:
    """All that an agent is born with. It reads a byte from `recorded` before it goes on."""

    plan: Plan
    given: Given
    tools: Tools
    own: _Own
    recorded: int


def _start_agent(
    plan: Plan, given: Given, tools: Tools, folder: int, *, init: Identity, init_fd: int
) -> Generator[int, None, tuple[Identity, int]]:
    with contextlib.ExitStack() as held:
        own = _Own.open(plan, folder, held)
        recorded_read, recorded_write = os.pipe()
        _hold(held, recorded_read)
        _hold(held, recorded_write)
        birth = _Birth(plan, given, tools, own, recorded_read)
        if plan.ids.privileged:
            agent, agent_fd = _fork_once(birth, init_fd)
        else:
            agent, agent_fd = yield from _fork_twice(birth, init_fd)
        _record(folder, init, agent)
        os.write(recorded_write, b"1")
    return agent, agent_fd


def _fork_once(birth: _Birth, init_fd: int) -> tuple[Identity, int]:
    """With privilege over our own pid namespace too: for a moment children of the zygote are born in the sandbox's."""
    linux.setns(init_fd, linux.CLONE_NEWPID)
    pid = _fork_into(lambda: _become_agent(birth, init_fd))
    linux.setns(birth.tools.own_pids, linux.CLONE_NEWPID)
    return Identity.of(pid, birth.tools.proc), os.pidfd_open(pid)


def _fork_twice(birth: _Birth, init_fd: int) -> Generator[int, None, tuple[Identity, int]]:
    """Without: a child joins, is allowed everything there, and forks the agent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        _fork_into(lambda: _join_and_fork(birth, init_fd, theirs))
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


def _fork_into(work: Callable[[], None]) -> int:
    """Fork a child that does `work` and ends: nothing of the zygote's may run there. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        work()
    except BaseException:  # noqa: BLE001 (the log is the only one left to tell)
        traceback.print_exc()
    finally:
        os._exit(1)


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
    keep = [own.state, own.socket_folder, *given.all()]
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
    fields.update(
        listen=f"unix:/proc/self/fd/{own.socket_folder}/{SOCKET_NAME}",
        state_fd=own.state,
        launcher_fd=given.launcher,
        cgroup_procs_fds=given.cgroup_procs,
        oom_event_fd=given.oom_event,
        oom_counter_fd=given.oom_counter,
    )
    os._exit(birth.tools.run_agent(fields))
