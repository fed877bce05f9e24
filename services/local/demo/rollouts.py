"""The demo's runs as trajectories: one for each candidate, with its reward, in a group for each task."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Final

import orchard

from services.local.demo.tasks import Candidate, Outcome, Task

DATASET: Final = "orchard-demo"
LABEL: Final = "demo"
_TOOLS: Final = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {argument: {}}, "required": [argument]},
        },
    }
    for name, description, argument in (
        ("apply_patch", "Change the repository by a unified diff.", "patch"),
        ("exec", "Run a command.", "command"),
    )
)


class Rollouts:
    """Keeps what became of each candidate.

    Args:
        client: of the platform.
        run: names this run of the demo; a label of its trajectories.
    """

    def __init__(self, client: orchard.AsyncSandboxClient, run: str) -> None:
        self.run = run
        self.problem: orchard.OrchardError | None = None
        """Why something could not be kept; the verdicts stand."""
        self._client = client

    def group_of(self, task: Task) -> str:
        """The id of a task's group."""
        return f"{self.run}-{task.instance_id}"

    async def begin(self, tasks: Sequence[Task]) -> None:
        """Begin a group for each task; every candidate is one of its samples."""
        await asyncio.gather(*(self._begin(task) for task in tasks))

    async def _begin(self, task: Task) -> None:
        count = len(task.candidates)
        plan = orchard.RolloutPlan(group_size=count, maximum=count, stride=count, low=0.0, high=1.0)
        with self._noting():
            await self._client.trajectories.groups.create(self.group_of(task), task=_task(task), plan=plan)

    def record(self, task: Task, candidate: Candidate, sandbox_id: str) -> orchard.AsyncRecording:
        """Record one candidate's run."""
        return self._client.record(
            _task(task),
            group_id=self.group_of(task),
            attempt=task.candidates.index(candidate),
            harness="orchard demo",
            model=f"candidate/{candidate.name}",
            tools=_TOOLS,
            labels={LABEL: self.run},
            sandbox_id=sandbox_id,
        )

    async def ended(self, outcome: Outcome, trajectory_id: str) -> None:
        """Give a run its reward: 1 if it resolves the issue, 0 if not; what the platform did to it is excluded."""
        resolved = float(outcome.verdict == "resolved")
        failed = outcome.verdict == "error"
        reward = orchard.Reward.scored(resolved, judge="tests")
        if failed:
            reward = orchard.Reward.excluded(outcome.detail, judge="tests")
        with self._noting():
            if trajectory_id:
                await self._client.trajectories.annotate(trajectory_id, rewards=reward)
            await self._client.trajectories.groups.report(
                self.group_of(outcome.task),
                outcome.task.candidates.index(outcome.candidate),
                reward=None if failed else resolved,
                trajectory_id=trajectory_id,
                reason=outcome.detail if failed else "",
            )

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except orchard.OrchardError as error:
            self.problem = error


def opening(task: Task, candidate: Candidate) -> list[orchard.Step]:
    """The begin of a run: the issue, and what the candidate does about it."""
    asked = orchard.Step.user(task.problem_statement)
    if candidate.patch is None:
        return [asked, orchard.Step.assistant("I change nothing.")]
    arguments = json.dumps({"patch": candidate.patch.decode(errors="replace")})
    return [asked, orchard.Step.assistant(tool_calls=[orchard.ToolCall("patch", "apply_patch", arguments)])]


def applied(problem: str) -> orchard.Step:
    """What came of the patch."""
    return orchard.Step.tool("patch", problem or "applied", name="apply_patch", is_error=bool(problem))


def _task(task: Task) -> orchard.Task:
    return orchard.Task(task.instance_id, DATASET, task.repo)
