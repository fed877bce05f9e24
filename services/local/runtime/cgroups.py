"""Limits of a sandbox's commands by control groups: version 1 (also the hybrid layout) as root, version 2 where it is
delegated.

The agent stays outside: it hands each command's
launcher the open `cgroup.procs` files, so that running out of memory ends commands and never the agent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
VERSION_1: Final = "cgroup-v1"
VERSION_2: Final = "cgroup-v2"
_CONTROLLERS: Final = ("memory", "pids", "cpu", "freezer")
_CPU_PERIOD_MICROSECONDS: Final = 100_000
_REMOVE_SECONDS: Final = 2.0
_LEAF: Final = "-platform"


@dataclass(frozen=True, slots=True)
class Limits:
    """What commands may use; zero is not limited."""

    cpu: float = 0.0
    memory_bytes: int = 0
    pids: int = 0


@dataclass(frozen=True, slots=True)
class Cgroups:
    """How this machine limits.

    Attributes:
        version: VERSION_1, VERSION_2 or "" (none: rlimits).
        parents: folder under which groups are made, by controller ("unified" for version 2 and the hybrid layout).
        why_not: with no version, a sentence with the fix.
    """

    version: str
    parents: Mapping[str, str]
    why_not: str = ""

    def paths(self, uid: str) -> dict[str, str]:
        """The groups of one sandbox."""
        return {controller: f"{parent}/{uid}" for controller, parent in self.parents.items()}


@dataclass(frozen=True, slots=True)
class Group:
    """Open files of one sandbox's groups."""

    procs: tuple[int, ...] = ()
    oom_event: int | None = None
    oom_counter: int | None = None

    def close(self) -> None:
        """Close them."""
        for descriptor in (*self.procs, self.oom_event, self.oom_counter):
            if descriptor is not None:
                os.close(descriptor)


NO_GROUP: Final = Group()


def open_group(paths: Mapping[str, str], limits: Limits) -> Group:
    """Make the groups if they are not there, set the limits and open what the agent needs."""
    for path in paths.values():
        Path(path).mkdir(exist_ok=True)
    limit(paths, limits)
    with contextlib.ExitStack() as held:
        procs = tuple(_held(held, os.open(f"{path}/cgroup.procs", os.O_WRONLY)) for path in paths.values())
        event, counter = _watch_memory(paths, held)
        held.pop_all()
    return Group(procs, event, counter)


def _held(held: contextlib.ExitStack, descriptor: int) -> int:
    held.callback(os.close, descriptor)
    return descriptor


def limit(paths: Mapping[str, str], limits: Limits) -> None:
    """Set the limits of groups; one that is zero stays as it is."""
    if "memory" in paths:
        _limit_version_1(paths, limits)
    elif "unified" in paths:
        _limit_version_2(paths["unified"], limits)


def _limit_version_1(paths: Mapping[str, str], limits: Limits) -> None:
    if limits.memory_bytes:
        _write(f"{paths['memory']}/memory.limit_in_bytes", limits.memory_bytes)
        # Without, the limit would be met by swapping; absent where swap accounting is off.
        swap = f"{paths['memory']}/memory.memsw.limit_in_bytes"
        if os.path.exists(swap):  # noqa: PTH110
            _write(swap, limits.memory_bytes)
    if limits.pids and "pids" in paths:
        _write(f"{paths['pids']}/pids.max", limits.pids)
    if limits.cpu and "cpu" in paths:
        _write(f"{paths['cpu']}/cpu.cfs_period_us", _CPU_PERIOD_MICROSECONDS)
        _write(f"{paths['cpu']}/cpu.cfs_quota_us", int(limits.cpu * _CPU_PERIOD_MICROSECONDS))


def _limit_version_2(path: str, limits: Limits) -> None:
    if limits.memory_bytes:
        _write(f"{path}/memory.max", limits.memory_bytes)
        swap = f"{path}/memory.swap.max"
        if os.path.exists(swap):  # noqa: PTH110
            _write(swap, 0)
    if limits.pids:
        _write(f"{path}/pids.max", limits.pids)
    if limits.cpu:
        _write(f"{path}/cpu.max", f"{int(limits.cpu * _CPU_PERIOD_MICROSECONDS)} {_CPU_PERIOD_MICROSECONDS}")


