"""The system call filter of a sandbox's agent and of everything that it starts: a deny list as a classic BPF program.

Denied is what reaches past the namespaces (mounts, new user namespaces, keyrings, kernel modules, bpf, perf,
io_uring, userfaultfd): what container engines deny by default. Numbers are of the kernel's tables asm/unistd_64.h and
asm-generic/unistd.h.
"""

from __future__ import annotations

import errno
import platform
import struct
from typing import Final

_LOAD: Final = 0x20
_EQUAL: Final = 0x15
_AT_LEAST: Final = 0x35
_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06

_ALLOW: Final = 0x7FFF0000
_KILL: Final = 0x80000000
_ERRNO: Final = 0x00050000

_OFFSET_NUMBER: Final = 0
_OFFSET_ARCHITECTURE: Final = 4
_OFFSET_ARGUMENTS: Final = 16

_CLONE_NEWUSER: Final = 0x10000000
_CLONE3: Final = 435
_X32: Final = 0x40000000
# Both push bytes into a terminal's input: a way out of a sandbox that got the caller's terminal.
_TIOCSTI: Final = 0x5412
_TIOCLINUX: Final = 0x541C

_AUDIT: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# (x86_64, aarch64); None where the architecture has no such call.
_DENIED: Final[dict[str, tuple[int | None, int | None]]] = {
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "setns": (308, 268),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "ioperm": (173, None),
    "iopl": (172, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "_sysctl": (156, None),
}
_CHOWN: Final[dict[str, tuple[int | None, int | None]]] = {
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
}
_CLONE: Final = (56, 220)
_UNSHARE: Final = (272, 97)
_IOCTL: Final = (16, 29)

_Instruction = tuple[int, int, int, int]


def _answer(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)


def _unless_argument(call: int, argument: int, test: int, value: int) -> list[_Instruction]:
    """EPERM to `call` if `test` holds for the low half of one of its arguments."""
    return [
        (_EQUAL, 0, 4, call),
        (_LOAD, 0, 0, _OFFSET_ARGUMENTS + 8 * argument),
        (test, 0, 1, value),
        _answer(errno.EPERM),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]


def program(*, ignore_chown: bool, machine: str | None = None) -> bytes:
    """The filter for an architecture (default: this machine's).

    With `ignore_chown` every change of owner is answered with success and does nothing, for a sandbox that has but
    one user id.

    Raises:
        ValueError: the architecture is not x86_64 or aarch64.
    """
    machine = machine or platform.machine()
    if machine not in _AUDIT:
        raise ValueError(f"the system call filter knows x86_64 and aarch64, not {machine}")
    column = 0 if machine == "x86_64" else 1
    code: list[_Instruction] = [
        (_LOAD, 0, 0, _OFFSET_ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32), _answer(errno.ENOSYS)]
    # Its flags are in memory, out of a filter's sight: with ENOSYS every C library falls back to clone.
    code += [(_EQUAL, 0, 1, _CLONE3), _answer(errno.ENOSYS)]
    for call in (_CLONE[column], _UNSHARE[column]):
        code += _unless_argument(call, 0, _ANY_BIT, _CLONE_NEWUSER)
    for request in (_TIOCSTI, _TIOCLINUX):
        code += _unless_argument(_IOCTL[column], 1, _EQUAL, request)
    if ignore_chown:
        code += _answers(_CHOWN, column, 0)
    code += _answers(_DENIED, column, errno.EPERM)
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _answers(calls: dict[str, tuple[int | None, int | None]], column: int, number: int) -> list[_Instruction]:
    code: list[_Instruction] = []
    for numbers in calls.values():
        call = numbers[column]
        if call is not None:
            code += [(_EQUAL, 0, 1, call), _answer(number)]
    return code
