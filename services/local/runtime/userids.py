"""Which of the three levels of user ids this machine allows; the best that really works is taken (process.py tries
them).
"""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path
from typing import Final

from services.local.runtime.plan import RUN_MAP_TOOLS, WRITE_MAPS, Ids, Range

SHIFTED: Final = "shifted"
SUBIDS: Final = "subids"
SINGLE: Final = "single"
_SHIFT: Final = 100_000
_COUNT: Final = 65_536

USER_GAP: Final = (
    "Commands run as one user id: `user` and owners of files cannot be changed. "
    "Install the package uidmap and give this user a range in /etc/subuid and /etc/subgid, or run as root."
)


def candidates() -> list[Ids]:
    """Levels to try, best first."""
    if os.geteuid() == 0:
        shifted = (Range(0, _SHIFT, _SHIFT, _COUNT),)
        return [
            Ids(SHIFTED, shifted, WRITE_MAPS, own_user=_SHIFT, mapped_layers=True),
            # A kernel or file system without idmapped mounts: never the identity map, which would make root inside
            # root outside.
            Ids(SUBIDS, shifted, WRITE_MAPS, own_user=_SHIFT, mapped_layers=False),
        ]
    user, group = os.geteuid(), os.getegid()
    own = Range(0, user, group, 1)
    levels = []
    users, groups = _sub_range("/etc/subuid", user), _sub_range("/etc/subgid", user)
    if users and groups and shutil.which("newuidmap") and shutil.which("newgidmap"):
        count = min(users[1], groups[1], _COUNT - 1)
        levels.append(Ids(SUBIDS, (own, Range(1, users[0], groups[0], count)), RUN_MAP_TOOLS))
    levels.append(Ids(SINGLE, (own,), WRITE_MAPS))
    return levels


def _sub_range(path: str, user: int) -> tuple[int, int] | None:
    """The first range that the file gives to this user: where it begins and how many."""
    try:
        names = {str(user), pwd.getpwuid(user).pw_name}
    except KeyError:
        names = {str(user)}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split(":")
        if len(fields) == 3 and fields[0] in names and fields[1].isdigit() and fields[2].isdigit():
            return int(fields[1]), int(fields[2])
    return None


def why_none(errors: list[tuple[Ids, str]]) -> str:
    """One error that says what to do when no level works."""
    tried = "; ".join(f"{ids.level}: {error}" for ids, error in errors)
    fixes = []
    if _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        fixes.append(
            "AppArmor forbids user namespaces to ordinary users here (Ubuntu 24.04 and later): run "
            "`sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`, install an AppArmor profile that allows "
            "userns for this program, run as root, or use `--runtime docker`"
        )
    if _read("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        fixes.append("user namespaces are off: run `sudo sysctl -w kernel.unprivileged_userns_clone=1`, or run as root")
    if _read("/proc/sys/user/max_user_namespaces") == "0":
        fixes.append("user namespaces are off: run `sudo sysctl -w user.max_user_namespaces=15000`")
    if not fixes:
        fixes.append(
            "in a container, start it with `--privileged`, or with `--security-opt seccomp=unconfined --security-opt "
            "systempaths=unconfined --cap-add SYS_ADMIN`; elsewhere a kernel of 5.11 or newer that has user namespaces "
            "is needed"
        )
    return f"this machine allows no sandboxes. What to do: {'; or '.join(fixes)}. What was tried: {tried}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
