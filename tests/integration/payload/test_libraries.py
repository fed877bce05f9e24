"""Programs that are linked to a C library of the image, whichever that is, beside an agent that brings its own."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common import pods
from tests.integration.exec_agent.conftest import spec
from tests.integration.payload.conftest import client_of
from tests.support.payload import STOPPED, Container
from tests.support.testbed import busybox_root

SOURCE = Path(__file__).with_name("report.c")
COMPILERS = {"glibc": "cc", "musl": "musl-gcc"}


def libraries(program: Path) -> set[Path]:
    """What a program is loaded with, its loader included."""
    shown = subprocess.run(["readelf", "-ld", program], capture_output=True, text=True, check=True).stdout
    loader = Path(shown.partition("interpreter: ")[2].partition("]")[0])
    listed = subprocess.run([loader, "--list", program], capture_output=True, text=True, check=True).stdout
    return {loader} | {Path(word) for word in listed.split() if word.startswith("/") and Path(word) != program}


@pytest.fixture(params=COMPILERS)
def linked_root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A root of busybox, one C library, and a program that needs it."""
    root = busybox_root(tmp_path / "root")
    program = root / "bin/report"
    subprocess.run([COMPILERS[request.param], "-o", program, SOURCE], check=True)
    for library in libraries(program):
        inside = root / library.relative_to("/")
        inside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(library), inside)
    loader = f"ld-musl-{platform.machine()}" if request.param == "musl" else "ld-linux-"
    assert any(path.name.startswith(loader) for path in root.rglob("ld-*"))
    return root


async def test_a_command_is_loaded_with_the_images_library_alone(
    linked_root: Path, run_in: Callable[..., Container]
) -> None:
    inside = {f"/{path.relative_to(linked_root)}" for path in linked_root.rglob("*") if path.is_file()}
    container = run_in(linked_root)
    async with client_of(container) as client:
        for command in (spec("report"), spec(shell="report")):
            output = await client.run(command)
            environment, _, maps = output.stdout.decode().partition("--\n")
            mapped = {
                line.split()[5] for line in maps.splitlines() if len(line.split()) > 5 and line.split()[5][0] == "/"
            }
            assert mapped <= inside, mapped - inside
            assert len(mapped) > 1
            names = {line.partition("=")[0] for line in environment.splitlines()}
            assert not {name for name in names if name.startswith(("LD_", "PYTHON", "ORCHARD_", "GRPC_"))}
            assert pods.PAYLOAD_FOLDER not in environment
    assert container.stop() == STOPPED
