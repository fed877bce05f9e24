"""Arguments of bwrap: what a sandbox's root looks like."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.local.runtime.rootfs import HOST_NAME

DEFAULT_SHM_BYTES: Final = 64 << 20
# What tells of the whole machine though every user may read it. The rest of the kind (slabinfo, timer_list,
# vmallocinfo, kcore, kpage*) only the machine's root may, which a sandbox's root never is.
_HIDDEN_FILES: Final = ("keys", "key-users", "sched_debug", "timer_list", "slabinfo", "vmallocinfo", "kallsyms")
_OTHERS_MAY_READ: Final = 0o004


@dataclass(frozen=True, slots=True)
class Overlay:
    """A mount of stacked folders, the lowest first, with an upper layer of the sandbox's own."""

    target: str
    lowers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Root:
    """What to mount.

    Attributes:
        overlays: in order, "/" first.
        bounds: source and target of what is shown read-only, in order, after the overlays.
        resolver: a resolv.conf of the machine to show, for a sandbox on the machine's network.
        shm_bytes: size of /dev/shm.
        host_network: stay in the machine's network.
    """

    overlays: tuple[Overlay, ...]
    bounds: tuple[tuple[str, str], ...] = ()
    shm_bytes: int = 0
    host_network: bool = False
    resolver: str | None = None


def arguments(root: Root, sandbox: str) -> tuple[str, ...]:
    """All but descriptors and the command. `sandbox` is the folder with the upper layers u/N and work folders w/N."""
    flags = ["--unshare-user", "--uid", "0", "--gid", "0", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    flags += ["--unshare-cgroup", "--new-session", "--hostname", HOST_NAME]
    if not root.host_network:
        flags.append("--unshare-net")
    for index, overlay in enumerate(root.overlays):
        for lower in overlay.lowers:
            flags += ["--overlay-src", lower]
        flags += ["--overlay", f"{sandbox}/u/{index}", f"{sandbox}/w/{index}", overlay.target]
    for source, target in root.bounds:
        flags += ["--ro-bind", source, target]
    flags += ["--proc", "/proc", "--dev", "/dev"]
    # Parts of it belong to whoever owns the network namespace.
    flags += ["--ro-bind", "/proc/sys", "/proc/sys"]
    for name in _readable(_HIDDEN_FILES):
        flags += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    flags += ["--perms", "1777", "--size", str(root.shm_bytes or DEFAULT_SHM_BYTES), "--tmpfs", "/dev/shm"]  # noqa: S108
    if root.resolver is not None:
        flags += ["--ro-bind", root.resolver, "/etc/resolv.conf"]
    return (*flags, "--clearenv", "--chdir", "/")


def _readable(names: Iterable[str]) -> list[str]:
    found = []
    for name in names:
        try:
            if os.stat(f"/proc/{name}").st_mode & _OTHERS_MAY_READ:  # noqa: PTH116
                found.append(name)
        except FileNotFoundError:
            continue
    return found
