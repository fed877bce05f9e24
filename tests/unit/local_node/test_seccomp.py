"""The numbers of the system call filter, against the kernel's own headers, and its decisions, by running it."""

import re
import struct
from pathlib import Path

import pytest

from services.local.runtime import seccomp

_HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, ENOSYS, IGNORE = 0x7FFF0000, 0x80000000, 0x50001, 0x50026, 0x50000


def evaluate(program: bytes, number: int, *arguments: int, architecture: int) -> int:
    """Run a classic BPF program on a struct seccomp_data."""
    code = [struct.unpack_from("HBBI", program, offset) for offset in range(0, len(program), 8)]
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *([0] * (6 - len(arguments))))
    accumulator = position = 0
    while True:
        operation, yes, no, value = code[position]
        position += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif operation == 0x15:
            position += yes if accumulator == value else no
        elif operation == 0x35:
            position += yes if accumulator >= value else no
        elif operation == 0x45:
            position += yes if accumulator & value else no
        elif operation == 0x06:
            return value
        else:
            raise AssertionError(operation)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_numbers_are_the_kernels(machine: str) -> None:
    header = _HEADERS[machine]
    assert header.exists(), "install the package linux-libc-dev"
    text = header.read_text()
    numbers = {name: int(value) for name, value in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    column = 0 if machine == "x86_64" else 1
    tables = {**seccomp._DENIED, **seccomp._CHOWN, "clone": seccomp._CLONE, "unshare": seccomp._UNSHARE}
    tables["ioctl"] = seccomp._IOCTL
    newer = {"open_tree_attr", "quotactl_fd"}
    for name, pair in tables.items():
        if name in numbers:
            assert pair[column] == numbers[name], name
        else:
            assert pair[column] is None or name in newer, name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("ignore_chown", [False, True])
def test_decisions(machine: str, ignore_chown: bool) -> None:
    column = 0 if machine == "x86_64" else 1
    program = seccomp.program(ignore_chown=ignore_chown, machine=machine)

    def decide(number: int, *arguments: int) -> int:
        return evaluate(program, number, *arguments, architecture=_AUDIT[machine])

    for pair in seccomp._DENIED.values():
        if pair[column] is not None:
            assert decide(pair[column]) == EPERM
    for pair in seccomp._CHOWN.values():
        if pair[column] is not None:
            assert decide(pair[column]) == (IGNORE if ignore_chown else ALLOW)
    clone, unshare, ioctl = seccomp._CLONE[column], seccomp._UNSHARE[column], seccomp._IOCTL[column]
    assert decide(clone, 0x10000011) == EPERM
    assert decide(clone, 17) == ALLOW
    assert decide(unshare, 0x10000000) == EPERM
    assert decide(unshare, 0x20000) == ALLOW
    assert decide(ioctl, 0, 0x5412) == EPERM
    assert decide(ioctl, 0, 0x541C) == EPERM
    assert decide(ioctl, 0, 0x5401) == ALLOW
    assert decide(435) == ENOSYS
    assert decide({"x86_64": 59, "aarch64": 221}[machine]) == ALLOW  # execve
    other = _AUDIT["aarch64" if machine == "x86_64" else "x86_64"]
    assert evaluate(program, 0, architecture=other) == KILL
    if machine == "x86_64":
        assert decide(0x40000000 | 59) == ENOSYS


def test_other_machines_are_refused() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        seccomp.program(ignore_chown=False, machine="riscv64")