def _watch_memory(paths: Mapping[str, str], held: contextlib.ExitStack) -> tuple[int | None, int | None]:
    if "memory" in paths:
        counter = _held(held, os.open(f"{paths['memory']}/memory.oom_control", os.O_RDONLY))
        event = _held(held, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        _write(f"{paths['memory']}/cgroup.event_control", f"{event} {counter}")
        return event, counter
    if "unified" in paths:
        return None, _held(held, os.open(f"{paths['unified']}/memory.events", os.O_RDONLY))
    return None, None


def _write(path: str, value: object) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def remove_group(paths: Mapping[str, str]) -> None:
    """Kill what is left in the groups and remove them. Blocks for up to 2 s while the kernel lets the dead go.

    Raises:
        OSError: a group could not be removed.
    """
    deadline = time.monotonic() + _REMOVE_SECONDS
    for path in paths.values():
        while True:
            try:
                Path(path).rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                _kill_all(path)
                time.sleep(0.002)


def remove_others(found: Cgroups, known: Iterable[str]) -> None:
    """Remove the groups of sandboxes that are not known any more."""
    kept = set(known)
    for parent in found.parents.values():
        for group in Path(parent).iterdir():
            if group.is_dir() and group.name not in kept:
                remove_group({"": str(group)})


def name_of(data: Path) -> str:
    """The name under which the node that keeps its data there makes groups."""
    return f"orchard-{hashlib.sha256(str(data).encode()).hexdigest()[:10]}"


def left(name: str) -> list[Path]:
    """Groups of this name that there are, each with those of sandboxes below it."""
    own = ROOT / Path("/proc/self/cgroup").read_text(encoding="utf-8").partition("0::/")[2].split("\n")[0]
    # Version 1 has a folder for each controller; in version 2 the node may have moved this process to a leaf.
    places = {*ROOT.glob("*"), own, own.parent}
    return sorted(place / name for place in places if (place / name).is_dir())


def remove_left(name: str) -> None:
    """Remove what a node that was killed could not. Blocks; every process of its sandboxes has ended.

    Raises:
        OSError: a group could not be removed.
    """
    for parent in left(name):
        remove_others(Cgroups("", {"": str(parent)}), ())
        parent.rmdir()


def remove_parents(found: Cgroups) -> None:
    """Remove what `find` made, unless sandboxes still use it."""
    for parent in found.parents.values():
        with contextlib.suppress(OSError):
            Path(parent).rmdir()


def _kill_all(path: str) -> None:
    try:
        _write(f"{path}/cgroup.kill", 1)
    except OSError:
        return  # version 1: the namespace's end kills them


def find(name: str) -> Cgroups:
    """Find out, by making a group called `name`, how this machine limits.

    The hybrid layout has the controllers in version 1 and an empty version 2 tree beside them, whose cgroup.kill is
    still of use.
    """
    if (ROOT / "memory").is_dir():
        return _find_version_1(name)
    if (ROOT / "cgroup.controllers").exists():
        return _find_version_2(name)
    return Cgroups("", {}, "No control groups are mounted: cpu, memory and pids are not limited. Mount /sys/fs/cgroup.")


def _find_version_1(name: str) -> Cgroups:
    parents = {c: str(ROOT / c / name) for c in (*_CONTROLLERS, "unified") if (ROOT / c).is_dir()}
    try:
        for parent in parents.values():
            Path(parent).mkdir(exist_ok=True)
    except OSError as error:
        return Cgroups(
            "",
            {},
            f"Control groups of version 1 cannot be made ({error.strerror}): cpu, memory and pids are not limited. "
            "Run as root, or boot with systemd.unified_cgroup_hierarchy=1 for delegated groups.",
        )
    return Cgroups(VERSION_1, parents)


def top_of(own: Path, name: str) -> Path:
    """The group below which those of sandboxes are made, of a process that is in the group `own`.

    One that was started by a node that had already moved itself to a leaf is born in that leaf. Below it groups would
    be others than before, and sandboxes that live on would not be found in them.
    """
    return own.parent if own.name == f"{name}{_LEAF}" else own


def _find_version_2(name: str) -> Cgroups:
    fix = "Start with `systemd-run --user --scope -p Delegate=yes`, or run as root."
    own = Path("/proc/self/cgroup").read_text(encoding="utf-8").partition("0::/")[2].split("\n")[0]
    top = top_of(ROOT / own.lstrip("/"), name)
    parent = top / name
    wanted = {"memory", "pids", "cpu"}
    try:
        have = set((top / "cgroup.controllers").read_text(encoding="utf-8").split())
        if not wanted <= have:
            missing = ", ".join(sorted(wanted - have))
            return Cgroups("", {}, f"The controllers {missing} are not delegated to this user: not limited. {fix}")
        leaf = top / f"{name}{_LEAF}"
        leaf.mkdir(exist_ok=True)
        # A group with processes of its own cannot hand controllers on, so those that are here move to a leaf.
        for pid in (top / "cgroup.procs").read_text(encoding="utf-8").split():
            _write(str(leaf / "cgroup.procs"), pid)
        _write(str(top / "cgroup.subtree_control"), "+memory +pids +cpu")
        parent.mkdir(exist_ok=True)
        _write(str(parent / "cgroup.subtree_control"), "+memory +pids +cpu")
    except OSError as error:
        return Cgroups("", {}, f"Control groups are not delegated ({error.strerror}): nothing is limited. {fix}")
    return Cgroups(VERSION_2, {"unified": str(parent)})
