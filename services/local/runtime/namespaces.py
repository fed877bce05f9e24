"""Starts bwrap up to the point where our init runs as process 1 of a sandbox's new root."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

from services.local.runtime.identity import Identity
from services.local.runtime.plan import RUN_MAP_TOOLS, Ids, Plan, Range
from services.local.runtime.steps import Clock, Given, StartError, Tools, hold, record

_STOP_SECONDS: Final = 0.5
_STOP_POLL_SECONDS: Final = 0.0005


def start_namespaces(
    plan: Plan, given: Given, tools: Tools, folder: int, clock: Clock
) -> Generator[int, None, Identity]:
    """Start bwrap up to the point where our init runs as process 1 of the new root."""
    with contextlib.ExitStack() as held:
        info_read, info_write = os.pipe()
        block_read, block_write = os.pipe()
        ready_read, ready_write = os.pipe()
        for descriptor in (info_read, block_write, ready_read):
            hold(held, descriptor)
        errors = hold(held, os.memfd_create("bwrap-errors"))
        null = hold(held, os.open("/dev/null", os.O_RDWR))
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
        outer_fd = hold(held, os.pidfd_open(outer))
        clock.mark("spawn")
        try:
            init = Identity.of((yield from _read_child_pid(info_read, errors)), tools.proc)
            clock.mark("namespaces")
            record(folder, init, None)
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
        yield from run_map_tools(ids, pid)
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


def run_map_tools(ids: Ids, pid: int) -> Generator[int, None, None]:
    """Write the maps of a process by newuidmap and newgidmap.

    Raises:
        StartError: they refuse.
    """
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
