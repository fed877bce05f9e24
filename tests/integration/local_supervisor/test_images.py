"""`orchard image` against the running platform."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.support.platform import ROOT, PlatformProcess


def image(platform: PlatformProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.local", "image", *arguments],
        cwd=ROOT,
        env=platform.client_environment(),
        timeout=60,
        capture_output=True,
        text=True,
    )


def test_import_list_and_remove(shared: PlatformProcess, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "tool").write_bytes(b"x" * 100_000)
    with tarfile.open(tmp_path / "root.tar", "w") as archive:
        archive.add(root, arcname=".")

    done = image(shared, "import", "tools:1", str(tmp_path / "root.tar"), "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["name"] == "tools:1"
    assert made["size"] >= 100_000

    again = image(shared, "import", "tools:1", str(tmp_path / "root.tar"))
    assert again.returncode == 1
    assert again.stderr.startswith("orchard: ")
    assert "tools:1" in again.stderr
    replaced = image(shared, "import", "tools:1", str(root), "--replace")
    assert replaced.returncode == 0, replaced.stderr

    listed = image(shared, "list", "--json")
    assert [found["name"] for found in json.loads(listed.stdout)] == ["tools:1"]
    assert "tools:1" in image(shared, "list").stdout

    assert image(shared, "rm", "tools:1").returncode == 0
    assert json.loads(image(shared, "list", "--json").stdout) == []
    missing = image(shared, "rm", "tools:1")
    assert missing.returncode == 1
    assert "tools:1" in missing.stderr


def test_a_missing_file_is_named(shared: PlatformProcess, tmp_path: Path) -> None:
    file = tmp_path / f"no-such-file-{'x' * 100}.tar"  # longer than a line of a terminal
    done = image(shared, "import", "tools:1", str(file))
    assert done.returncode == 2
    assert str(file) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_none_can_have_is_told(shared: PlatformProcess, tmp_path: Path) -> None:
    done = image(shared, "import", "Not A Name", str(tmp_path))
    assert done.returncode == 2
    assert "name" in done.stderr


def test_without_a_platform_it_says_how_to_start_one(tmp_path: Path) -> None:
    platform = PlatformProcess(tmp_path)
    done = image(platform, "list")
    assert done.returncode == 1
    assert "orchard up" in done.stderr
