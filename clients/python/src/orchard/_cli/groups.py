"""Groups of attempts at a prompt: list, show, create, claim, report."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchard._cli.output import Json, age, client, moment, print_json, seconds, show, table

if TYPE_CHECKING:
    from orchard import Group, TrajectoryInfo

groups = typer.Typer(
    help="The attempts at one prompt that a trainer compares: ask for them, report them, see what they teach.",
    no_args_is_help=True,
)


def complete_group(incomplete: str) -> list[tuple[str, str]]:
    """Ids of the newest groups, for the shell's completion; none if the platform does not answer at once."""
    from orchard import OrchardError, SandboxClient

    try:
        with SandboxClient(retry_timeout=0.5) as api:
            newest = islice(api.trajectories.groups.list(), 200)
            return [(one.group_id, one.task.instance_id) for one in newest if one.group_id.startswith(incomplete)]
    except OrchardError:
        return []


GroupId = Annotated[str, typer.Argument(help="The group's id.", metavar="GROUP", autocompletion=complete_group)]


@groups.command("list")
def list_groups(
    closed: Annotated[
        bool | None, typer.Option("--closed/--open", help="Only those whose members are chosen, or are not yet.")
    ] = None,
    dataset: Annotated[list[str] | None, typer.Option("--dataset", help="Only this dataset. Can be repeated.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 100,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print ids alone.")] = False,
    json: Json = False,
) -> None:
    """List groups, newest first, without their samples."""
    with client() as api:
        found = list(islice(api.trajectories.groups.list(closed=closed, datasets=dataset or ()), limit))
    if json:
        print_json(found)
    elif quiet:
        for group in found:
            typer.echo(group.group_id)
    else:
        columns = ("ID", "TASK", "STATE", "STARTED", "SIZE", "VERDICT", "AGE")
        show(table(columns, [_row(group) for group in found]))


def _row(group: Group) -> tuple[str, ...]:
    return (
        group.group_id,
        group.task.instance_id,
        "closed" if group.closed else "open",
        f"{group.started} of {group.plan.maximum}",
        str(group.plan.group_size),
        _verdict(group),
        age(group.create_time),
    )


def _verdict(group: Group) -> str:
    if group.keep is None:
        return ""
    return "keep" if group.keep else f"drop: {group.keep_reason}"


@groups.command("show")
def show_group(group: GroupId, json: Json = False) -> None:
    """Show a group with its samples, who of them is a member, and with which advantage."""
    with client() as api:
        found = api.trajectories.groups.get(group)
    if json:
        print_json(found)
        return
    show(table(("", ""), [row for row in _facts(found) if row[1]]))
    members = {member.sample.index: member for member in found.members}
    rows = []
    for sample in found.samples:
        member = members.get(sample.index)
        trained = "" if member is None else "yes" if member.trainable else "masked"
        rows.append(
            (
                str(sample.index),
                str(sample.outcome),
                "" if sample.reward is None else f"{sample.reward:g}",
                trained,
                "" if member is None else f"{member.advantage:+.3f}",
                sample.trajectory_id,
                sample.reason,
            )
        )
    show(table(("SAMPLE", "OUTCOME", "REWARD", "TRAINED", "ADVANTAGE", "TRAJECTORY", "WHY NOT SCORED"), rows))


def _facts(group: Group) -> list[tuple[str, str]]:
    task, plan = group.task, group.plan
    marks = (("short", group.short), ("fallback: the band could not be kept", group.fallback))
    return [
        ("id", group.group_id),
        ("state", "closed" if group.closed else "open"),
        ("verdict", _verdict(group)),
        ("marks", ", ".join(text for text, holds in marks if holds)),
        (
            "task",
            " ".join(part for part in (task.dataset, task.instance_id, task.repo, task.website, task.split) if part),
        ),
        (
            "plan",
            f"{plan.group_size} of at most {plan.maximum}, {plan.stride} at a time, "
            f"{plan.low:g} to {plan.high:g} positive"
            + (", eager" if plan.eager else "")
            + ("" if plan.need_positive else ", a positive one is not needed"),
        ),
        ("samples", f"{group.started} asked for, {len(group.samples)} ended"),
        ("created", moment(group.create_time)),
        ("closed", moment(group.close_time)),
    ]


