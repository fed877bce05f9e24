"""The default root file system: the host's programs, and nothing of the host's that is private.

A base layer holds the top folders and fresh /home, /root and /tmp. The host's /usr, /etc and package databases lie
over it as overlays, each under a mask layer that hides what other users of the machine could not read either, and
what names the machine's own accounts and services.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.local.runtime import submounts

VERSION: Final = "2"
HOST_NAME: Final = "sandbox"

# Folders of the host that a sandbox sees, each as an overlay of its own. Of /var only the package databases: the rest
# is the host's state.
_SHOWN: Final = ("/usr", "/etc", "/opt", "/var/lib/dpkg", "/var/lib/pacman", "/var/lib/rpm")
# Top folders that are links into /usr on most systems and folders of their own on the others.
_PROGRAM_FOLDERS: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_EMPTY: Final = {
    **dict.fromkeys(("proc", "dev", "sys", "run", "home", "mnt", "srv", "media", "boot", "opt", "usr", "etc"), 0o755),
    **dict.fromkeys(("var", "var/lib", "var/lib/misc", "var/log", "var/log/apt", "var/spool", "var/opt"), 0o755),
    **dict.fromkeys(("var/lib/apt", "var/lib/apt/lists", "var/lib/apt/lists/partial"), 0o755),
    **dict.fromkeys(("var/cache", "var/cache/debconf", "var/cache/apt"), 0o755),
    **dict.fromkeys(("var/cache/apt/archives", "var/cache/apt/archives/partial"), 0o755),
    "tmp": 0o1777,
    "var/tmp": 0o1777,
    "run/lock": 0o1777,
    "root": 0o700,
}
_HIDDEN_IN_ETC: Final = (
    *("ssh", "sudoers", "sudoers.d", "kubernetes", "docker", "cni", "containerd", "containers", "rancher", "crio"),
    *(
        "subuid",
        "subgid",
        "passwd-",
        "group-",
        "shadow-",
        "gshadow-",
        "subuid-",
        "subgid-",
        "fstab",
        "mtab",
        "crypttab",
    ),
    *("krb5.keytab", "ssl/private", "cron.d", "NetworkManager", "wireguard", "openvpn", "postgresql", "mysql", "redis"),
)
_SYSTEM_IDS: Final = 1000
_NOBODY: Final = 65534


@dataclass(frozen=True, slots=True)
class Shown:
    """One overlay: a folder of the host, where it appears, and the mask over it."""

    source: str
    target: str
    mask: str | None


@dataclass(frozen=True, slots=True)
class Bound:
    """Something of the machine that is shown read-only, and where; it may lie over another one."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class HostRoot:
    """The default root: its base layer, the overlays over it, and what is bound over those.

    Attributes:
        base: the lowest layer.
        overlays: folders that a sandbox can write to.
        bounds: folders that it cannot, each followed by what covers parts of it.
        gaps: what is less than it should be, each a sentence with the fix.
    """

    base: str
    overlays: tuple[Shown, ...]
    bounds: tuple[Bound, ...] = ()
    gaps: tuple[str, ...] = ()


