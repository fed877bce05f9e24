"""The first process of a sandbox where the launcher could not be built: a static program of two hundred bytes.

It does the least that an init must, in the order of launcher.c: nobody inside may look into it, every orphan is reaped
(by the kernel, as SIGCHLD is ignored), all descriptors but the lifeline are closed, and it ends when the lifeline does.
A process 1 of a namespace gets no signal from inside that it has no handler for, so it handles none.

The code is what an assembler makes of the source beside this file; a test compares them. Linux 5.9.
"""

from __future__ import annotations

import platform
import struct
from typing import Final

from services.exec_agent.launcher import hold_program

_CODE: Final = {
    "x86_64": (
        "b89d000000bf0400000031f60f056a006a006a006a01b80d000000bf110000004889e631d241ba080000000f05bb7f7f"
        "7f7fb8b4010000bf030000008d73ff0f05b8b40100008d7b01beffffffff0f0548891c24c644240401b80f0100004889"
        "e7be0100000031d24531d241b8080000000f0531c089df4889e6ba080000000f0583f8007fca83f8f574c583f8fc74c0"
        "b8e700000031ff0f05"
    ),
    "aarch64": (
        "e81480d2800080d2010080d2010000d4ff8300d1210080d2e17f00a9ff7f01a9c81080d2200280d2e1030091020080d2"
        "030180d2010000d453040018883680d2600080d261060051020080d2010000d4883680d26006001101008012020080d2"
        "010000d421008052f3070029280980d2e0030091210080d2020080d2030080d2040180d2010000d4e80780d2e003132a"
        "e1030091020180d2010000d41f0000712cfeff541f2c0031e0fdff541f100031a0fdff54c80b80d2000080d2010000d4"
        "7f7f7f7f"
    ),
}
_ELF_MACHINE: Final = {"x86_64": 62, "aarch64": 183}
LIFELINE_MARK: Final = b"\x7f\x7f\x7f\x7f"
"""Stands in the code where the lifeline's number goes."""
_ADDRESS: Final = 0x400000
_EHDR: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR: Final = struct.Struct("<IIQQQQQQ")
_EXECUTABLE: Final = 2
_LOAD: Final = 1
_READ_AND_EXECUTE: Final = 5


class PlainInitError(Exception):
    """There is no code for this machine."""


def code_of(machine: str) -> bytes:
    """The code, with LIFELINE_MARK in it.

    Raises:
        PlainInitError: there is none for this kind of machine.
    """
    try:
        return bytes.fromhex(_CODE[machine])
    except KeyError:
        known = " and ".join(_CODE)
        raise PlainInitError(
            f"the launcher is not built, and only {known} can do without, not {machine}: run scripts/build-launcher"
        ) from None


def program(lifeline: int, machine: str) -> bytes:
    """An executable file that holds on to the descriptor `lifeline` until its other end is closed.

    Raises:
        PlainInitError: there is no code for this kind of machine.
    """
    code = code_of(machine).replace(LIFELINE_MARK, struct.pack("<I", lifeline))
    start = _EHDR.size + _PHDR.size
    size = start + len(code)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")  # 64 bits, little-endian
    header = _EHDR.pack(
        *(ident, _EXECUTABLE, _ELF_MACHINE[machine], 1, _ADDRESS + start, _EHDR.size, 0, 0),
        *(_EHDR.size, _PHDR.size, 1, 0, 0, 0),
    )
    segment = _PHDR.pack(_LOAD, _READ_AND_EXECUTE, 0, _ADDRESS, _ADDRESS, size, size, 0x1000)
    return header + segment + code


def open_plain_init(lifeline: int) -> int:
    """A descriptor of the program, to be executed as /proc/self/fd/N. The caller closes it.

    Raises:
        PlainInitError: there is no code for this machine.
    """
    return hold_program(program(lifeline, platform.machine()))
