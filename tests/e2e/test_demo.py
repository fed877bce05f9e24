"""`orchard demo` as a user runs it, on some of its tasks; all of them take most of a minute."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import orchard
import pytest

from tests.support.platform import ROOT, PlatformProcess, processes_naming, wait_until

BACKSTOP = 60
TASKS = ("orchard-demo__intervals-3", "orchard-demo__mdtable-9")


def environment_in(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ORCHARD_", "XDG_"))}
    return {**kept, "TMPDIR": str(folder), "HOME": str(folder), "NO_COLOR": "1"}


def demo(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.local", "demo", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment_in(tmp_path), capture_output=True, text=True, timeout=110)


def test_every_verdict_is_the_expected_one_and_nothing_is_left(tmp_path: Path) -> None:
    done = demo(tmp_path, "--json", *TASKS)
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)
    assert {one["task"] for one in verdicts} == set(TASKS)
    assert {one["verdict"] for one in verdicts} == {"resolved", "unresolved", "patch_failed"}
    assert all(one["verdict"] == one["expected"] for one in verdicts)
    assert processes_naming(str(tmp_path)) == []
    assert list(tmp_path.glob("orchard-demo-*")) == []


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_among_its_sandboxes_leaves_nothing(tmp_path: Path, presses: int) -> None:
    said = tmp_path / "output"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.local", "demo", *TASKS],
            cwd=ROOT,
            env=environment_in(tmp_path),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        profile = tmp_path / "none"

        def is_up() -> bool:
            nonlocal profile
            assert process.poll() is None, said.read_text()
            profile = next(tmp_path.glob("orchard-demo-*/config/profile.json"), profile)
            return profile.exists()

        wait_until(is_up, "the platform of the demo", seconds=BACKSTOP)
        platform = PlatformProcess(profile.parents[1])
        with orchard.SandboxClient(**json.loads(profile.read_text())) as client:
            wait_until(lambda: len(list(client.list(states=["ready"]))) >= 2, "its sandboxes", seconds=BACKSTOP)
        platform.note_processes(process.pid)
        for _ in range(presses):
            os.killpg(process.pid, signal.SIGINT)
        assert process.wait(BACKSTOP) == 130, said.read_text()
    finally:
        process.kill()
        process.wait()
    platform.wait_nothing_left()
    assert processes_naming(str(tmp_path)) == []
    assert list(tmp_path.glob("orchard-demo-*")) == []
    assert "Traceback" not in said.read_text()


def test_an_unexpected_verdict_fails(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    shutil.copytree(ROOT / "examples" / "tasks" / TASKS[0], tasks / TASKS[0])
    candidates = tasks / TASKS[0] / "candidates.json"
    only = [one for one in json.loads(candidates.read_text()) if one["name"] == "none"]
    only[0]["expected"] = "resolved"
    candidates.write_text(json.dumps(only))
    done = demo(tmp_path, "--tasks", str(tasks))
    assert done.returncode == 1
    assert "expected resolved" in done.stderr


def test_an_error_of_the_platform_is_no_verdict(tmp_path: Path) -> None:
    """A platform that is not there: an error, never "unresolved"."""
    environment = {"ORCHARD_ENDPOINT": "127.0.0.1:1", "ORCHARD_API_KEY": "ork_0_0"}
    command = [sys.executable, "-m", "services.local", "demo", "--running", "--json", TASKS[0]]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 1
    assert {one["verdict"] for one in json.loads(done.stdout)} == {"error"}


def test_an_unknown_task_is_named(tmp_path: Path) -> None:
    done = demo(tmp_path, "no-such-task")
    assert done.returncode == 1
    assert "no-such-task" in done.stderr