def build_host_root(
    folder: Path, *, owner: int | None, private: Iterable[Path], single: bool, stackable: bool
) -> HostRoot:
    """Build base and masks in `folder`, or find them there.

    Args:
        folder: where; what other versions left there stays for sandboxes that use it.
        owner: make the machine's user of this number their owner; None without the privilege.
        private: folders that no sandbox may see, wherever they are.
        single: the sandbox has one user id: tell apt.
        stackable: an overlay can have a lower layer below which something is mounted.
    """
    shown = [path for path in (*_SHOWN, *_PROGRAM_FOLDERS) if _is_folder(path)]
    hidden = {path: _hidden(path, private) for path in shown}
    mounted = {} if stackable else _mounted(shown)
    copies = {path: submounts.small_enough(path, hidden[path], inner) for path, inner in mounted.items()}
    files = _synthetic_files(single=single)
    digest = _digest(hidden, files, owner, {path: copy.digest for path, copy in copies.items() if copy})
    target = folder / digest
    if not target.exists():
        temporary = folder / f".{digest}.new"
        shutil.rmtree(temporary, ignore_errors=True)
        _build(temporary, shown, hidden, files)
        for path, copy in copies.items():
            if copy is not None:
                copy.copy(temporary / f"c{shown.index(path)}")
        if owner is not None:
            _own(temporary, owner)
        temporary.rename(target)
    overlays, bounds, gaps = [], [], []
    for index, path in enumerate(shown):
        if path in mounted and copies[path] is None:
            bounds += [Bound(path, path), *_covers(path, {*hidden[path], *mounted[path]}, target / "empty")]
            gaps.append(
                f"{path} is read-only in sandboxes, since {path}/{mounted[path][0]} is mounted below it: "
                "unmount that, or start as root."
            )
            continue
        mask = target / f"m{index}"
        source = str(target / f"c{index}") if path in mounted else path
        overlays.append(Shown(source, path, str(mask) if mask.exists() else None))
    return HostRoot(str(target / "r"), tuple(overlays), tuple(bounds), tuple(gaps))


