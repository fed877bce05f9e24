"""Trajectories: list, show, stats, annotate, delete."""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from orchard._cli.output import Json, age, client, moment, pairs, print_json, show, size, table
from orchard._cli.trajectory_filters import TrajectoryId, complete_trajectory, with_filters

if TYPE_CHECKING:
    from orchard import Reward, SandboxClient, Step, TrajectoryInfo

_SHOWN: Final = 600
_ROLES: Final = {"system": "magenta", "user": "green", "assistant": "cyan", "tool": "yellow"}

trajectories = typer.Typer(help="What agents did: find, read, judge and delete it.", no_args_is_help=True)


@trajectories.command("list")
@with_filters
def list_trajectories(  # noqa: PLR0917 (options of the command line)
    filters: dict[str, Any],
    order: Annotated[str, typer.Option(help="By created, outcome, turns, tokens or cost.")] = "created",
    ascending: Annotated[bool, typer.Option("--ascending", help="Oldest or smallest first.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 100,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print ids alone.")] = False,
    json: Json = False,
) -> None:
    """List trajectories, newest first."""
    with client() as api:
        listed = api.trajectories.list(order=order, ascending=ascending, page_size=min(limit, 1000), **filters)
        found = list(islice(listed, limit))
    if json:
        print_json(found)
    elif quiet:
        for info in found:
            typer.echo(info.trajectory_id)
    else:
        columns = ("ID", "TASK", "MODEL", "STATUS", "OUTCOME", "TURNS", "TOKENS", "COST", "AGE")
        show(table(columns, [_row(info) for info in found]))


def _row(info: TrajectoryInfo) -> tuple[str, ...]:
    totals = info.totals
    return (
        info.trajectory_id,
        info.task.instance_id,
        info.model,
        str(info.status),
        _outcome(info.outcome),
        str(totals.turns),
        f"{totals.prompt_tokens + totals.completion_tokens:,}",
        f"${totals.cost_usd:.2f}" if totals.cost_usd else "",
        age(info.create_time),
    )


def _outcome(reward: Reward | None) -> str:
    if reward is None:
        return ""
    return str(reward.state) if reward.value is None else f"{reward.value:g}"


@trajectories.command("show")
def show_trajectory(  # noqa: PLR0917 (options of the command line)
    trajectory: TrajectoryId,
    steps: Annotated[bool, typer.Option("--steps/--no-steps", help="Show its steps too.")] = True,
    start: Annotated[int, typer.Option("--start", min=0, help="The first step to show.")] = 0,
    full: Annotated[bool, typer.Option("--full", help="Cut no text, and fetch texts that are stored apart.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is added until it is sealed.")
    ] = False,
    json: Json = False,
) -> None:
    """Show a trajectory and its steps. With --json, --follow prints a line for each step."""
    with client() as api:
        if follow:
            for step in api.trajectories.follow(trajectory, start=start):
                _show_step(api, step, full=full, json=json)
            return
        info = api.trajectories.get(trajectory)
        found = api.trajectories.steps(trajectory, start=start) if steps else iter(())
        if json:
            values = api.trajectories.values(trajectory)
            print_json({"trajectory": info, "values": values, "steps": [_plain(api, step, full) for step in found]})
            return
        show(table(("", ""), [row for row in _facts(info) if row[1]]))
        for step in found:
            _show_step(api, step, full=full, json=False)


def _facts(info: TrajectoryInfo) -> list[tuple[str, str]]:
    task, totals = info.task, info.totals
    rewards = [
        f"{reward.name} {_outcome(reward)}" + (f" ({reward.judge})" if reward.judge else "") for reward in info.rewards
    ]
    return [
        ("id", info.trajectory_id),
        ("status", str(info.status)),
        ("message", info.status_message),
        (
            "outcome",
            _outcome(info.outcome) + (f": {info.outcome.reason}" if info.outcome and info.outcome.reason else ""),
        ),
        ("rewards", ", ".join(rewards)),
        (
            "task",
            " ".join(part for part in (task.dataset, task.instance_id, task.repo, task.website, task.split) if part),
        ),
        ("attempt", f"{info.attempt}" + (f" of group {info.group_id}" if info.group_id else "")),
        ("harness", info.harness),
        ("model", " ".join(part for part in (info.model, info.policy_version) if part)),
        ("sandbox", info.sandbox_id),
        ("labels", " ".join(f"{key}={value}" for key, value in sorted(info.labels.items()))),
        ("steps", f"{totals.steps}, {totals.turns} turns, {size(totals.text_bytes)} of text"),
        (
            "tokens",
            f"{totals.prompt_tokens:,} read, {totals.completion_tokens:,} written" if totals.prompt_tokens else "",
        ),
        ("created", moment(info.create_time)),
        ("sealed", moment(info.seal_time)),
    ]


def _plain(api: SandboxClient, step: Step, full: bool) -> Any:
    import dataclasses

    # Texts that are stored apart in the place of their references.
    return dataclasses.replace(step, content=api.trajectories.text(step)) if full else step


def _show_step(api: SandboxClient, step: Step, *, full: bool, json: bool) -> None:
    if json:
        print_json(_plain(api, step, full))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 200, soft_wrap=True, highlight=False)
    error = " (error)" if step.is_error else ""
    console.print(
        Text(f"\n[{step.index}] {step.role} {step.name}{error}".rstrip(), style=_ROLES.get(str(step.role), ""))
    )
    text = api.trajectories.text(step) if full else step.text
    pieces = [step.reasoning, text]
    pieces += [f"{call.name}({call.arguments})" for call in step.tool_calls]
    pieces += [f"<{part.media_type}, {size(part.size)}>" for part in _left_out(step, full)]
    for piece in pieces:
        if piece:
            console.print(Text(piece if full else _cut(piece)))


