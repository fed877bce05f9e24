"""One candidate in one sandbox: upload, patch, run the tests, judge."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import orchard
from orchard.rewards.swe import judge_tests, parse_unittest

from services.local.demo.rollouts import Rollouts, applied, opening
from services.local.demo.tasks import Candidate, Outcome, Task, Verdict

_REPOSITORY: Final = "/testbed"
_LINE_SHOWN: Final = 60
_LIFE_SECONDS: Final = 300
_MOST_PATIENCE: Final = 8.0
_LOOKS: Final = 10
_LOOK_SECONDS: Final = 0.05
_NO_PATCH: Final = frozenset({"PATCH_MALFORMED", "PATCH_PATH_ESCAPES"})

Progress = Callable[[str], None]
"""Told what is going on, in a few words."""
Judged = tuple[Verdict, tuple[int, int] | None, str]
"""A verdict, the passed and wanted tests, and a line for people."""
_NOTHING: Final[Judged] = ("error", None, "it was not judged")


def patience(load: float, cores: int) -> float:
    """By how much limits of time are stretched, 1 to 8, with so many programs running or ready to run before we begin.

    A limit is to end what hangs. Where programs wait for a core, it would end those that are only late, and call them
    unresolved.
    """
    return min(max(1.0, load / cores), _MOST_PATIENCE)


async def load_now() -> float:
    """How many programs run or wait for a core.

    The mean over a minute still counts what has ended, and half a second may fall on a peak: the lesser of both.
    """
    counts = []
    for _ in range(_LOOKS):
        counts.append(_running())
        await asyncio.sleep(_LOOK_SECONDS)
    return min(sum(counts) / len(counts), os.getloadavg()[0])


def _running() -> int:
    return int(Path("/proc/stat").read_text(encoding="ascii").partition("procs_running ")[2].split()[0])


async def evaluate(  # noqa: PLR0917
    client: orchard.AsyncSandboxClient,
    rollouts: Rollouts,
    task: Task,
    repository: Path,
    candidate: Candidate,
    stretch: float,
    progress: Progress,
) -> Outcome:
    """Judge one candidate and keep its run. An error of the platform is an outcome of its own, never "unresolved".

    Limits of time are stretched so many times (`patience`).
    """
    started = time.monotonic()
    sandbox_id = f"demo-{secrets.token_hex(8)}"
    trajectory_id = ""
    judged: Judged | None = None
    try:
        async with rollouts.record(task, candidate, sandbox_id) as trajectory:
            trajectory_id = trajectory.trajectory_id
            judged = await _judge(client, trajectory, task, repository, candidate, sandbox_id, stretch, progress)
    except orchard.RecordingIncomplete as error:
        # The verdict stands: only the record of it is not whole.
        rollouts.problem = error
    except orchard.OrchardError as error:
        judged = ("error", None, f"{type(error).__name__}: {error}")
    outcome = Outcome(task, candidate, *(judged or _NOTHING), time.monotonic() - started)
    await rollouts.ended(outcome, trajectory_id)
    return outcome


async def _judge(  # noqa: PLR0917
    client: orchard.AsyncSandboxClient,
    trajectory: orchard.AsyncRecording,
    task: Task,
    repository: Path,
    candidate: Candidate,
    sandbox_id: str,
    stretch: float,
    progress: Progress,
) -> Judged:
    progress("waiting for a sandbox")
    labels = {"demo": task.instance_id, "candidate": candidate.name}
    trajectory.add(*opening(task, candidate))
    async with await client.create(sandbox_id=sandbox_id, labels=labels, ttl=_LIFE_SECONDS * stretch) as sandbox:
        trajectory.attach(sandbox)
        progress("uploading the repository")
        await sandbox.upload(repository, _REPOSITORY)
        if candidate.patch is not None:
            progress("applying the candidate")
            problem = await _apply(sandbox, candidate.patch)
            trajectory.add(applied(problem))
            if problem:
                return "patch_failed", None, problem
        progress("applying the test patch")
        await _restore_tests(sandbox, task, repository)
        await sandbox.apply_patch(task.test_patch, path=_REPOSITORY)
        return await _run_tests(sandbox, task, task.test_timeout_seconds * stretch, progress)


async def _apply(sandbox: orchard.AsyncSandbox, patch: bytes) -> str:
    """Apply a candidate; returns why it does not apply, or nothing.

    What is no patch at all, or leaves the repository, is the candidate's fault too.
    """
    try:
        report = await sandbox.apply_patch(patch, path=_REPOSITORY, check=False)
    except orchard.InvalidArgument as error:
        if error.reason not in _NO_PATCH:
            raise
        return str(error)
    return "" if report.applied else next(iter(report.problems()), "the patch does not apply")


async def _restore_tests(sandbox: orchard.AsyncSandbox, task: Task, repository: Path) -> None:
    """Put the files of the test patch back to base_commit: what a candidate did to the tests must not count."""
    for name in task.test_files:
        original = repository / name
        if original.is_file():
            await sandbox.upload(original, f"{_REPOSITORY}/{name}")
        else:
            await sandbox.remove(f"{_REPOSITORY}/{name}", missing_ok=True)


async def _run_tests(sandbox: orchard.AsyncSandbox, task: Task, timeout: float, progress: Progress) -> Judged:
    log: list[str] = []
    wanted = len(task.fail_to_pass) + len(task.pass_to_pass)
    stream = sandbox.exec_stream(
        task.test_command,
        cwd=_REPOSITORY,
        timeout=timeout,
        kill_grace=1,
        env={"PYTHON_COLORS": "0", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    async for chunk in stream:
        # unittest reports on standard error; what the tests print elsewhere is not evidence.
        if chunk.stream == "stderr":
            log.append(chunk.text)
            lines = chunk.text.strip().splitlines()
            progress(f"testing: {lines[-1][:_LINE_SHOWN]}" if lines else "testing")
    result = stream.result
    verdict = judge_tests(parse_unittest("".join(log)), task.fail_to_pass, task.pass_to_pass)
    tests = (verdict.passed, wanted)
    if result.timed_out:
        return "unresolved", tests, f"timed out after {timeout:.0f} s"
    if result.ended != "exited":
        return "unresolved", tests, result.describe()
    if verdict.resolved:
        return "resolved", tests, ""
    return "unresolved", tests, f"{len(verdict.failed)} failed, first {verdict.failed[0].rpartition('.')[2]}"
