"""The platform as an ordinary user, and places that are not the user's."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.local.supervisor.directories import run_directory_of
from tests.support.platform import ROOT, PlatformProcess

BECOME = "import os, sys; os.setgroups([]); os.setgid({gid}); os.setuid({uid}); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.fixture(scope="module")
def ordinary() -> tuple[str, ...]:
    """A prefix that runs a command as an ordinary user."""
    if os.geteuid() != 0:
        return ()
    nobody = pwd.getpwnam("nobody")
    prefix = (sys.executable, "-c", BECOME.format(uid=nobody.pw_uid, gid=nobody.pw_gid))
    probe = subprocess.run([*prefix, sys.executable, "-c", "import services.local"], cwd=ROOT, capture_output=True)
    if probe.returncode != 0:
        pytest.skip(f"other users cannot read {ROOT}")
    return prefix


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder of the ordinary user, where that user can reach it."""
    folder = Path(tempfile.mkdtemp(prefix="orchard-test-"))
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    yield folder
    shutil.rmtree(folder)


def test_an_ordinary_user_with_a_long_path(ordinary: tuple[str, ...], home: Path) -> None:
    platform = PlatformProcess(home, prefix=ordinary)
    platform.data = home / "a folder, with blanks" / ("x" * 120) / ("y" * 120)
    try:
        platform.start()
        user = home.stat().st_uid
        assert (platform.data / "postgres" / "data").stat().st_uid == user
        assert (
            f"Uid:\t{user}\t{user}\t{user}\t{user}"
            in Path(f"/proc/{platform.service_pid('postgres')}/status").read_text()
        )
        postgres = platform.kill_service("postgres")
        platform.wait_ready("postgres", not_pid=postgres)
        key = platform.api_key
        platform.kill_supervisor()
        platform.start()
        assert platform.api_key == key
        assert platform.stop() == 0
        platform.wait_nothing_left()
    finally:
        platform.close()


def refused(platform: PlatformProcess) -> str:
    """What a start says that must fail."""
    ready = platform.launch()
    os.close(ready)
    assert platform.wait_end() == 1
    return platform.output()


def test_a_data_directory_that_cannot_be_read(ordinary: tuple[str, ...], home: Path) -> None:
    platform = PlatformProcess(home, prefix=ordinary)
    platform.data.mkdir(mode=0)
    os.chown(platform.data, home.stat().st_uid, home.stat().st_gid)
    said = refused(platform)
    assert f"cannot use the data directory {platform.data}: Permission denied" in said
    assert "--data-dir" in said


def test_a_data_directory_that_cannot_be_made(ordinary: tuple[str, ...], home: Path) -> None:
    platform = PlatformProcess(home, prefix=ordinary)
    platform.data = Path("/proc/orchard")
    assert "cannot use the data directory /proc/orchard" in refused(platform)


@pytest.mark.root
def test_places_of_another_user(ordinary: tuple[str, ...], home: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    platform = PlatformProcess(home, prefix=ordinary)
    platform.data.mkdir(mode=0o755)
    assert f"{platform.data} belongs to user id 0 and this is user id 65534" in refused(platform)
    assert list(platform.data.iterdir()) == []
    # Somebody was quicker to make the folder of sockets, whose name can be foretold.
    os.chown(platform.data, home.stat().st_uid, home.stat().st_gid)
    run = run_directory_of(platform.data, {})
    run = run.with_name(run.name.replace("orchard-0-", "orchard-65534-"))
    run.mkdir(mode=0o700)
    try:
        said = refused(platform)
    finally:
        run.rmdir()
    assert f"{run} is not a folder of this user" in said
    assert "XDG_RUNTIME_DIR" in said
