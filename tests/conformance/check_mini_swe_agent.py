"""mini-swe-agent's own programs run in sandboxes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from orchard import SandboxClient, SandboxState

from tests.conformance.adapters import Harness
from tests.support.platform import ROOT

PROGRAMS = Path(__file__).parent / "mini_swe_agent"
TASKS = ROOT / "examples" / "tasks"
NAMES = ("orchard-demo__intervals-3", "orchard-demo__semver-14")
SWEBENCH = ("-m", "orchard.harness.mini_swe_agent.swebench")


@pytest.fixture
def mini(harness: Callable[[str], Harness]) -> Harness:
    return harness("mini-swe-agent")


def test_environment(mini: Harness) -> None:
    said = mini.run(PROGRAMS / "environment.py", environment={"A": "other", "B": "two"}).stdout
    assert said.endswith("\ndone\n"), said


def test_killed_harness_leaves_no_sandbox(mini: Harness) -> None:
    sandbox_id = mini.run(PROGRAMS / "agent_dies.py", exit_code=-9).stdout.split()[-1]
    with SandboxClient(mini.platform.endpoint, api_key=mini.platform.api_key) as client:
        assert client.get(sandbox_id).wait_ended(120).state is SandboxState.DELETED


def answer(number: int, text: str, command: str) -> dict[str, Any]:
    call_id = f"c{number}"
    arguments = json.dumps({"command": command})
    call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
    extra = {"actions": [{"command": command, "tool_call_id": call_id}], "cost": 1.0}
    return {"role": "assistant", "content": text, "tool_calls": [call], "extra": extra}


def write_batch(folder: Path) -> Path:
    """A data set of example tasks, with the fix that the scripted model makes."""
    tasks = [json.loads((TASKS / name / "instance.json").read_text()) for name in NAMES]
    for task in tasks:
        task |= {
            "history": (TASKS / task["instance_id"] / "history.fast-import").read_text(),
            "candidate": task["patch"],
        }
    folder.mkdir()
    (folder / "test.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return folder


def write_config(path: Path, *commands: str, **environment: Any) -> Path:
    """What is added to swebench.yaml: scripted answers, and options of the environment."""
    answers = [answer(number, "Next.", command) for number, command in enumerate(commands)]
    model = {
        "model_class": "minisweagent.models.test_models.DeterministicToolcallModel",
        "model_name": "scripted",
        "outputs": answers,
    }
    # JSON is YAML.
    path.write_text(json.dumps({"model": model, "environment": environment}))
    return path


def predictions(folder: Path) -> dict[str, str]:
    path = folder / "preds.json"
    return {key: one["model_patch"] for key, one in json.loads(path.read_text()).items()} if path.exists() else {}


def comparable(diff: str) -> str:
    """A diff without the lines whose hashes are shortened as git likes."""
    return re.sub(r"^index .*\n", "", diff, flags=re.MULTILINE).strip()


def test_batch(mini: Harness) -> None:
    folder = mini.folder
    data = write_batch(folder / "data")
    batch = ("--subset", data, "--split", "test", "-w", "2", "-o", folder / "out", "-c", PROGRAMS / "swebench.yaml")

    # The platform fails every instance: no image of theirs was imported.
    no_image = folder / "no-image.yaml"
    no_image.write_text((PROGRAMS / "swebench.yaml").read_text().replace('  image: ""\n', ""))
    models = write_config(folder / "idle.yaml", "true")
    done = mini.run(*SWEBENCH, *batch[:-1], no_image, "-c", models, exit_code=1)
    assert done.stderr.count("no prediction, the environment failed: ImageNotFound") == len(NAMES), done.stderr
    assert predictions(folder / "out") == {}

    # It takes sandboxes away while their agents work.
    models = write_config(folder / "lost.yaml", "sleep 3600", sandbox_options={"ttl": 20}, timeout=3600)
    done = mini.run(*SWEBENCH, *batch, "-c", models, exit_code=1)
    assert done.stderr.count("no prediction, the environment failed: SandboxLost") == len(NAMES), done.stderr
    assert predictions(folder / "out") == {}

    # The same command tries them again, and each submits what was changed.
    models = write_config(
        folder / "fix.yaml",
        "git apply /tmp/candidate.patch && git diff --stat",
        "git diff > /tmp/patch.txt",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat /tmp/patch.txt",
    )
    mini.run(*SWEBENCH, *batch, "-c", models)
    found = predictions(folder / "out")
    assert found.keys() == set(NAMES)
    for name in NAMES:
        expected = json.loads((TASKS / name / "instance.json").read_text())["patch"]
        assert comparable(found[name]) == comparable(expected)
        kept = json.loads((folder / "out" / name / f"{name}.traj.json").read_text())
        assert kept["info"]["exit_status"] == "Submitted"
        assert kept["info"]["config"]["environment_type"].startswith("orchard.harness.")

    # Nothing is left of any of it, though the program never calls cleanup.
    with SandboxClient(mini.platform.endpoint, api_key=mini.platform.api_key) as client:
        for info in client.list():
            assert client.get(info.sandbox_id).wait_ended(60).state is SandboxState.DELETED