@groups.command("create")
def create(  # noqa: PLR0917 (options of the command line)
    group: Annotated[str, typer.Argument(help="An id for it.", metavar="GROUP")],
    instance: Annotated[str, typer.Option("--instance", help="The instance that is attempted.")] = "",
    dataset: Annotated[str, typer.Option("--dataset", help="Its dataset.")] = "",
    repo: Annotated[str, typer.Option("--repo", help="Its repository.")] = "",
    website: Annotated[str, typer.Option("--website", help="Its website.")] = "",
    split: Annotated[str, typer.Option("--split", help="Its split.")] = "",
    size: Annotated[int, typer.Option("--size", min=1, max=10_000, help="Members.")] = 4,
    maximum: Annotated[int, typer.Option("--maximum", min=1, max=10_000, help="Samples at most.")] = 8,
    stride: Annotated[
        int, typer.Option("--stride", min=1, max=10_000, help="Samples between two tries to make a group.")
    ] = 8,
    low: Annotated[float, typer.Option("--low", min=0, max=1, help="Least share of positive members.")] = 0.25,
    high: Annotated[float, typer.Option("--high", min=0, max=1, help="Largest share of positive members.")] = 0.75,
    need_positive: Annotated[
        bool, typer.Option("--need-positive/--no-need-positive", help="Keep it only with a positive outcome.")
    ] = True,
    eager: Annotated[bool, typer.Option("--eager", help="Try after every sample, and cancel the rest.")] = False,
    json: Json = False,
) -> None:
    """Begin a group and print the samples to start, a line each. A repeat prints those that are still to start."""
    from orchard import RolloutPlan, Task

    plan = RolloutPlan(size, maximum, stride, low, high, need_positive, eager)
    with client() as api:
        made = api.trajectories.groups.create(group, task=Task(instance, dataset, repo, website, split), plan=plan)
    if json:
        print_json(made)
        return
    for index in made.start:
        typer.echo(index)


@groups.command("claim")
def claim(  # noqa: PLR0917 (options of the command line)
    group: Annotated[
        str,
        typer.Argument(help="Of which group. Default: any open one.", metavar="[GROUP]", autocompletion=complete_group),
    ] = "",
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=1000, help="At most so many.")] = 1,
    worker: Annotated[str, typer.Option("--worker", help="Who asks.")] = "",
    lease: Annotated[str, typer.Option("--lease", help="How long it may take: 90s, 1h, up to 7d.")] = "1h",
    request_id: Annotated[
        str, typer.Option("--request-id", help="Names the claim: a repeat gets the same samples while it lasts.")
    ] = "",
    json: Json = False,
) -> None:
    """Take samples to make, each for one worker alone; prints a line for each: group, sample, instance."""
    held = seconds("--lease", lease) or 0.0
    with client() as api:
        found = api.trajectories.groups.claim(group, count=count, worker=worker, lease=held, request_id=request_id)
    if json:
        print_json(found)
        return
    for sample in found:
        typer.echo(f"{sample.group_id} {sample.index} {sample.task.instance_id}".rstrip())


def _reward_of(info: TrajectoryInfo, name: str) -> tuple[float | None, str | None]:
    """A trajectory's reward of a name, or why it has no number."""
    from orchard._client.trajectories.shaping import newest_reward

    found = newest_reward(info, name)
    if found is None:
        known = ", ".join(sorted({one.name for one in info.rewards})) or "none"
        raise typer.BadParameter(
            f"{info.trajectory_id} has no reward {name!r}; it has {known}", param_hint="--reward-of"
        )
    return (None, found.reason or str(found.state)) if found.value is None else (found.value, None)


@groups.command("report")
def report(  # noqa: PLR0917 (options of the command line)
    group: GroupId,
    sample: Annotated[int, typer.Argument(help="The sample's index.", metavar="SAMPLE", min=0)],
    reward: Annotated[float | None, typer.Option("--reward", help="What it is trained on.")] = None,
    unscored: Annotated[
        str | None, typer.Option("--unscored", help="No reward: aborted or excluded, for this reason.")
    ] = None,
    reward_of: Annotated[
        str | None, typer.Option("--reward-of", help="The reward of this name that its trajectory has.", metavar="NAME")
    ] = None,
    outcome: Annotated[
        str, typer.Option("--outcome", help="positive or negative, where the reward's sign does not say it.")
    ] = "",
    trajectory: Annotated[str, typer.Option("--trajectory", help="Its trajectory.")] = "",
    json: Json = False,
) -> None:
    """Tell what a sample came to; prints which samples to start, which to cancel, and the verdict of a closed group."""
    if sum(one is not None for one in (reward, unscored, reward_of)) != 1:
        raise typer.BadParameter("give one of --reward, --reward-of and --unscored", param_hint="--reward")
    if unscored is not None and outcome:
        raise typer.BadParameter("goes with --reward", param_hint="--outcome")
    if reward_of is not None and not trajectory:
        raise typer.BadParameter("--reward-of needs the trajectory that has it", param_hint="--trajectory")
    with client() as api:
        if reward_of is not None:
            reward, unscored = _reward_of(api.trajectories.get(trajectory), reward_of)
        after = api.trajectories.groups.report(
            group, sample, reward=reward, outcome=outcome, trajectory_id=trajectory, reason=unscored or ""
        )
    if json:
        print_json(after)
        return
    lines: list[tuple[str, Any]] = [("start", after.start), ("cancel", after.cancel)]
    for what, indices in lines:
        if indices:
            typer.echo(f"{what} {' '.join(map(str, indices))}")
    if after.group is not None:
        typer.echo(f"closed {_verdict(after.group)}")