def _left_out(step: Step, full: bool) -> list[Any]:
    stored = [part for part in step.parts if not isinstance(part, str)]
    return [part for part in stored if not (full and part.media_type == "text/plain")]


def _cut(text: str) -> str:
    if len(text) <= _SHOWN:
        return text.rstrip("\n")
    return f"{text[:_SHOWN]}... ({len(text):,} characters; --full shows all)"


@trajectories.command("stats")
@with_filters
def show_stats(
    filters: dict[str, Any],
    group_by: Annotated[
        str,
        typer.Option(
            "--group-by", "-g", help="harness, model, repo, dataset, website, policy_version or label=KEY; a line each."
        ),
    ] = "",
    k: Annotated[list[int] | None, typer.Option("-k", min=1, max=1000, help="Also pass@k. Can be repeated.")] = None,
    json: Json = False,
) -> None:
    """Count trajectories: how many, how many resolved, turns, tokens, cost and pass@k."""
    dimension, _, label = group_by.partition("=")
    with client() as api:
        found = api.trajectories.stats(group_by=dimension, label=label, ks=k or (), **filters)
    if json:
        print_json(found)
        return
    families = [f"PASS@{n}" for n in k or ()]
    rows = [
        (
            row.value,
            str(row.trajectories),
            str(row.scored),
            str(row.resolved),
            "" if row.resolve_rate is None else f"{row.resolve_rate:.1%}",
            f"{row.mean_turns:.1f}",
            f"{row.mean_tokens:,.0f}",
            f"${row.cost_usd:.2f}",
            *("" if one.any is None else f"{one.any:.1%}" for one in row.pass_at_k),
        )
        for row in found
    ]
    columns = (
        (label or dimension).upper(),
        "COUNT",
        "SCORED",
        "RESOLVED",
        "RATE",
        "TURNS",
        "TOKENS",
        "COST",
        *families,
    )
    show(table(columns, rows))


@trajectories.command("annotate")
def annotate(  # noqa: PLR0917 (options of the command line)
    trajectory: TrajectoryId,
    reward: Annotated[float | None, typer.Option(help="A reward that is a number.")] = None,
    excluded: Annotated[str | None, typer.Option(help="No reward: infrastructure failed, for this reason.")] = None,
    abstained: Annotated[
        str | None, typer.Option(help="No reward: the judge would not decide, for this reason.")
    ] = None,
    name: Annotated[str, typer.Option(help="What the reward is.")] = "outcome",
    judge: Annotated[str, typer.Option(help="Who judged.")] = "",
    rubric: Annotated[str, typer.Option(help="By which rubric.")] = "",
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", "-l", metavar="KEY=VALUE", help="Set a label; without a value it goes. Can be repeated."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Judge a trajectory or label it. A reward supersedes the one of the same name, judge and rubric."""
    from orchard import Reward

    given = [value for value in (reward, excluded, abstained) if value is not None]
    if len(given) > 1 or not (given or label):
        raise typer.BadParameter("give one of --reward, --excluded and --abstained, or --label", param_hint="--reward")
    rewards = []
    if reward is not None:
        rewards.append(Reward.scored(reward, name=name, judge=judge, rubric=rubric))
    elif excluded is not None:
        rewards.append(Reward.excluded(excluded, name=name, judge=judge, rubric=rubric))
    elif abstained is not None:
        rewards.append(Reward.abstained(abstained, name=name, judge=judge, rubric=rubric))
    with client() as api:
        info = api.trajectories.annotate(trajectory, rewards=rewards, labels=pairs("--label", label))
    if json:
        print_json(info)
    else:
        typer.echo(f"{info.trajectory_id} {_outcome(info.outcome)}".rstrip())


@trajectories.command("delete")
@with_filters
def delete(  # noqa: PLR0917 (options of the command line)
    filters: dict[str, Any],
    ids: Annotated[
        list[str] | None,
        typer.Argument(help="Ids.", metavar="TRAJECTORY...", autocompletion=complete_trajectory),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Every trajectory of the tenant.")] = False,
    include_open: Annotated[bool, typer.Option("--include-open", help="Also those that are still written.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")] = False,
    json: Json = False,
) -> None:
    """Delete trajectories for good: by id, by filter, or all. A terminal is asked first."""
    if ids:
        filters["trajectory_ids"] = ids
    if not filters and not everything:
        raise typer.BadParameter("name trajectories, or give a filter or --all", param_hint="TRAJECTORY")
    with client() as api:
        planned = api.trajectories.delete(all=everything, dry_run=True, include_open=include_open, **filters)
        done = planned
        if not dry_run:
            if sys.stdin.isatty() and not yes:
                typer.confirm(f"Delete {planned.trajectories} trajectories for good?", abort=True)
            done = api.trajectories.delete(all=everything, include_open=include_open, **filters)
    if json:
        print_json(done)
        return
    verb = "would delete" if dry_run else "deleted"
    left = f"; {done.open_skipped} open ones stay (--include-open)" if done.open_skipped else ""
    typer.echo(f"{verb} {done.trajectories} trajectories with {size(done.text_bytes)} of text{left}")
