"""Linux system calls that Python 3.11 lacks, by ctypes. Every function raises OSError with the call's name."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
import time
from pathlib import Path
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_SET_NAME: Final = 15
PR_CAPBSET_READ: Final = 23
PR_CAPBSET_DROP: Final = 24
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38
PR_CAP_AMBIENT: Final = 47
PR_CAP_AMBIENT_CLEAR_ALL: Final = 4

RESOLVE_NO_MAGICLINKS: Final = 2
RESOLVE_IN_ROOT: Final = 0x10

_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_OPEN_TREE_CLONE: Final = 1
_MOUNT_ATTR_IDMAP: Final = 0x00100000
_MOVE_MOUNT_F_EMPTY_PATH: Final = 4
_KEYCTL_JOIN_SESSION_KEYRING: Final = 1
_SECCOMP_SET_MODE_FILTER: Final = 1
_SYSLOG_ACTION_READ_ALL: Final = 3
_KERNEL_LOG_BYTES: Final = 256 << 10
_LOG_SLACK_SECONDS: Final = 1.0
_CAPABILITY_VERSION_3: Final = 0x20080522

# Numbers from 424 on are the same on every architecture.
_OPEN_TREE: Final = 428
_MOVE_MOUNT: Final = 429
_OPENAT2: Final = 437
_MOUNT_SETATTR: Final = 442

_ARCHITECTURE_NUMBERS: Final = {
    "x86_64": {"keyctl": 250, "pivot_root": 155, "seccomp": 317, "capset": 126},
    "aarch64": {"keyctl": 219, "pivot_root": 41, "seccomp": 277, "capset": 91},
}

_libc: Final = ctypes.CDLL(None, use_errno=True)


def _check(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _number(name: str) -> int:
    try:
        return _ARCHITECTURE_NUMBERS[platform.machine()][name]
    except KeyError:
        raise OSError(f"{name}: this runtime knows x86_64 and aarch64, not {platform.machine()}") from None


def _syscall(number: int, name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    longs = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *longs), name)


def setns(descriptor: int, flags: int) -> None:
    """Join namespaces; a pidfd joins several at once."""
    _check(_libc.setns(descriptor, flags), "setns")


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    _check(_libc.unshare(flags), "unshare")


def prctl(option: int, *arguments: int) -> int:
    """Operate on this process or thread; unused arguments are zero."""
    longs = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    return _check(_libc.prctl(option, *longs), f"prctl {option}")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    """Mount a file system."""
    encoded = None if kind is None else kind.encode()
    result = _libc.mount(source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), data.encode())
    _check(result, f"mount {target}")


def detach(target: str) -> None:
    """Unmount at once, whatever still uses it."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH | _UMOUNT_NOFOLLOW), f"umount {target}")


def become_subreaper() -> None:
    """From now on, processes below this one whose parent dies become its children."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def pivot_root(new: str, put_old: str) -> None:
    """Make a mount the root of this mount namespace."""
    _syscall(_number("pivot_root"), "pivot_root", new.encode(), put_old.encode())


def bind_without_submounts(source: str, target: str, user_namespace: int | None = None) -> None:
    """Mount `source` on `target` without anything that is mounted below it, ids mapped by a user namespace if given."""
    tree = _syscall(_OPEN_TREE, f"open_tree {source}", _AT_FDCWD, source.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    try:
        if user_namespace is not None:
            attributes = struct.pack("QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, user_namespace)
            _syscall(_MOUNT_SETATTR, f"mount_setattr {source}", tree, b"", _AT_EMPTY_PATH, attributes, len(attributes))
        _syscall(_MOVE_MOUNT, f"move_mount {target}", tree, b"", _AT_FDCWD, target.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(tree)


def open_in_root(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a path below the folder `root` as if that were "/": no link and no ".." leads out of it."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    return _syscall(_OPENAT2, "openat2", root, os.fsencode(path), how, len(how))


def new_session_keyring() -> None:
    """Leave the session keyring for an empty one; a kernel without keyrings has nothing to leave."""
    try:
        _syscall(_number("keyctl"), "keyctl", _KEYCTL_JOIN_SESSION_KEYRING, None)
    except OSError:
        # ENOSYS without CONFIG_KEYS, EPERM in a container that forbids it, EDQUOT never for a first ring.
        return


def kernel_log() -> str:
    """The newest part of the kernel's log, as far as this user may read it."""
    buffer = ctypes.create_string_buffer(_KERNEL_LOG_BYTES)
    size = _check(_libc.klogctl(_SYSLOG_ACTION_READ_ALL, buffer, _KERNEL_LOG_BYTES), "klogctl")
    return buffer.raw[:size].decode(errors="replace")


def killed_for_memory(pid: int, start: int) -> bool:
    """Whether the kernel says that it killed this very process. A counter of the machine would tell of others, too.

    Args:
        pid: its id, which an earlier process may have had.
        start: its start time in clock ticks since boot.
    """
    try:
        log = kernel_log()
    except OSError:
        return False  # not ours to read (kernel.dmesg_restrict): then nothing is claimed
    # The log's clock stands still while the machine sleeps.
    asleep = time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    since = start / os.sysconf("SC_CLK_TCK") - asleep - _LOG_SLACK_SECONDS
    return killed_since(log, pid, since)


def killed_since(log: str, pid: int, since: float) -> bool:
    """Whether a kernel's log has the end of a process by lack of memory, after so many seconds from boot on.

    A line without a time counts.
    """
    found = re.findall(rf"^(?:<\d+>)?(?:\[ *(\d+\.\d+)\])?.*Killed process {pid} \(", log, re.MULTILINE)
    return any(not seconds or float(seconds) >= since for seconds in found)


def seccomp(program: bytes) -> None:
    """Install a filter for this process and all that come of it; needs no_new_privs or CAP_SYS_ADMIN."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    _syscall(_number("seccomp"), "seccomp", _SECCOMP_SET_MODE_FILTER, 0, header)


def set_capabilities(mask: int) -> None:
    """Set effective and permitted capabilities to a bit mask and the inheritable ones to none."""
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _syscall(_number("capset"), "capset", header, struct.pack("6I", low, low, 0, high, high, 0))


def user_namespace(uid_map: str, gid_map: str) -> int:
    """A descriptor of a new user namespace with these maps; needs the privilege to write them."""
    ready_read, ready_write = os.pipe()
    stop_read, stop_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(stop_write)
            unshare(CLONE_NEWUSER)
            os.write(ready_write, b"1")
            os.read(stop_read, 1)
        finally:
            os._exit(0)
    os.close(ready_write)
    os.close(stop_read)
    try:
        if not os.read(ready_read, 1):
            raise OSError("the kernel refuses a new user namespace")
        Path(f"/proc/{child}/uid_map").write_text(uid_map)
        Path(f"/proc/{child}/gid_map").write_text(gid_map)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(stop_write)
        os.close(ready_read)
        os.waitpid(child, 0)
