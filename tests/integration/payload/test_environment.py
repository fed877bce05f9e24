"""What commands inherit: the image's environment, directory and user, and nothing of the agent's own."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from orchard.sandbox.v1 import sandbox_pb2

from tests.integration.exec_agent.conftest import problem, spec
from tests.integration.payload.conftest import client_of
from tests.support.payload import Container

OF_IMAGE = {
    "PATH": "/opt/venv/bin:/bin",
    "HOME": "/home/of-image",
    "LD_LIBRARY_PATH": "/opt/lib",
    "LD_PRELOAD": "/opt/lib/odd.so",
    "PYTHONPATH": "/opt/modules",
    "PYTHONHOME": "/opt/python",
    "PYTHONSTARTUP": "/opt/start.py",
    "OPENSSL_CONF": "/opt/openssl.cnf",
    "GLIBC_TUNABLES": "glibc.malloc.check=3",
    "GRPC_VERBOSITY": "DEBUG",
    "ORCHARD_LISTEN": "the image may use any name",
    "MALLOC_ARENA_MAX": "1",
    "LANG": "xx_YY.ISO-8859-1",
    "TZ": "Odd/Place",
    "EMPTY": "",
    "WITH_EQUALS": "a=b=c",
    "WITH_NEWLINE": "a\nb",
    "NOT_UTF8": os.fsdecode(b"\xff\xfe"),
}
OF_KUBELET = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_PORT_443_TCP_ADDR": "10.0.0.1"}


def parsed(output: bytes) -> dict[str, str]:
    return dict(os.fsdecode(entry).split("=", 1) for entry in output.split(b"\0") if entry)


async def test_the_environment_is_the_images_and_the_specs_and_nothing_else(
    busybox: Path, run_in: Callable[..., Container]
) -> None:
    wanted = sandbox_pb2.SandboxSpec(env={"OF_SPEC": "$(PATH) $HOME", "TZ": "UTC"})
    async with client_of(run_in(busybox, env={**OF_IMAGE, **OF_KUBELET}, spec=wanted)) as client:
        argv = parsed((await client.run(spec("/bin/env", "-0"))).stdout)
        # What bwrap itself sets is, like the runtime's HOSTNAME, part of the container.
        assert argv == {**OF_IMAGE, "OF_SPEC": "$(PATH) $HOME", "TZ": "UTC", "PWD": "/"}
        shell = parsed((await client.run(spec(shell="exec env -0"))).stdout)
        assert {k: v for k, v in shell.items() if k not in ("SHLVL", "OLDPWD", "PWD")} == {
            k: v for k, v in argv.items() if k != "PWD"
        }


async def test_an_image_without_an_environment_has_a_path_and_a_home(
    busybox: Path, run_in: Callable[..., Container]
) -> None:
    async with client_of(run_in(busybox, env={"X": "1"})) as client:
        env = parsed((await client.run(spec("env", "-0"))).stdout)
    assert env == {
        "X": "1",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/",
        "PWD": "/",
    }


async def test_commands_inherit_no_descriptor_and_no_signal_of_the_agent(
    busybox: Path, run_in: Callable[..., Container]
) -> None:
    async with client_of(run_in(busybox)) as client:
        opened = (await client.run(spec("ls", "/proc/self/fd"))).stdout.split()
        assert sorted(map(int, opened)) == [0, 1, 2, 3], "3 is the folder that ls reads"
        status = (await client.run(spec("grep", "^Sig", "/proc/self/status"))).stdout
        assert b"SigBlk:\t0000000000000000" in status
        assert b"SigIgn:\t0000000000000000" in status


@pytest.mark.parametrize(
    ("of_spec", "of_image", "expected"),
    [("", "/srv/app", b"/srv/app\n"), ("/tmp", "/srv/app", b"/tmp\n"), ("", "/", b"/home/me\n")],
)
async def test_where_commands_start(
    busybox: Path, run_in: Callable[..., Container], of_spec: str, of_image: str, expected: bytes
) -> None:
    (busybox / "srv/app").mkdir(parents=True)
    (busybox / "home/me").mkdir(parents=True)
    wanted = sandbox_pb2.SandboxSpec(working_directory=of_spec)
    env = {"PATH": "/bin", "HOME": "/home/me"}
    async with client_of(run_in(busybox, spec=wanted, cwd=of_image, env=env)) as client:
        assert (await client.run(spec("pwd"))).stdout == expected


async def test_a_directory_that_is_not_there_is_an_error(busybox: Path, run_in: Callable[..., Container]) -> None:
    wanted = sandbox_pb2.SandboxSpec(working_directory="/not/there")
    async with client_of(run_in(busybox, spec=wanted)) as client:
        with problem() as found:
            await client.run(spec("pwd"))
    assert found[0].reason == "CWD_NOT_FOUND"


@pytest.mark.root
async def test_the_specs_user_runs_commands_in_its_home(busybox: Path, run_in: Callable[..., Container]) -> None:
    add_user(busybox)
    wanted = sandbox_pb2.SandboxSpec(user="me")
    async with client_of(run_in(busybox, spec=wanted, env={"PATH": "/bin", "HOME": "/root"})) as client:
        output = await client.run(spec(shell="id -u; id -g; pwd; echo $HOME; touch made; stat -c %u made"))
        assert output.stdout == b"1234\n1235\n/home/me\n/home/me\n1234\n"
        assert (await client.run(spec("id", "-u", user="root"))).stdout == b"0\n"
        assert (await client.run(spec("cat", "/.orchard/state/agent/journal"))).result.exit_code != 0, (
            "it is the agent's"
        )


@pytest.mark.root
async def test_the_images_user_is_the_agents(busybox: Path, run_in: Callable[..., Container]) -> None:
    add_user(busybox)
    options = ("--unshare-user", "--uid", "1234", "--gid", "1235")
    async with client_of(run_in(busybox, options=options, env={"PATH": "/bin", "HOME": "/home/me"})) as client:
        assert (await client.run(spec(shell="id -u; pwd"))).stdout == b"1234\n/home/me\n"
        with problem() as found:
            await client.run(spec("id", user="root"))
    assert found[0].reason == "USER_NOT_AVAILABLE"
    assert "user='root'" in found[0].message


def add_user(root: Path) -> None:
    with (root / "etc/passwd").open("a") as file:
        file.write("me:x:1234:1235::/home/me:/bin/sh\n")
    home = root / "home/me"
    home.mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(home, 1234, 1235)
