"""Makes one sandbox, or gives one a fresh agent. Runs in a child of the zygote that is forked for it and ends with it.

Everything here is synchronous and single-threaded: setns wants it so. The order makes every death of this process
harmless: bwrap finds no upper layers and fails unless the processes have been recorded, and the agent waits until it
has been.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from services.local.runtime import cgroups, linux
from services.local.runtime.harden import harden
from services.local.runtime.identity import Identity
from services.local.runtime.plan import RUN_MAP_TOOLS, Ids, Plan, Range
from services.local.runtime.seccomp import program

PROCESSES_FILE: Final = "processes.json"
LOCK_FILE: Final = "lock"
LOG_FILE: Final = "agent.log"
SOCKET_NAME: Final = "s"
DEADLINE_SECONDS: Final = 30
_NAMESPACES: Final = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)


class StartError(Exception):
    """The sandbox cannot be made; the message is for people."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What the zygote prepared.

    Attributes:
        bwrap: path of the binary, as seen where bwrap is started.
        open_launcher: gives a descriptor of the static init.
        run_agent: runs the agent with AgentConfig's fields until it ends.
        lifeline: the descriptor whose end of file ends every sandbox.
        stage: descriptor of the mount namespace in which bwrap is started; None: this one.
    """

    bwrap: str
    open_launcher: Callable[[], int]
    run_agent: Callable[[dict[str, Any]], int]
    lifeline: int
    stage: int | None


@dataclass(frozen=True, slots=True)
class Made:
    """What was made, with its pidfds."""

    init: Identity
    init_fd: int
    agent: Identity | None
    agent_fd: int | None
    milliseconds: dict[str, float]


def make(plan: Plan, tools: Tools) -> Made | None:
    """Do it. Returns None in the agent's process, once that has ended.

    Raises:
        StartError: it cannot be done; what was begun has ended.
        OSError: likewise.
    """
    clock = _Clock()
    folder = os.open(plan.folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(os.open(LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=folder), fcntl.LOCK_EX)
    things = _AgentThings.open(plan, folder)
    # One for each sandbox: should somebody inside get at it, it is nobody else's.
    launcher = tools.open_launcher()
    clock.mark("folders")
    init = plan.init or _start_namespaces(plan, tools, folder, launcher, clock)
    init_fd = init.open()
    if plan.agent is None or things is None:
        return Made(init, init_fd, None, None, clock.milliseconds)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    # Its memory, environment and descriptors must be out of reach before anything inside can see it.
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    linux.setns(init_fd, _NAMESPACES | (0 if plan.host_network else linux.CLONE_NEWNET))
    clock.mark("join")
    recorded_read, recorded_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(recorded_write)
        _become_agent(plan, tools, things, launcher, recorded_read)
        return None
    agent_fd = os.pidfd_open(pid)
    agent = Identity.of(pid, proc)
    _record(folder, init, agent)
    os.write(recorded_write, b"1")
    clock.mark("fork")
    return Made(init, init_fd, agent, agent_fd, clock.milliseconds)


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.milliseconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.milliseconds[name] = round((now - self._last) * 1e3, 2)
        self._last = now


@dataclass(frozen=True, slots=True)
class _AgentThings:
    """Descriptors that the agent takes along; opened while the machine's files can be seen."""

    state: int
    socket_folder: int
    log: int
    cgroup_procs: list[int]
    oom_event: int | None
    oom_counter: int | None

    @classmethod
    def open(cls, plan: Plan, folder: int) -> _AgentThings | None:
        if plan.agent is None:
            return None
        socket_folder = os.open(plan.socket_folder, os.O_PATH | os.O_DIRECTORY)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET_NAME, dir_fd=socket_folder)
        group = cgroups.open_group(plan.cgroup, plan.limits)
        return cls(
            state=os.open("state", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder),
            socket_folder=socket_folder,
            log=os.open(LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600, dir_fd=folder),
            cgroup_procs=group.procs,
            oom_event=group.oom_event,
            oom_counter=group.oom_counter,
        )

    def descriptors(self) -> list[int]:
        optional = [d for d in (self.oom_event, self.oom_counter) if d is not None]
        return [self.state, self.socket_folder, *self.cgroup_procs, *optional]


