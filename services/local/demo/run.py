"""The whole of `orchard demo`: start a platform, judge every candidate in parallel, stop it, show the table."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orchard
from rich.console import Console

from services.local.demo.datasets import write_datasets
from services.local.demo.evaluate import evaluate, load_now, patience
from services.local.demo.interrupts import Interrupts
from services.local.demo.own_platform import PlatformStartError, own_platform
from services.local.demo.rollouts import Rollouts
from services.local.demo.screen import Screen, show_table
from services.local.demo.tasks import Outcome, Task, TaskError, UnknownTaskError, load_tasks

DEFAULT_OUTPUT: Final = Path(__file__).parents[3] / "build" / "demo"
DEFAULT_TASKS: Final = Path(__file__).parents[3] / "examples" / "tasks"
_PLAIN_WIDTH: Final = 140  # of the table where no terminal gives one


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to do.

    Attributes:
        tasks: folder of the tasks.
        only: ids of the tasks to take; empty: all.
        running: use the platform that the connection profile or the environment names instead of one of its own.
        as_json: print one JSON document instead of a table.
        output: folder for the data sets that the runs give.
    """

    tasks: Path
    only: frozenset[str]
    running: bool
    as_json: bool
    output: Path


def run(options: DemoOptions) -> int:
    """Do it; 0 if every verdict is the expected one, else 1, and 128 and more if a signal ended it."""
    # Progress goes to standard error, so that what is asked for can be piped.
    console = Console(stderr=True)
    with Interrupts() as interrupts:
        try:
            outcomes = _evaluate(options, interrupts, console)
        except (KeyboardInterrupt, TaskError, PlatformStartError, orchard.OrchardError) as error:
            # Git, too, ends at Ctrl-C: what fails after that is no news.
            what = "interrupted" if interrupts.exit_code else error
            console.print(f"[bold red]demo:[/] {what}", highlight=False)
            return interrupts.exit_code or (2 if isinstance(error, UnknownTaskError) else 1)
    if options.as_json:
        print(json.dumps([_plain(outcome) for outcome in outcomes], indent=2))  # noqa: T201
    else:
        screen = Console()
        show_table(screen if screen.is_terminal else Console(width=_PLAIN_WIDTH), outcomes)
    unexpected = [outcome for outcome in outcomes if not outcome.expected]
    if unexpected:
        console.print(f"[bold red]{len(unexpected)} verdicts are not the expected ones[/]")
    return interrupts.exit_code or (1 if unexpected else 0)


def _evaluate(options: DemoOptions, interrupts: Interrupts, console: Console) -> list[Outcome]:
    tasks = load_tasks(options.tasks, options.only)
    with tempfile.TemporaryDirectory(prefix="orchard-demo-") as folder:
        repositories = _build(tasks, Path(folder), interrupts, console)
        if options.running:
            return interrupts.run(_evaluate_all({}, tasks, repositories, options, console))
        with own_platform(interrupts, console) as (endpoint, api_key):
            connection = {"endpoint": endpoint, "api_key": api_key}
            return interrupts.run(_evaluate_all(connection, tasks, repositories, options, console))


def _build(tasks: Sequence[Task], folder: Path, interrupts: Interrupts, console: Console) -> dict[str, Path]:
    with console.status("building the repositories"):
        repositories = {task.instance_id: folder / task.instance_id for task in tasks}
        for task in tasks:
            interrupts.check()
            task.build_repository(repositories[task.instance_id])
    return repositories


async def _evaluate_all(
    connection: Mapping[str, Any],
    tasks: Sequence[Task],
    repositories: dict[str, Path],
    options: DemoOptions,
    console: Console,
) -> list[Outcome]:
    """Every candidate in its own sandbox, all at once; then what they give to learn from."""
    pairs = [(task, candidate) for task in tasks for candidate in task.candidates]
    started = time.monotonic()
    client = orchard.AsyncSandboxClient(**connection)
    rollouts = Rollouts(client, f"demo-{secrets.token_hex(6)}")
    stretch = patience(await load_now(), os.cpu_count() or 1)
    with Screen(console, len(pairs)) as screen:

        async def one(index: int) -> Outcome:
            task, candidate = pairs[index]
            outcome = await evaluate(
                client,
                rollouts,
                task,
                repositories[task.instance_id],
                candidate,
                stretch,
                lambda what: screen.progress(task, candidate, what),
            )
            screen.done(outcome)
            return outcome

        try:
            await rollouts.begin(tasks)
            outcomes = await asyncio.gather(*(one(index) for index in range(len(pairs))))
            seconds = time.monotonic() - started
            console.print(f"{len(pairs)} candidates of {len(tasks)} tasks, each in its own sandbox, in {seconds:.1f} s")
            await _export(connection, rollouts, options.output, console)
        finally:
            await _close(client, console)
    return list(outcomes)


async def _export(connection: Mapping[str, Any], rollouts: Rollouts, folder: Path, console: Console) -> None:
    """Write the data sets and name them. Every verdict stands without them too."""
    try:
        made = await asyncio.to_thread(write_datasets, connection, rollouts.run, folder)
    except (orchard.OrchardError, OSError) as error:
        console.print(f"[bold red]demo:[/] no data sets: {error}", highlight=False)
        return
    if rollouts.problem is not None:
        console.print(f"[bold red]demo:[/] not every run was kept: {rollouts.problem}", highlight=False)
    console.print(
        f"kept as trajectories; {made.counts[0]} conversations to imitate and {made.counts[1]} groups with advantages "
        f"are in {folder}: {made.conversations.name}, {made.groups.name}",
        highlight=False,
        soft_wrap=True,
    )


async def _close(client: orchard.AsyncSandboxClient, console: Console) -> None:
    """Close the client. What it could not delete is worth a line, but every verdict stands."""
    try:
        await client.close()
    except orchard.OrchardError as error:
        console.print(f"[bold red]demo:[/] {error}", highlight=False)


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "task": outcome.task.instance_id,
        "candidate": outcome.candidate.name,
        "verdict": outcome.verdict,
        "expected": outcome.candidate.expected,
        "tests_passed": outcome.tests[0] if outcome.tests else None,
        "tests_wanted": outcome.tests[1] if outcome.tests else None,
        "detail": outcome.detail,
        "seconds": round(outcome.seconds, 3),
    }
