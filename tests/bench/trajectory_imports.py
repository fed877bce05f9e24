"""Small trajectories of a file onto a platform, as `orchard trajectories import` brings them there."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from orchard._client.trajectories.convert import step_message, task_message
from orchard.data import codec
from orchard.data.export import export
from orchard.data.record import Record
from orchard.data.sources import RecordSource
from orchard.trajectory.v1 import trajectory_pb2 as pb

from tests.bench.measure import Figures
from tests.bench.processors import Processors
from tests.bench.trajectory_load import model, outcome, task
from tests.bench.trajectory_texts import Generator
from tests.support.platform import PlatformProcess

COUNT: Final = 2_000
_STEPS: Final = 6
"""Of each: 10 kB of text."""


def imports(platform: PlatformProcess, generator: Generator) -> Figures:
    """Import a file of small trajectories, each with an outcome; what the program takes to start is in it."""
    dataset = f"import-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.jsonl"
        records = (_small(generator, dataset, number) for number in range(COUNT))
        export(RecordSource.of(records), codec("orchard"), file)
        size = file.stat().st_size
        command = [sys.executable, "-m", "orchard._cli.main", "trajectories", "import", str(file), "--json"]
        processors, before, started = Processors(platform), _children(), time.perf_counter()
        done = subprocess.run(command, env=platform.client_environment(), check=True, stdout=subprocess.PIPE)
        seconds, cpu = time.perf_counter() - started, processors.each(COUNT)
    if json.loads(done.stdout)["new"] != COUNT:
        raise RuntimeError("not every trajectory was stored")
    return {
        "imports_per_second": round(COUNT / seconds, 1),
        "import_bytes_each": size // COUNT,
        "import_cpu_each": {**cpu, "client": round((_children() - before) / COUNT * 1e3, 2)},
    }


def _small(generator: Generator, dataset: str, number: int) -> Record:
    trajectory = pb.Trajectory(
        trajectory_id=f"{dataset}-{number}",
        status=pb.TRAJECTORY_STATUS_COMPLETED,
        model=model(number),
        attempt=number % 4,
        task=task_message(task(dataset, number)),
    )
    trajectory.rewards.add(name="outcome", state=pb.REWARD_STATE_SCORED, value=outcome(number), judge="tests")
    steps = [step_message(step)[0] for step in generator.steps(number)[:_STEPS]]
    for index, step in enumerate(steps):
        step.index = index
    return Record(trajectory, steps)


def _children() -> float:
    """Seconds of processor of this process's children that have ended."""
    times = os.times()
    return times.children_user + times.children_system