def _start_namespaces(plan: Plan, tools: Tools, folder: int, launcher: int, clock: _Clock) -> Identity:
    """Start bwrap up to the point where our init runs as process 1 of the new root."""
    info_read, info_write = os.pipe()
    block_read, block_write = os.pipe()
    ready_read, ready_write = os.pipe()
    errors = os.memfd_create("bwrap-errors")
    null = os.open("/dev/null", os.O_RDWR)
    if tools.stage is not None:
        linux.setns(tools.stage, linux.CLONE_NEWNS)
    passed = (info_write, block_read, ready_write, launcher, tools.lifeline)
    arguments = [
        "bwrap",
        *("--info-fd", str(info_write), "--userns-block-fd", str(block_read)),
        *plan.bwrap,
        *("--as-pid-1", "--", f"/proc/self/fd/{launcher}", "init", str(tools.lifeline)),
    ]
    outer = _spawn_as(plan.ids.own_user, tools.bwrap, arguments, passed, (null, null, errors))
    for descriptor in (info_write, block_read, ready_write, null):
        os.close(descriptor)
    clock.mark("spawn")
    outer_fd = os.pidfd_open(outer)
    try:
        init = Identity.of(_read_child_pid(info_read, errors))
        clock.mark("namespaces")
        _record(folder, init, None)
        _make_uppers(plan, folder)
        _write_maps(plan.ids, init.pid)
        os.write(block_write, b"1")
        clock.mark("maps")
        _await_init(init.pid, ready_read, errors)
        clock.mark("mounts")
    except BaseException:
        signal.pidfd_send_signal(outer_fd, signal.SIGKILL)
        raise
    finally:
        for descriptor in (info_read, block_write, ready_read, outer_fd):
            os.close(descriptor)
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


def _read_child_pid(info: int, errors: int) -> int:
    text = b""
    # Up to the closing brace: bwrap keeps the descriptor open.
    while b"}" not in text:
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


def _write_maps(ids: Ids, pid: int) -> None:
    if ids.how == RUN_MAP_TOOLS:
        _run_map_tools(ids, pid)
        return
    if not ids.privileged:
        # The kernel's condition for a map that is written without privilege.
        Path(f"/proc/{pid}/setgroups").write_text("deny")
    Path(f"/proc/{pid}/uid_map").write_text(_map_text(ids, lambda r: r.outside_user))
    Path(f"/proc/{pid}/gid_map").write_text(_map_text(ids, lambda r: r.outside_group))


def _map_text(ids: Ids, outside: Callable[[Range], int]) -> str:
    return "\n".join(f"{r.inside} {outside(r)} {r.count}" for r in ids.ranges)


def _run_map_tools(ids: Ids, pid: int) -> None:
    for tool, users in (("newuidmap", True), ("newgidmap", False)):
        numbers = [
            str(number)
            for r in ids.ranges
            for number in (r.inside, r.outside_user if users else r.outside_group, r.count)
        ]
        errors = os.memfd_create("map-errors")
        child = os.posix_spawnp(
            tool,
            [tool, str(pid), *numbers],
            {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
            file_actions=[(os.POSIX_SPAWN_DUP2, errors, 2)],
            setsigdef=[signal.SIGCHLD],
        )
        _, status = os.waitpid(child, 0)
        text = os.pread(errors, 1000, 0).decode(errors="replace").strip()
        os.close(errors)
        if status != 0:
            raise StartError(f"{tool} refused the id map: {text}")


def _await_init(pid: int, ready: int, errors: int) -> None:
    """Wait until bwrap has become our init: only then is its root the sandbox's.

    Our init's first act is to close what it need not have, `ready` among it; bwrap's monitor has closed it by then,
    or has ended.
    """
    if not select.select([ready], [], [], DEADLINE_SECONDS)[0]:
        raise StartError("bwrap did not make the sandbox in time")
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        name, state = "", ""
    if not name or name == "bwrap" or state in "ZX":
        raise StartError(_complaint(errors))


def _record(folder: int, init: Identity, agent: Identity | None) -> None:
    """Write down, whole or not at all, which processes the sandbox has."""
    text = json.dumps({"init": asdict(init), "agent": None if agent is None else asdict(agent)})
    temporary = PROCESSES_FILE + ".new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder)
    os.write(descriptor, text.encode())
    os.close(descriptor)
    os.rename(temporary, PROCESSES_FILE, src_dir_fd=folder, dst_dir_fd=folder)


def _become_agent(plan: Plan, tools: Tools, things: _AgentThings, launcher: int, recorded: int) -> None:
    if os.read(recorded, 1) != b"1":
        os._exit(1)  # nobody would know of us
    signal.alarm(0)
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for number, descriptor in enumerate((null, null, things.log)):
        os.dup2(descriptor, number)
    keep = [launcher, *things.descriptors()]
    harden(
        keep,
        filter_program=program(ignore_chown=not plan.ids.switchable),
        no_new_privileges=not plan.ids.switchable,
        switch_user=plan.ids.switchable,
    )
    fields = dict(plan.agent or {})
    fields.update(
        listen=f"unix:/proc/self/fd/{things.socket_folder}/{SOCKET_NAME}",
        state_fd=things.state,
        launcher_fd=launcher,
        cgroup_procs_fds=things.cgroup_procs,
        oom_event_fd=things.oom_event,
        oom_counter_fd=things.oom_counter,
    )
    tools.run_agent(fields)