def _mounted(shown: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """What is mounted below each folder, where something is."""
    points = submounts.mount_points()
    found = {path: submounts.below(path, points) for path in shown}
    return {path: inner for path, inner in found.items() if inner}


def _covers(path: str, names: Iterable[str], empty: Path) -> list[Bound]:
    """What hides some of a folder that is bound whole."""
    found = []
    for name in sorted(names):
        target = f"{path}/{name}"
        try:
            is_folder = stat.S_ISDIR(os.lstat(target).st_mode)
        except OSError:
            is_folder = True  # a file system that is somebody else's alone
        found.append(Bound(str(empty) if is_folder else "/dev/null", target))
    return found


def _is_folder(path: str) -> bool:
    """A folder of its own with something in it."""
    return os.path.isdir(path) and not os.path.islink(path) and bool(os.listdir(path))  # noqa: PTH112, PTH114, PTH208


def _digest(
    hidden: Mapping[str, list[str]],
    files: Mapping[str, tuple[str, int]],
    owner: int | None,
    copies: Mapping[str, str],
) -> str:
    links = [(path, os.readlink(path)) for path in _PROGRAM_FOLDERS if os.path.islink(path)]  # noqa: PTH114, PTH115
    text = repr((VERSION, sorted(hidden.items()), sorted(files.items()), owner, links, _EMPTY, sorted(copies.items())))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _hidden(top: str, private: Iterable[Path]) -> list[str]:
    """Paths below `top`, relative to it, that a sandbox must not see."""
    found = {str(path.relative_to(top)) for path in private if path.is_relative_to(top) and str(path) != top}
    if top == "/etc":
        found.update(name for name in _HIDDEN_IN_ETC if os.path.lexists(f"{top}/{name}"))
        found.update(_unreadable(top, depth=6))
    elif top != "/usr":
        found.update(_unreadable(top, depth=2))
    # What is below something hidden needs no entry of its own.
    return sorted(p for p in found if not any(p.startswith(f"{other}/") for other in found))


def _unreadable(top: str, *, depth: int) -> list[str]:
    """What "others" may not read on the host: a sandbox's root, as owner of the shifted layers, could."""
    found: list[str] = []
    pending = [(top, depth)]
    while pending:
        folder, left = pending.pop()
        try:
            entries = list(os.scandir(folder))
        except PermissionError:
            continue
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            is_folder = stat.S_ISDIR(mode)
            needed = stat.S_IROTH | (stat.S_IXOTH if is_folder else 0)
            if not stat.S_ISLNK(mode) and mode & needed != needed:
                found.append(os.path.relpath(entry.path, top))
            elif is_folder and left > 1:
                pending.append((entry.path, left - 1))
    return found


def _synthetic_files(*, single: bool) -> dict[str, tuple[str, int]]:
    """Files of /etc that are made up: text and mode."""
    accounts = _system_lines("/etc/passwd") or ["root:x:0:0:root:/root:/bin/sh"]
    groups = _system_lines("/etc/group") or ["root:x:0:"]
    names = {line.split(":", 1)[0] for line in accounts}
    groups = [_only_members(line, names) for line in groups]
    files = {
        "passwd": ("\n".join(accounts) + "\n", 0o644),
        "group": ("\n".join(groups) + "\n", 0o644),
        "shadow": ("".join(f"{line.split(':', 1)[0]}:*:19000:0:99999:7:::\n" for line in accounts), 0o640),
        "gshadow": ("".join(f"{line.split(':', 1)[0]}:*::\n" for line in groups), 0o640),
        "hosts": (f"127.0.0.1 localhost {HOST_NAME}\n::1 localhost\n", 0o644),
        "hostname": (f"{HOST_NAME}\n", 0o644),
        "resolv.conf": ("", 0o644),
        "machine-id": ("", 0o644),
    }
    if single and os.path.isdir("/etc/apt/apt.conf.d"):  # noqa: PTH112
        # apt drops to a user of its own to download, which one id does not allow.
        files["apt/apt.conf.d/90orchard"] = ('APT::Sandbox::User "root";\n', 0o644)
    return files


def _system_lines(path: str) -> list[str]:
    """Lines of a passwd or group file that every machine has alike: no people."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    kept = []
    for line in lines:
        fields = line.split(":")
        if len(fields) >= 4 and fields[2].isdigit() and (int(fields[2]) < _SYSTEM_IDS or int(fields[2]) == _NOBODY):
            kept.append(line)
    return kept


def _only_members(line: str, names: set[str]) -> str:
    head, _, members = line.rpartition(":")
    return f"{head}:{','.join(m for m in members.split(',') if m in names)}"


def _build(
    target: Path, shown: list[str], hidden: Mapping[str, list[str]], files: Mapping[str, tuple[str, int]]
) -> None:
    base = target / "r"
    base.mkdir(parents=True)
    (target / "empty").mkdir(mode=0o755)
    for name, mode in _EMPTY.items():
        (base / name).mkdir()
        (base / name).chmod(mode)
    for path in _PROGRAM_FOLDERS:
        if os.path.islink(path):  # noqa: PTH114
            (base / path.lstrip("/")).symlink_to(os.readlink(path))  # noqa: PTH115
    (base / "var" / "run").symlink_to("../run")
    (base / "var" / "lock").symlink_to("../run/lock")
    for index, top in enumerate(shown):
        # The point that the overlay is mounted on.
        (base / top.lstrip("/")).mkdir(parents=True, exist_ok=True)
        made = files if top == "/etc" else {}
        if hidden[top] or made:
            _build_mask(target / f"m{index}", Path(top), hidden[top], made)
    for folder in (target, base):
        folder.chmod(0o755)


def _build_mask(mask: Path, top: Path, hidden: list[str], files: Mapping[str, tuple[str, int]]) -> None:
    mask.mkdir()
    mask.chmod(stat.S_IMODE(top.stat().st_mode))
    for name in hidden:
        if name in files:
            continue
        _make_parents(mask, top, name)
        os.mknod(mask / name, stat.S_IFCHR, 0)  # an overlay's whiteout
    for name, (text, mode) in files.items():
        _make_parents(mask, top, name)
        (mask / name).write_text(text, encoding="utf-8")
        (mask / name).chmod(mode)


def _make_parents(mask: Path, top: Path, name: str) -> None:
    """Folders above `name`, with the modes that they have on the host: an overlay takes those of its highest layer."""
    path = Path()
    for part in Path(name).parts[:-1]:
        path /= part
        if not (mask / path).exists():
            (mask / path).mkdir()
            (mask / path).chmod(stat.S_IMODE((top / path).stat().st_mode) if (top / path).is_dir() else 0o755)


def _own(folder: Path, owner: int) -> None:
    for parent, names, files in os.walk(folder):
        os.chown(parent, owner, owner)
        for name in (*names, *files):
            os.chown(os.path.join(parent, name), owner, owner, follow_symlinks=False)  # noqa: PTH118
