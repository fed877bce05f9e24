"""Judges: run, compare, batch."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from orchard._cli.judge_rubrics import complete_rubric
from orchard._cli.option_groups import with_options
from orchard._cli.output import Json, client, print_json, show, table, waiting
from orchard._cli.trajectory_filters import TrajectoryId, complete_trajectory, with_filters

if TYPE_CHECKING:
    from orchard import AsyncSandboxClient, BatchProgress, Judgement, JudgeUsage, TrajectoryInfo, Verdict

judge = typer.Typer(help="Verdicts of language models on what agents did.", no_args_is_help=True)


_KINDS: Final = ("outcome", "gui_success", "rubric", "value_curve", "claw_eval")


@dataclass(frozen=True, slots=True)
class Asking:
    """Options of all commands that judge: who is asked, and what it may take."""

    judges: Annotated[
        list[str] | None,
        typer.Option("--judge", "-j", help="Ask this judge. Default: the first. Can be repeated."),
    ] = None
    votes: Annotated[int, typer.Option("--votes", min=1, max=16, help="Votes of each judge.")] = 1
    instruction: Annotated[
        str | None, typer.Option("--instruction", help="What was to be done. Default: the first message of the user.")
    ] = None
    max_usd: Annotated[float, typer.Option("--max-usd", min=0, help="What it may cost in all. 0: no limit.")] = 0.0
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=0, help="Tokens that it may take in all. 0: no limit.")
    ] = 0
    fresh: Annotated[bool, typer.Option("--fresh", help="Judge anew, whatever is stored.")] = False

    def given(self) -> dict[str, Any]:
        """Fields of a judgement, without what it may take."""
        given: dict[str, Any] = {"judges": tuple(self.judges or ()), "votes": self.votes, "fresh": self.fresh}
        return given if self.instruction is None else given | {"instruction": self.instruction}

    def limits(self) -> dict[str, Any]:
        """What it may take."""
        return {"tokens": self.max_tokens, "cost_usd": self.max_usd}


@dataclass(frozen=True, slots=True)
class Question:
    """Options of the commands that judge trajectories one by one: what is asked, and whether that is kept."""

    kind: Annotated[
        str,
        typer.Option("--kind", "-k", help="outcome, gui_success, rubric, value_curve or claw_eval: what is asked."),
    ] = "outcome"
    rubric: Annotated[
        str,
        typer.Option("--rubric", help="With rubric: its name, or NAME@VERSION.", autocompletion=complete_rubric),
    ] = ""
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Add the verdict to the trajectory: as a reward, or a value curve as values. That a judge failed is"
            " added only where there is no number of that name.",
        ),
    ] = False
    name: Annotated[
        str,
        typer.Option(
            "--name", help="With --keep: what the reward is. Default: outcome, process of a rubric, else the kind."
        ),
    ] = ""

    def check(self) -> None:
        """Refuse options that do not fit each other."""
        if self.kind == "pairwise":
            raise typer.BadParameter("two attempts are compared by `orchard judge compare`", param_hint="--kind")
        if self.kind not in _KINDS:
            raise typer.BadParameter(f"{self.kind!r} is none of {', '.join(_KINDS)}", param_hint="--kind")
        if self.kind == "rubric" and not self.rubric:
            raise typer.BadParameter(
                "name the rubric to judge by; `orchard judge rubrics list` shows which there are",
                param_hint="--rubric",
            )
        if self.rubric and self.kind != "rubric":
            raise typer.BadParameter(f"goes with --kind rubric, not with {self.kind}", param_hint="--rubric")
        if self.name and not self.keep:
            raise typer.BadParameter("names the reward that --keep adds: give --keep too", param_hint="--name")


@judge.command("run")
@with_options("asking", Asking)
@with_options("question", Question)
def run(trajectory: TrajectoryId, question: Question, asking: Asking, json: Json = False) -> None:
    """Judge a trajectory. Ends with exit code 1 where there is no verdict because the judge failed."""
    question.check()
    given = asking.given() | asking.limits() | {"rubric": question.rubric}
    with client() as api:
        with waiting("the judge reads", quiet=json):
            verdict = api.judge.run(api.judge.of_trajectory(trajectory, question.kind, **given))
        if question.keep:
            there = api.trajectories.get(trajectory) if verdict.state == "excluded" else None
            if kept := _kept(verdict, question.name, there):
                api.trajectories.annotate(trajectory, **kept)
    _end(verdict, verdict.state if verdict.value is None else f"{verdict.value:g}", json=json)


@judge.command("compare")
@with_options("asking", Asking)
def compare(
    asking: Asking,
    first: TrajectoryId,
    second: Annotated[str, typer.Argument(help="Another attempt at the task.", autocompletion=complete_trajectory)],
    json: Json = False,
) -> None:
    """Say which of two attempts at a task is better; each judge is asked in both orders."""
    import dataclasses

    given = asking.given() | asking.limits()
    if first == second:
        raise typer.BadParameter("an attempt is compared with another one, not with itself", param_hint="SECOND")
    with client() as api, waiting("the judge reads", quiet=json):
        tasks = [api.trajectories.get(one).task for one in (first, second)]
        if asking.instruction is None and len({(task.dataset, task.instance_id) for task in tasks}) > 1:
            names = " and ".join(f"{task.instance_id!r} of {task.dataset!r}" for task in tasks)
            raise typer.BadParameter(
                f"these are attempts at two tasks, {names}; give what both were to do as --instruction",
                param_hint="SECOND",
            )
        other = api.judge.of_trajectory(second, "pairwise")
        asked = api.judge.of_trajectory(first, "pairwise", **given)
        verdict = api.judge.run(dataclasses.replace(asked, other_steps=other.steps))
    better = {1.0: f"{first} is better", 0.0: f"{second} is better", None: str(verdict.state)}
    _end(verdict, better.get(verdict.value, "neither is better"), json=json)


@judge.command("batch")
@with_filters
@with_options("asking", Asking)
@with_options("question", Question)
def batch(  # noqa: PLR0917 (options of the command line)
    filters: dict[str, Any],
    question: Question,
    asking: Asking,
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids.", metavar="TRAJECTORY...", autocompletion=complete_trajectory)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Every trajectory of the tenant.")] = False,
    batch_id: Annotated[
        str | None, typer.Option("--batch", help="Go on with this batch, or name a new one. Default: a new name.")
    ] = None,
    json: Json = False,
) -> None:
    """Judge many trajectories: by id, by filter, or all. With --json a line for each verdict, as it is reached.

    A batch that was broken off goes on with --batch and pays for no answer twice. A trajectory without a task (no
    message of a user, and no --instruction) is passed over: that is told, and the exit code is 1.
    """
    if ids:
        filters["trajectory_ids"] = ids
    if not filters and not everything:
        raise typer.BadParameter("name trajectories, or give a filter or --all", param_hint="TRAJECTORY")
    question.check()
    named, batch_id = batch_id is not None, batch_id or f"batch-{secrets.token_hex(4)}"
    print(f"batch {batch_id}", file=sys.stderr)  # noqa: T201
    told = _Told(question.name if question.keep else None, json=json)
    work = _batch(batch_id, filters, question, asking, told, named)
    try:
        progress = asyncio.run(work)
    except BaseException as error:
        goes_on = getattr(error, "reason", "") != "ITEM_EXISTS"
        if goes_on and (told.count or isinstance(error, KeyboardInterrupt)):
            print(f"\nbroken off: the same command with --batch {batch_id} goes on", file=sys.stderr)  # noqa: T201
        raise
    if not json:
        counts = [("scored", progress.scored), ("excluded", progress.excluded), ("abstained", progress.abstained)]
        counts += [("passed over", told.left_out)] if told.left_out else []
        show(table(("VERDICTS", ""), [(label, f"{count:,}") for label, count in counts]))
        typer.echo(_cost(progress.usage))
        if progress.budget_exhausted:
            typer.echo(f"the budget has no room for the next call: go on with --batch {batch_id} and a larger one")
    if told.left_out:
        raise typer.Exit(1)


def _kept(verdict: Verdict, name: str, there: TrajectoryInfo | None) -> dict[str, Any]:
    """What a trajectory keeps of a verdict: its reward, or of a value curve the values of its steps.

    Args:
        verdict: of the judge.
        name: of the reward; empty for the usual one.
        there: the trajectory, where the judge failed: that hides no number of before, such as one of tests.
    """
    if verdict.kind == "value_curve" and verdict.values:
        return {"values": verdict.step_values()}
    from orchard._client.trajectories.shaping import newest_reward

    reward = verdict.reward(name)
    before = newest_reward(there, reward.name) if there is not None else None
    if there is not None and before is not None and before.value is not None:
        said = f"{there.trajectory_id}: the judge failed ({verdict.reason}); its {reward.name} of before stays"
        print(said, file=sys.stderr)  # noqa: T201
        return {}
    return {"rewards": reward}


class _Told:
    """What is said of each verdict of a batch. `reward`: its name where it is kept; empty: the usual one."""

    def __init__(self, reward: str | None, *, json: bool) -> None:
        self.reward = reward
        self.json = json
        self.count = 0
        self.cost = 0.0
        self.left_out = 0

    def passed_over(self, trajectory_id: str, why: str) -> None:
        """One that cannot be judged, and keeps no other from it."""
        self.left_out += 1
        print(f"{trajectory_id} is passed over: {why}", file=sys.stderr)  # noqa: T201

    async def verdict(self, api: AsyncSandboxClient, item_id: str, verdict: Verdict) -> None:
        """One more."""
        self.count += 1
        self.cost += verdict.usage.cost_usd
        if self.reward is not None:
            # The same for a repeat of the batch, so that a verdict is added once.
            annotation = f"{verdict.verdict_id}-{self.reward}".rstrip("-")[:128]
            there = await api.trajectories.get(item_id) if verdict.state == "excluded" else None
            if kept := _kept(verdict, self.reward, there):
                await api.trajectories.annotate(item_id, annotation_id=annotation, **kept)
        if self.json:
            print_json({"item_id": item_id, "verdict": verdict})


async def _check_begun(api: AsyncSandboxClient, batch_id: str, question: Question) -> None:
    """Refuse to mix two questions in a batch: the platform takes each item as it is, and its numbers would lie."""
    from orchard import NotFound

    try:
        async with aclosing(api.judge.items(batch_id)) as items:
            begun = await anext(items, None)
    except NotFound:
        return
    if begun is None:
        return
    judged, rubric = begun.verdict.kind, begun.verdict.provenance.rubric
    if judged != question.kind:
        raise typer.BadParameter(
            f"batch {batch_id!r} judges {judged}, not {question.kind}: give that, or another --batch",
            param_hint="--kind",
        )
    # Without a version the newest is meant, which the batch was begun with or goes on to.
    wanted = question.rubric
    if wanted and wanted not in {rubric, rubric.partition("@")[0]}:
        raise typer.BadParameter(
            f"batch {batch_id!r} judges by {rubric}, not by {wanted}: give that, or another --batch",
            param_hint="--rubric",
        )


async def _batch(  # noqa: PLR0917
    batch_id: str, filters: Mapping[str, Any], question: Question, asking: Asking, told: _Told, named: bool
) -> BatchProgress:
    """`named`: the batch was named, and may have begun."""
    from orchard import AsyncSandboxClient, InvalidArgument, TrajectoryNotFound

    given = asking.given() | {"rubric": question.rubric}
    async with AsyncSandboxClient() as api:
        if named:
            await _check_begun(api, batch_id, question)
        ids = [info.trajectory_id async for info in api.trajectories.list(ascending=True, **filters)]
        found = frozenset(ids)
        for given_id in filters.get("trajectory_ids", ()):
            if given_id not in found:
                await api.trajectories.get(given_id)  # raises where there is none; else a filter leaves it out
        if not ids:
            print("no trajectory matches", file=sys.stderr)  # noqa: T201

        async def items() -> AsyncIterator[tuple[str, Judgement]]:
            for trajectory_id in ids:
                try:
                    judgement = await api.judge.of_trajectory(trajectory_id, question.kind, **given)
                except (InvalidArgument, TrajectoryNotFound) as error:
                    # One that has no task, or was deleted meanwhile. What is wrong with all is told by the first.
                    of_one = isinstance(error, TrajectoryNotFound) or error.violations[0].field == "instruction"
                    if not of_one:
                        raise
                    told.passed_over(trajectory_id, error.message)
                else:
                    yield trajectory_id, judgement

        with _bar(len(ids), quiet=told.json) as bar:
            verdicts = api.judge.batch(batch_id, items(), **asking.limits())
            async with aclosing(verdicts):
                async for item in verdicts:
                    await told.verdict(api, item.item_id, item.verdict)
                    bar(told)
        return await api.judge.progress(batch_id)


@contextmanager
def _bar(total: int, *, quiet: bool) -> Iterator[Any]:
    """Shows on stderr how far a batch is and what it cost, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _told: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("judging"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda told: bar.update(task, completed=told.count + told.left_out, description=f"${told.cost:.4f}")


def _end(verdict: Verdict, told: str, *, json: bool) -> None:
    """Print a verdict; exit with 1 where the judge failed."""
    if json:
        print_json(verdict)
    else:
        _show(verdict, told)
    if verdict.state == "excluded":
        raise typer.Exit(1)


def _show(verdict: Verdict, told: str) -> None:
    why = f"{verdict.reason}: {verdict.message}" if verdict.reason else ""
    rows = [("verdict", f"{told}{' (found, not judged anew)' if verdict.cached else ''}"), ("why", why)]
    if verdict.passed is not None:
        rows.append(("passed", "yes" if verdict.passed else "no"))
    rows += [(name, f"{score:g}") for name, score in verdict.scores.items()]
    rows += [(f"state {one.state}", f"{one.value:g}, before step {one.step_index}") for one in verdict.values]
    for vote in verdict.votes:
        answer = str(vote.state) if vote.value is None else f"{vote.value:g}"
        steps = f" (steps {', '.join(map(str, vote.evidence))})" if vote.evidence else ""
        rows.append((vote.judge, f"{answer}{steps} {vote.reasoning or vote.message}"))
    rows += [("left out", f"of {part} {original - kept:,}") for part, _step, original, kept in verdict.provenance.cuts]
    rows += [("id", verdict.verdict_id), ("cost", _cost(verdict.usage))]
    show(table(("", ""), [row for row in rows if row[1]]))


def _cost(usage: JudgeUsage) -> str:
    tokens = usage.prompt_tokens + usage.completion_tokens
    failed = f", {usage.failed_calls:,} of them without an answer" if usage.failed_calls else ""
    return f"${usage.cost_usd:.4f} for {tokens:,} tokens in {usage.calls:,} calls{failed}"
