"""The agent needs nothing of the image, and gives nothing of its own to what runs there."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from orchard.sandbox.v1 import sandbox_pb2

from tests.integration.exec_agent.conftest import problem, spec
from tests.integration.payload.conftest import client_of
from tests.support.payload import STOPPED, Container
from tests.support.testbed import busybox_root, static_busybox

GARBAGE = b"\x7fELF" + b"\0" * 4096


def scratch(root: Path) -> None:
    """One static program."""
    program(root / "tool/cat")


def distroless(root: Path) -> None:
    """Users, folders and a program, and no shell."""
    program(root / "usr/bin/cat")
    for name in ("etc", "home/nonroot", "tmp", "var"):
        (root / name).mkdir(parents=True)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532::/home/nonroot:/sbin/nologin\n"
    )
    (root / "etc/os-release").write_text('NAME="Debian GNU/Linux"\n')


def broken(root: Path) -> None:
    """All that a C library, a loader, an interpreter or OpenSSL looks at is there, and none of it can be used."""
    busybox_root(root)
    libraries = [
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
        "ld-musl-x86_64.so.1",
        "libc.so.6",
        "libm.so.6",
        "libz.so.1",
    ]
    libraries += [
        "libpthread.so.0",
        "libdl.so.2",
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libssl.so.3",
        "libcrypto.so.3",
        "libnss_odd.so.2",
    ]
    for folder in (
        "lib",
        "lib64",
        "usr/lib",
        "usr/lib/x86_64-linux-gnu",
        "lib/x86_64-linux-gnu",
        "lib/aarch64-linux-gnu",
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name in libraries:
            (root / folder / name).write_bytes(GARBAGE)
    (root / "etc/ld.so.preload").write_text("/usr/lib/libc.so.6\n")
    (root / "etc/ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1" + b"\xff" * 400)
    (root / "etc/nsswitch.conf").write_text("passwd: odd\ngroup: odd\nhosts: odd\n")
    for folder in ("usr/lib/ssl", "etc/ssl"):
        (root / folder).mkdir(parents=True)
        (root / folder / "openssl.cnf").write_text("openssl_conf = odd\n[odd\n")
    for module in ("os", "site", "sitecustomize", "encodings", "grpc", "services"):
        for folder in ("usr/lib/python3.11", "usr/lib/python3/dist-packages"):
            (root / folder).mkdir(parents=True, exist_ok=True)
            (root / folder / f"{module}.py").write_text("raise SystemExit('the image was used')\n")


def program(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(static_busybox().read_bytes())
    path.chmod(0o755)


@pytest.mark.parametrize("make", [busybox_root, scratch, distroless, broken])
async def test_the_agent_works_in_every_root(
    tmp_path: Path, run_in: Callable[..., Container], make: Callable[[Path], object]
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    make(root)
    container = run_in(root, env={"PATH": "/bin:/usr/bin:/tool"})
    async with client_of(container) as client:
        output = await client.run(spec("cat", "/proc/self/comm"))
        assert output.stdout == b"cat\n"
        if (root / "bin/sh").exists():
            assert (await client.run(spec(shell="echo $0 | cat"))).stdout == b"sh\n"
        else:
            with problem() as found:
                await client.run(spec(shell="true"))
            assert (found[0].code, found[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "SHELL_NOT_FOUND")
    assert container.stop() == STOPPED
    assert "the image was used" not in container.said()
    assert "ld.so" not in container.said()


async def test_a_program_that_needs_a_library_of_the_image_gets_that_of_the_image(
    tmp_path: Path, run_in: Callable[..., Container]
) -> None:
    """Nothing points commands at the payload's: with a broken C library, a dynamic program does not start."""
    root = tmp_path / "root"
    root.mkdir()
    broken(root)
    dynamic = root / "bin/dynamic"
    dynamic.write_bytes(Path("/usr/bin/env").read_bytes())
    dynamic.chmod(0o755)
    container = run_in(root)
    async with client_of(container) as client:
        with problem() as found:
            await client.run(spec("/bin/dynamic"))
    assert found[0].reason == "COMMAND_NOT_EXECUTABLE"


async def test_the_start_command_runs(busybox: Path, run_in: Callable[..., Container]) -> None:
    wanted = sandbox_pb2.SandboxSpec(start_argv=["sh", "-c", "echo started; exec sleep 1000"])
    async with client_of(run_in(busybox, spec=wanted)) as client:
        assert await client.until_output("start", b"started\n") == b"started\n"
