"""The agent in a root file system of Debian 11, whose C library is older than the agent's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from services.common import pods
from tests.integration.exec_agent.conftest import spec
from tests.integration.payload.conftest import client_of
from tests.support.payload import STOPPED, built_payload, running_container

SUITE, LIBRARY = "bullseye", "libc-2.31.so"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """busybox and the C library that it is linked to, by Debian's own packages and nothing of this machine's."""
    folder = tmp_path_factory.mktemp("debian")
    listed = ("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Component: main")
    archive = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()[0]
    (folder / "sources").write_text(f"deb {archive} {SUITE} main\n")
    for name in ("lists/partial", "cache/archives/partial", "root"):
        (folder / name).mkdir(parents=True)
    options = {
        "Dir::Etc::sourcelist": folder / "sources",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    apt = ("apt-get", "-qq", *(part for name, value in options.items() for part in ("-o", f"{name}={value}")))
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", f"libc6/{SUITE}", f"busybox/{SUITE}"], check=True, cwd=folder)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)
    for name in ("sh", "cat", "grep", "sleep", "tr"):
        (folder / "root/bin" / name).symlink_to("busybox")
    for name in ("tmp", "proc", "dev", "sys", "root"):
        (folder / "root" / name).mkdir(exist_ok=True)
    return folder / "root"


async def test_commands_use_the_older_library_and_the_agent_its_own(root: Path) -> None:
    with running_container(built_payload(), root) as container:
        async with client_of(container) as client:
            maps = (await client.run(spec(shell="cat /proc/self/maps"))).stdout.decode()
            assert LIBRARY in maps
            assert pods.PAYLOAD_FOLDER not in maps
            environment = (await client.run(spec(shell="tr '\\0' '\\n' </proc/self/environ"))).stdout.decode()
            assert pods.PAYLOAD_FOLDER not in environment
            assert "LD_" not in environment
        assert container.stop() == STOPPED
