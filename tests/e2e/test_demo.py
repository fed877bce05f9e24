"""`orchard demo` as a user runs it, on some of its tasks; all of them take most of a minute."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orchard
import pytest

from services.local.demo.rollouts import Rollouts
from services.local.demo.tasks import Outcome, load_tasks
from tests.support.platform import ROOT, PlatformProcess, processes_naming, wait_until

BACKSTOP = 110
TASKS = ("orchard-demo__intervals-3", "orchard-demo__mdtable-9")


def environment_in(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ORCHARD_", "XDG_"))}
    return {**kept, "TMPDIR": str(folder), "HOME": str(folder), "NO_COLOR": "1"}


def demo(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.local", "demo", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment_in(tmp_path), capture_output=True, text=True, timeout=400)


# What hangs is given more time on a busy machine.
@pytest.mark.timeout(420)
def test_every_verdict_is_the_expected_one_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "sets"
    done = demo(tmp_path, "--json", "--output", str(folder), *TASKS)
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)
    assert {one["task"] for one in verdicts} == set(TASKS)
    assert {one["verdict"] for one in verdicts} == {"resolved", "unresolved", "patch_failed"}
    assert all(one["verdict"] == one["expected"] for one in verdicts)
    wait_until(lambda: processes_naming(str(tmp_path)) == [], "its processes to end")
    assert list(tmp_path.glob("orchard-demo-*")) == []
    assert str(folder) in done.stderr
    check_data_sets(folder, verdicts)


def check_data_sets(folder: Path, verdicts: list[dict[str, Any]]) -> None:
    """Every run is kept with its reward, and what was learnt of it is what the verdicts say."""
    rewards = {task: [float(one["verdict"] == "resolved") for one in verdicts if one["task"] == task] for task in TASKS}
    groups = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    assert {one["members"][0]["instance_id"] for one in groups} == set(TASKS)
    for group in groups:
        members = group["members"]
        assert [member["reward"] for member in members] == rewards[members[0]["instance_id"]]
        assert all(member["mask"] for member in members)
        # A resolved one is better than the mean, and the advantages of a group cancel out.
        assert all((member["advantage"] > 0) == (member["reward"] == 1) for member in members)
        assert sum(member["advantage"] for member in members) == pytest.approx(0)
    conversations = [json.loads(line) for line in (folder / "sft.jsonl").read_text().splitlines()]
    assert {one["instance_id"] for one in conversations} == set(TASKS)
    for one in conversations:
        assert [message["role"] for message in one["messages"]] == ["user", "assistant", "tool", "assistant", "tool"]
        assert one["loss_mask"] == [0, 1, 0, 1, 0]
        calls = [call["function"]["name"] for message in one["messages"] for call in message.get("tool_calls") or ()]
        assert calls == ["apply_patch", "exec"]
        assert "OK" in one["messages"][-1]["content"]


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_among_its_sandboxes_leaves_nothing(tmp_path: Path, presses: int) -> None:
    said = tmp_path / "output"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.local", "demo", "--output", str(tmp_path / "sets"), *TASKS],
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
    wait_until(lambda: processes_naming(str(tmp_path)) == [], "its processes to end")
    assert list(tmp_path.glob("orchard-demo-*")) == []
    assert "Traceback" not in said.read_text()


def test_an_unexpected_verdict_fails(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    shutil.copytree(ROOT / "examples" / "tasks" / TASKS[0], tasks / TASKS[0])
    candidates = tasks / TASKS[0] / "candidates.json"
    only = [one for one in json.loads(candidates.read_text()) if one["name"] == "none"]
    only[0]["expected"] = "resolved"
    candidates.write_text(json.dumps(only))
    done = demo(tmp_path, "--tasks", str(tasks), "--output", str(tmp_path / "sets"))
    assert done.returncode == 1
    assert "expected resolved" in done.stderr


def test_an_error_of_the_platform_is_no_verdict(tmp_path: Path) -> None:
    """A platform that is not there: an error, never "unresolved"."""
    environment = {"ORCHARD_ENDPOINT": "127.0.0.1:1", "ORCHARD_API_KEY": "ork_0_0"}
    sets = tmp_path / "sets"
    command = [sys.executable, "-m", "services.local", "demo", "--running", "--json", "--output", str(sets), TASKS[0]]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 1
    assert {one["verdict"] for one in json.loads(done.stdout)} == {"error"}
    assert "no data sets" in done.stderr
    assert list(sets.glob("*.jsonl")) == []


async def test_what_the_platform_did_to_a_candidate_is_excluded_and_never_0(platform: PlatformProcess) -> None:
    (task,) = load_tasks(ROOT / "examples" / "tasks", frozenset(TASKS[:1]))
    client = orchard.AsyncSandboxClient(platform.endpoint, api_key=platform.api_key)
    async with client:
        rollouts = Rollouts(client, f"demo-{secrets.token_hex(4)}")
        await rollouts.begin([task])
        for number, candidate in enumerate(task.candidates):
            recording = rollouts.record(task, candidate, "sandbox")
            verdict, detail = ("error", "SandboxLost: gone") if number == 0 else (candidate.expected, "")
            with contextlib.suppress(orchard.SandboxLost):
                async with recording:
                    if number == 0:
                        raise orchard.SandboxLost("gone")
            await rollouts.ended(Outcome(task, candidate, verdict, None, detail, 0.0), recording.trajectory_id)
        assert rollouts.problem is None
        group = await client.trajectories.groups.get(rollouts.group_of(task))
        (excluded,) = (member for member in group.members if member.sample.index == 0)
        scored = [member for member in group.members if member is not excluded]
        assert (excluded.sample.reward, excluded.trainable, excluded.advantage) == (None, False, 0)
        assert excluded.sample.reason == "SandboxLost: gone"
        assert all(member.trainable for member in scored)
        info = await client.trajectories.get(excluded.sample.trajectory_id)
        assert info.outcome is not None
        assert (info.status, info.outcome.state) == (orchard.TrajectoryStatus.ABORTED, orchard.RewardState.EXCLUDED)


def test_an_unknown_task_is_named(tmp_path: Path) -> None:
    done = demo(tmp_path, "no-such-task")
    assert done.returncode == 2
    assert "no-such-task" in done.stderr
