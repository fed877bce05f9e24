"""The code of the first process that needs no compiler is what an assembler makes of the source beside it."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from services.local.runtime import plain_init
from services.local.runtime.plain_init import LIFELINE_MARK, PlainInitError, code_of, open_plain_init, program

SOURCES = Path(plain_init.__file__).parent
MACHINES = ("x86_64", "aarch64")


def tool(name: str, machine: str) -> str:
    """An assembler's tool for that machine, if there is one here."""
    cross = shutil.which(f"{machine}-linux-gnu-{name}")
    found = cross or (shutil.which(name) if machine == platform.machine() else None)
    if found is None:
        pytest.skip(f"no {name} for {machine}; Debian: apt-get install binutils-{machine.replace('_', '-')}-linux-gnu")
    return found


@pytest.mark.parametrize("machine", MACHINES)
def test_the_code_is_that_of_its_source(machine: str, tmp_path: Path) -> None:
    source, made, code = SOURCES / f"{machine}.s", tmp_path / "made.o", tmp_path / "code"
    subprocess.run([tool("as", machine), str(source), "-o", str(made)], check=True, timeout=110)
    extract = [tool("objcopy", machine), "-O", "binary", "-j", ".text", str(made), str(code)]
    subprocess.run(extract, check=True, timeout=110)
    assert code.read_bytes() == code_of(machine)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_lifeline_has_one_place(machine: str) -> None:
    assert code_of(machine).count(LIFELINE_MARK) == 1
    assert LIFELINE_MARK not in program(77, machine)
    assert (77).to_bytes(4, "little") in program(77, machine)


def test_another_machine_is_told_what_to_do() -> None:
    with pytest.raises(PlainInitError, match=r"not riscv64: run scripts/build-launcher"):
        program(3, "riscv64")


@pytest.mark.skipif(platform.machine() not in MACHINES, reason="there is no code for this machine")
def test_it_holds_on_until_the_lifeline_ends() -> None:
    lifeline, other_end = os.pipe()
    descriptor = open_plain_init(lifeline)
    stray, stray_other_end = os.pipe()
    try:
        process = subprocess.Popen([f"/proc/self/fd/{descriptor}"], pass_fds=[descriptor, lifeline, stray_other_end])
        os.close(stray_other_end)
        # Its copy of a descriptor that it need not have is closed first of all: the end of file tells.
        assert os.read(stray, 1) == b""
        assert process.poll() is None
        os.write(other_end, b"words on a lifeline mean nothing")
        assert process.poll() is None
        os.close(other_end)
        assert process.wait(110) == 0
    finally:
        for number in (lifeline, descriptor, stray):
            os.close(number)
