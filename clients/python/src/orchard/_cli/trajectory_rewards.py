"""What trajectories are trained on: process rewards, and credit for their actions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from orchard._cli.output import Json, client, print_json, show, table
from orchard._cli.trajectory_filters import TrajectoryId, complete_trajectory, with_filters

if TYPE_CHECKING:
    from orchard.data.training.conversations import Curve

_BARS: Final = " ▁▂▃▄▅▆▇█"


@with_filters
def process_reward(  # noqa: PLR0917 (options of the command line)
    filters: dict[str, Any],
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids.", metavar="TRAJECTORY...", autocompletion=complete_trajectory)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Every trajectory of the tenant.")] = False,
    process: Annotated[str, typer.Option("--process", help="How well it worked, 0 to 1.")] = "process",
    alpha: Annotated[float, typer.Option("--alpha", min=0, help="What it counts beside the outcome.")] = 0.5,
    name: Annotated[str, typer.Option("--name", help="What the new reward is.")] = "process_reward",
    json: Json = False,
) -> None:
    """Add outcome (+1 or -1) + alpha * process as a reward to train on: by id, by filter, or all.

    Where one of the two is excluded or abstained, so is the sum. What lacks one of them is left as it is.
    """
    from orchard import process_reward_of

    if ids:
        filters["trajectory_ids"] = ids
    if not filters and not everything:
        raise typer.BadParameter("name trajectories, or give a filter or --all", param_hint="TRAJECTORY")
    rows: list[dict[str, Any]] = []
    with client() as api:
        for info in api.trajectories.list(ascending=True, **filters):
            try:
                reward = process_reward_of(info, process, alpha=alpha, name=name)
            except ValueError as error:
                raise typer.BadParameter(f"{info.trajectory_id}: {error}", param_hint="--process") from None
            if reward is not None:
                api.trajectories.annotate(info.trajectory_id, rewards=reward)
            state = "lacking" if reward is None else str(reward.state)
            value = None if reward is None else reward.value
            rows.append({"trajectory_id": info.trajectory_id, "state": state, "value": value})
    if json:
        print_json(rows)
        return
    show(
        table(
            ("ID", name.upper()),
            [(row["trajectory_id"], row["state"] if row["value"] is None else f"{row['value']:g}") for row in rows],
        )
    )
    if lacking := sum(row["state"] == "lacking" for row in rows):
        typer.echo(f"{lacking} without an outcome or without {process!r}: left as they are")


def credit(trajectory: TrajectoryId, json: Json = False) -> None:
    """Show how the value of a trajectory went from action to action, and which actions raised it."""
    from orchard.data.errors import NoExampleError
    from orchard.data.server import ServerSource
    from orchard.data.training.conversations import conversations, curve_of

    with client() as api:
        api.trajectories.get(trajectory)  # says clearly where there is none
        ((record, _place),) = ServerSource(api, {"trajectory_ids": [trajectory]}).records()
        try:
            curves = [curve for one in conversations(record) if (curve := curve_of(record, one)) is not None]
        except NoExampleError as error:
            typer.echo(f"orchard: {trajectory}: {error}", err=True)
            raise typer.Exit(1) from None
    if json:
        print_json([_plain(curve) for curve in curves])
        return
    if not curves:
        typer.echo(f"{trajectory} has no values: `orchard judge run {trajectory} --kind value_curve --keep`")
    for curve in curves:
        _show(curve)


def _plain(curve: Curve) -> dict[str, Any]:
    return {
        "actions": curve.actions,
        "values": curve.values,
        "segments": [[segment.first, segment.end] for segment in curve.segments],
        "raising_steps": [curve.actions[action] for action in _raising(curve)],
    }


def _raising(curve: Curve) -> list[int]:
    return [action for segment in curve.segments for action in range(segment.first, segment.end)]


def _show(curve: Curve) -> None:
    raising = set(_raising(curve))
    rows = [
        (
            str(action),
            f"[{step}]",
            f"{before:.3f}",
            _bar(before),
            f"{after - before:+.3f}",
            "raises" if action in raising else "",
        )
        for action, (step, before, after) in enumerate(zip(curve.actions, curve.values, curve.values[1:], strict=False))
    ]
    rows.append(("end", "", f"{curve.values[-1]:.3f}", _bar(curve.values[-1]), "", ""))
    show(table(("ACTION", "STEP", "VALUE BEFORE", "", "CREDIT", ""), rows))
    segments = ", ".join(f"[{segment.first}, {segment.end}]" for segment in curve.segments)
    typer.echo(f"rise segments, by state: {segments or 'none'}")


def _bar(value: float) -> str:
    """A bar of ten characters for 0 to 1."""
    eighths = round(value * 80)
    return "█" * (eighths // 8) + _BARS[eighths % 8].strip()
